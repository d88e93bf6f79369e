"""Trains adapters of a Hugging Face checkpoint on preferences, by upstream's keys.

    python -m levanter.main.lora_dpo --config_path my_lora_dpo.yaml

The run is that of `train_dpo` with `adapter: {type: lora, …}` and `reference: {type: adapter_base}`.
"""

from dataclasses import replace

from levanter.commands.shell.perform import perform
from levanter.commands.train.lora_dpo_config import LoraDpoConfig
from levanter.commands.train.train_dpo import ENTRY_POINT as TRAINING
from levanter.commands.train.train_dpo import describe as describe_training
from levanter.commands.train.work import TrainPlan
from levanter.config import Written
from levanter.run import EntryPoint, Target

NAME = "lora_dpo"


def describe(config: LoraDpoConfig, target: Target, *, written: Written | None = None) -> TrainPlan:
    """Describes the training run; reads metadata only.

    Args:
        config: what is trained.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.

    Raises:
        ValueError: see `train_dpo`.
    """
    written = Written.in_python(config) if written is None else written
    return replace(describe_training(config.training, target, written=written), entry_point=NAME)


def describe_in_full(config: LoraDpoConfig, target: Target, *, written: Written | None = None) -> TrainPlan:
    """Describes the same run without adapters, every weight trained; see `describe`."""
    written = Written.in_python(config) if written is None else written
    plan = describe_training(config.training.without_adapter, target, written=written)
    return replace(plan, entry_point=NAME)


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=LoraDpoConfig,
    describe=describe,
    execute=TRAINING.execute,
    outputs=TRAINING.outputs,
    conclude=TRAINING.conclude,
    facts=TRAINING.facts,
    left=TRAINING.left,
    in_full=describe_in_full,
)


def main(config: LoraDpoConfig, *, written: Written | None = None) -> int:
    """Trains; returns 75 if the run was told to stop before its end and saved itself."""
    return perform(ENTRY_POINT, config, written=written).exit_code
