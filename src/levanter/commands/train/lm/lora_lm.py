"""Trains adapters of a Hugging Face checkpoint, by upstream's keys.

    python -m levanter.main.lora_lm --config_path my_lora.yaml

The run is that of `train_lm` with `adapter: {type: lora, …}`.
"""

from levanter.commands.cli.runner import run_config
from levanter.commands.train.describe import training_entry_point
from levanter.commands.train.lm.lora_config import LoraLmConfig
from levanter.commands.train.lm.train_lm import LanguageModeling
from levanter.config import ExplicitKeys

NAME = "lora_lm"
ENTRY_POINT = training_entry_point(NAME, LoraLmConfig, lambda config: LanguageModeling(config=config.training))
describe = ENTRY_POINT.describe


def main(config: LoraLmConfig, *, written: ExplicitKeys | None = None) -> int:
    """Trains; returns 75 if a signal stopped the run before its end and its state was saved."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
