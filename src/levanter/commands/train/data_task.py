"""Tasks whose rows come from `data:`: token stores, mixed in an order that depends on the step alone."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from haliax_ext.pytree import PyTree
from levanter.commands.train.checks import data_checks
from levanter.commands.train.task import Running, TrainingTask
from levanter.commands.train.trained_run import TaskRows, TrainedRun
from levanter.data import (
    FORMATS,
    AbsentTextError,
    BuildProgress,
    DataError,
    DatasetComponent,
    EvaluationData,
    LmDataConfig,
    Tokenizer,
    TrainingData,
    TrainRows,
    build_training,
    resolve_evaluation,
)
from levanter.data.documents import Formats
from levanter.io import Progress
from levanter.runplan import Check
from levanter.trainer.device_batches import placed_batches

Place: TypeAlias = Callable[[int, tuple[int, int], TrainRows], PyTree]
"""(step, rows of the global batch that this process's devices hold, their data) → the step's batch on the devices."""


def find_validation(config: LmDataConfig, formats: Formats = FORMATS) -> TaskRows:
    """The validation sets of a run, if it has any.

    If their text is unavailable, the evaluation is still planned, Program included, but a run does not begin.
    """
    if not config.components:
        return TaskRows(checks=())
    try:
        data = resolve_evaluation(config, in_training=True, formats=formats)
    except AbsentTextError as error:
        # An empty value keeps the Program in the plan; the `unchecked` check prevents a run before the value is used.
        check = Check(name="validation", status="unchecked", message=str(error), error=error)
        return TaskRows(checks=(check,), validation=EvaluationData(sets=(), notes=()))
    except DataError as error:
        return TaskRows(checks=(Check(name="validation", status="error", message=str(error), error=error),))
    # Components without a source are legal (weights may name them) but have nothing to score.
    notes = tuple(
        Check(name="validation", status="note", message=f"data.components.{name}: has no source; nothing is evaluated")
        for name, component in config.components.items()
        if isinstance(component, DatasetComponent) and component.source is None
    )
    if not data.sets and not config.num_validation_sequences:
        return TaskRows(checks=notes)
    # Rows held out of training sets are cut once the token stores exist, so only their number is known here.
    held_out = [f"{name}: {count} rows held out" for name, count in (config.num_validation_sequences or {}).items()]
    message = "; ".join([*map(str, data.sets), *held_out])
    return TaskRows(checks=(Check(name="validation", status="ok", message=message), *notes), validation=data)


@dataclass(frozen=True, kw_only=True, eq=False)
class DataTask(TrainingTask):
    """A task whose rows come from the `data:` block.

    Attributes:
        formats: of the records that it learns from.
    """

    formats: ClassVar[Formats] = FORMATS

    @property
    def held_out_fraction(self) -> float:
        """The fraction of each training set, its last rows, that is held out for validation."""
        return 0.0

    def find_rows(self, tokenizer: Tokenizer | None, *, vocab_size: int) -> TaskRows:
        """See `TrainingTask.find_rows`."""
        checks = data_checks(self.config.data, tokenizer, vocab_size=vocab_size, formats=self.formats)
        rows = find_validation(self.config.data, self.formats)
        # Training and validation describe the same sets; each message is shown once.
        messages = {check.message for check in checks}
        others = (check for check in rows.checks if check.message not in messages)
        return TaskRows(checks=(*checks, *others), validation=rows.validation)

    def build_rows(self, run: TrainedRun, *, show: bool) -> TrainingData:
        """See `TrainingTask.build_rows`: tokenizes what no token store has."""
        config = self.config
        assert run.tokenizer is not None, "a plan without its tokenizer must not run: RunPlan.check() comes first"
        with Progress("tokenizing", total=None, unit="tokens", show=show, lazy=True) as progress:

            def report_progress(step: BuildProgress) -> None:
                progress.advance_to(step.tokens, note=f"{step.fraction:.0%}")

            return build_training(
                config.data,
                run.tokenizer,
                positions=config.positions,
                # The batch schedule is part of the data's order: rows are drawn batch by batch.
                batch_sizes=[(stage.start, stage.plan.rows) for stage in run.batches],
                seed=config.trainer.seed if config.data_seed is None else config.data_seed,
                vocab_size=run.vocab,
                on_progress=report_progress,
                formats=self.formats,
                last_held_out=self.held_out_fraction,
            )

    def placed_batches(self, running: Running, place: Place) -> Callable[[int, int], Generator[tuple[int, PyTree]]]:
        """`TaskRun.batches`, from the rows of `build_rows`.

        Args:
            running: the run.
            place: see `trainer.device_batches.placed_batches`.
        """
        data = running.rows
        assert isinstance(data, TrainingData)

        def batches(first: int, stop: int) -> Generator[tuple[int, PyTree]]:
            return placed_batches(data, running.batch, running.mesh, first=first, stop=stop, place=place)

        return batches
