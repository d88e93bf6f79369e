"""Trains a language model on preferences: of two answers to one prompt, the one that was preferred becomes likelier.

    python -m levanter.main.train_dpo --config_path my_dpo.yaml

The run is that of `train_lm`, with pairs in the place of text and `trainer.preference`'s objective.
"""

from levanter.commands.cli.runner import run_config
from levanter.commands.train.describe import training_entry_point
from levanter.commands.train.dpo.config import TrainDpoConfig
from levanter.commands.train.dpo.run import PreferenceTask
from levanter.config import ExplicitKeys

NAME = "train_dpo"
ENTRY_POINT = training_entry_point(NAME, TrainDpoConfig, lambda config: PreferenceTask(config=config))
describe = ENTRY_POINT.describe


def main(config: TrainDpoConfig, *, written: ExplicitKeys | None = None) -> int:
    """Trains; returns 75 if a signal stopped the run before its end and its state was saved."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
