"""Trains a language model.

    python -m levanter.main.train_lm --config_path config/train/llama2_7b_v4-32.yaml

`describe` derives what a run will do from the config and the number of devices alone: the batch and how it is divided,
the placement of every parameter and of the optimizer state, the Programs (`init_state`, or `init_optimizer` after
loading weights; then `train_step`, one for each batch size of a schedule). `levanter.main.plan train_lm` compiles these
same Programs for a pod that you do not have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from haliax_ext.pytree import PyTree
from levanter.commands.cli.runner import run_config
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.data_task import DataTask
from levanter.commands.train.describe import describe_training, training_entry_point
from levanter.commands.train.lm.evaluation import evaluation_program, plan_evaluation, text_objective
from levanter.commands.train.run import execute as execute
from levanter.commands.train.task import BetweenSteps, Running, TaskRun
from levanter.commands.train.trained_run import TrainedRun
from levanter.commands.train.work import Trained, TrainPlan
from levanter.config import ExplicitKeys
from levanter.data import TrainRows, has_chats
from levanter.models.registry import LmConfig
from levanter.plan.attention_blocks import batch_imbalance
from levanter.runplan import Target
from levanter.trainer.batch_plan import BatchPlan
from levanter.trainer.device_batches import place_rows
from levanter.trainer.loss import LmObjective

NAME = "train_lm"


@dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModeling(DataTask):
    """Next-token prediction on text, conversations, or tokens.

    Attributes:
        kind: the objective, before the configuration's settings are applied.
    """

    kind: LmObjective = field(default_factory=LmObjective)

    def objective(self, model: LmConfig) -> LmObjective:
        """See `TrainingTask.objective`."""
        return text_objective(self.config, model, self.kind)

    def between_steps(self, run: TrainedRun, largest: BatchPlan) -> tuple[BetweenSteps, ...]:
        """The evaluation on the validation sets, if there are any."""
        validation = run.rows.validation
        if validation is None:
            return ()
        accuracy = has_chats(self.config.data)
        program = evaluation_program(run, self.objective(run.model), largest, accuracy=accuracy)
        return (plan_evaluation(run, program, self.config.data, validation),)

    def start(self, running: Running) -> TaskRun:
        """See `TrainingTask.start`; logs the imbalance of attention over devices."""
        # Busiest over mean device, from the segments of a step's rows; None if there is nothing to balance.
        imbalance = batch_imbalance(running.plan)
        # Every stage of a batch schedule has the same inputs but for the number of rows.
        segments = getattr(running.batch(0).value, "segment_ids", None) is not None
        # Rows are read ahead of the steps, so values wait here until the step's metrics are logged.
        by_step: dict[int, float] = {}

        def place(step: int, span: tuple[int, int], rows: TrainRows) -> PyTree:
            del span
            if imbalance is not None:
                by_step[step] = imbalance(rows.segment_ids if segments else None)
            return place_rows(rows, running.batch(step), running.mesh)

        def numbers(step: int) -> Mapping[str, float]:
            # `pop`, since a value is logged once; the dict never grows beyond the rows read ahead.
            return {"throughput/attention_imbalance": by_step.pop(step)} if step in by_step else {}

        return TaskRun(batches=self.placed_batches(running, place), numbers=numbers)


ENTRY_POINT = training_entry_point(NAME, TrainLmConfig, lambda config: LanguageModeling(config=config))


def describe(
    config: TrainLmConfig, target: Target, *, written: ExplicitKeys | None = None, objective: LmObjective | None = None
) -> TrainPlan:
    """Describes a training run for `target`; reads metadata only.

    Args:
        config: what is trained.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.
        objective: a custom objective, from Python, on the same batches. Its segments, z-loss and auxiliary weights come
            from the configuration.

    Raises:
        ValueError: mesh, batch, schedule or precision cannot be resolved. What is wrong with the sharding is in the
            plan.
    """
    written = ExplicitKeys.in_python(config) if written is None else written
    task = LanguageModeling(config=config, kind=objective or LmObjective())
    return describe_training(task, target, written=written, name=NAME)


def train(config: TrainLmConfig) -> Trained:
    """Trains on the available devices; prints the plan before and the outcome after."""
    done = run_config(ENTRY_POINT, config).result
    assert done is not None, "training is done by every process"
    return done


def main(config: TrainLmConfig, *, written: ExplicitKeys | None = None) -> int:
    """Trains; returns 75 if a signal stopped the run before its end and its state was saved."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
