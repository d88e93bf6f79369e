"""Entry points that translate their own configuration to a `train_lm` run and execute that run."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.lm.train_lm import ENTRY_POINT as TRAINING
from levanter.commands.train.lm.train_lm import describe as describe_training
from levanter.commands.train.work import Trained, TrainPlan, TrainWork
from levanter.config import ExplicitKeys
from levanter.runplan import EntryPoint, Target

C = TypeVar("C")


def aliased_entry_point(
    name: str, config: type[C], training: Callable[[C], TrainLmConfig]
) -> EntryPoint[C, TrainWork, Trained]:
    """The entry point of a command whose configuration is translated to that of `train_lm`.

    Args:
        name: the command's.
        config: the class of its configuration.
        training: a configuration → the run of `train_lm` that it is.
    """

    def describe_translated(run: TrainLmConfig, source: C, target: Target, written: ExplicitKeys | None) -> TrainPlan:
        # The keys are those of the command's own config: its translation also sets keys that the user did not write.
        written = ExplicitKeys.in_python(source) if written is None else written
        return replace(describe_training(run, target, written=written), entry_point=name)

    def describe(config: C, target: Target, *, written: ExplicitKeys | None = None) -> TrainPlan:
        """Describes the training run; reads metadata only.

        Args:
            config: what is trained.
            target: the devices.
            written: the keys that the user wrote; None for a config made in Python.

        Raises:
            ValueError: see `train_lm`.
        """
        return describe_translated(training(config), config, target, written)

    def describe_full_finetune(config: C, target: Target, *, written: ExplicitKeys | None = None) -> TrainPlan:
        """Describes the same run without adapters, every weight trained; see `describe`."""
        return describe_translated(training(config).without_adapter, config, target, written)

    return EntryPoint(
        name=name,
        config=config,
        describe=describe,
        execute=TRAINING.execute,
        outputs=TRAINING.outputs,
        finish=TRAINING.finish,
        facts=TRAINING.facts,
        interrupted_message=TRAINING.interrupted_message,
        describe_full_finetune=describe_full_finetune,
    )
