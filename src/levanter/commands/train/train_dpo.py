"""Trains a language model on preferences: of two answers to one prompt, the one that was preferred becomes likelier.

    python -m levanter.main.train_dpo --config_path my_dpo.yaml

The run is that of `train_lm`, with pairs in the place of text and `trainer.preference`'s objective.
"""

from dataclasses import replace

from levanter.commands.shell.perform import perform
from levanter.commands.train.dpo_config import TrainDpoConfig
from levanter.commands.train.train_lm import ENTRY_POINT as TRAINING
from levanter.commands.train.train_lm import describe as describe_training
from levanter.commands.train.work import TrainPlan
from levanter.config import Written
from levanter.run import EntryPoint, Target

NAME = "train_dpo"


def describe(config: TrainDpoConfig, target: Target, *, written: Written | None = None) -> TrainPlan:
    """Describes the training run; reads metadata only.

    Args:
        config: what is trained.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.

    Raises:
        ValueError: see `train_lm`; and the reference is broken, or has other ids.
    """
    return replace(describe_training(config, target, written=written), entry_point=NAME)


def describe_in_full(config: TrainDpoConfig, target: Target, *, written: Written | None = None) -> TrainPlan:
    """Describes the same run without adapters, every weight trained; see `describe`."""
    written = Written.in_python(config) if written is None else written
    return describe(config.without_adapter, target, written=written)


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=TrainDpoConfig,
    describe=describe,
    execute=TRAINING.execute,
    outputs=TRAINING.outputs,
    conclude=TRAINING.conclude,
    facts=TRAINING.facts,
    left=TRAINING.left,
    in_full=describe_in_full,
)


def main(config: TrainDpoConfig, *, written: Written | None = None) -> int:
    """Trains; returns 75 if the run was told to stop before its end and saved itself."""
    return perform(ENTRY_POINT, config, written=written).exit_code
