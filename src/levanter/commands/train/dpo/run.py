"""`PreferenceTask`: training on preference pairs, compared with a reference model."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from haliax_ext.program import Program
from levanter.commands.train.config_diff import ResumeKeys
from levanter.commands.train.data_task import DataTask
from levanter.commands.train.dpo.config import TrainDpoConfig
from levanter.commands.train.dpo.evaluation import EvaluatePairs, PairSet, evaluate_pairs_program
from levanter.commands.train.dpo.reference_logprobs import (
    ReferenceRequest,
    build_stores,
    digest_of_source,
    reference_program,
    reference_stores,
)
from levanter.commands.train.dpo.setup import SCORE, Preferences, find_preferences, kind_of_reference
from levanter.commands.train.lm.evaluation import evaluation_program, plan_evaluation, text_objective
from levanter.commands.train.reference_model import load_reference_model
from levanter.commands.train.task import BetweenSteps, PlannedEvaluation, Running, TaskRun
from levanter.commands.train.trained_run import TrainedRun
from levanter.data import (
    PAIRS,
    EvaluationSet,
    PairRows,
    TrainingData,
    TrainRows,
    as_training_set,
    build_tokens,
)
from levanter.data.rows import Rows
from levanter.data.train_builder import plan_rows
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.runplan import Target
from levanter.trainer.batch_plan import BatchPlan
from levanter.trainer.dpo import PairBatch, PreferenceObjective, place_pairs
from levanter.trainer.loop import Pause
from levanter.trainer.report import StepReport

logger = logging.getLogger(__name__)

TRAIN, VALIDATION = "train", "validation"
TOLERANCE, MOST = 1e-6, 1e-3
"""Deviations of the first loss from that of a policy which equals its reference, in float32: the first causes a warning
(the two forward passes may round differently), the second ends the run."""
TOLERANCE_16, MOST_16 = 0.02, 0.1
"""Likewise in 16 bits."""


class FirstLossError(ValueError):
    """Policy and reference start as the same model, but the first loss shows that they compute different values."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PreferenceTask(DataTask):
    """Preference pairs: of two answers to one prompt, the preferred one becomes likelier than under a reference."""

    config: TrainDpoConfig
    formats = PAIRS
    resume_keys = ResumeKeys(
        silent=frozenset(
            {
                "lm_validation_data",
                "lm_validation_prefix",
                "reference_eval_cache",
                "run_initial_eval",
                "scheduled_eval_steps",
            }
        ),
        # `beta`, `loss`, `reference` and `validation_split_fraction` must not change.
        blocks=frozenset({"reference"}),
    )

    @property
    def held_out_fraction(self) -> float:
        """See `DataTask.held_out_fraction`."""
        return self.config.validation_split_fraction or 0.0

    def objective(self, model: LmConfig) -> PreferenceObjective:
        """See `TrainingTask.objective`."""
        del model
        stored = kind_of_reference(self.config) == "precomputed"
        return PreferenceObjective(loss=self.config.loss, beta=self.config.beta, stored=stored)

    def find_models(self, run: TrainedRun, target: Target) -> Preferences:
        """The reference."""
        return find_preferences(self.config, run, target)

    def programs_before_state(self, run: TrainedRun, largest: BatchPlan) -> tuple[Program, ...]:
        """Scores all pairs with a precomputed reference, which is dropped afterwards."""
        pairs = preferences_in(run)
        return (reference_program(run, pairs, run.evaluation_rows(largest)),) if pairs.kind == "precomputed" else ()

    def between_steps(self, run: TrainedRun, largest: BatchPlan) -> tuple[BetweenSteps, ...]:
        """The evaluation on pairs, and on text."""
        pairs, rows = preferences_in(run), run.evaluation_rows(largest)
        scoring = evaluate_pairs_program(run, pairs, rows)
        cached = None
        if pairs.stores is not None and pairs.kind != "precomputed":
            cached = reference_program(run, pairs, rows)
        text, programs = None, (*(() if cached is None else (cached,)), scoring)
        if pairs.text is not None:
            assert self.config.lm_validation_data is not None
            program = evaluation_program(run, text_objective(self.config, run.model), largest)
            prefix = self.config.lm_validation_prefix
            text = plan_evaluation(run, program, self.config.lm_validation_data, pairs.text, prefix=prefix)
            programs = (*programs, program)

        def start(running: Running) -> EvaluatePairs | None:
            logprobs = validation_logprobs(running) if cached is not None else earlier_logprobs(running)
            # Text is scored at the same steps as pairs.
            text_evaluation = None if text is None else text.start(running)
            return start_evaluation(running, scoring, logprobs, text_evaluation)

        return (PlannedEvaluation(programs=programs, start=start),)

    def before_state(self, running: Running) -> Mapping[str, np.ndarray]:
        """All log-probabilities of a precomputed reference; see `stored_logprobs`."""
        return stored_logprobs(running)

    def start(self, running: Running) -> TaskRun:
        """See `TrainingTask.start`."""
        pairs, logprobs = preferences_in(running.run), step_logprobs(running)

        def place(step: int, span: tuple[int, int], rows: TrainRows) -> PairBatch:
            reference = None if logprobs is None else logprobs(step, *span)
            return place_pairs(rows, running.batch(step), running.mesh, reference)

        check = first_loss_checked(pairs, running.run.precision)
        return TaskRun(batches=self.placed_batches(running, place), listeners=(check,))


def preferences_in(run: TrainedRun) -> Preferences:
    """The reference of a run on preferences."""
    assert isinstance(run.models, Preferences)
    return run.models


def start_evaluation(
    running: Running, program: Program, logprobs: Mapping[str, np.ndarray], text: Pause | None
) -> EvaluatePairs | None:
    """The evaluation on pairs; None if there is nothing to evaluate.

    Args:
        running: the run.
        program: `evaluate_pairs`.
        logprobs: the reference's stored log-probabilities by set; empty if it scores.
        text: the evaluation on text; None for none.
    """
    pairs, sets = preferences_in(running.run), tuple(validation_pairs(running, logprobs))
    if not sets and text is None:
        return None
    rest = replace(running, state=None)
    evaluate = EvaluatePairs(program=program, running=rest, pairs=pairs, sets=sets, text_evaluation=text)
    if pairs.config.run_initial_eval and running.first == 0:
        assert running.state is not None
        evaluate(0, running.state)
    return evaluate


def first_loss_checked(pairs: Preferences, precision: Precision) -> Callable[[StepReport], None]:
    """Checks the loss of step 0, which is known if the policy starts as its reference (ln 2, for DPO).

    Raises:
        FirstLossError: raised by the returned function if the loss differs.
    """
    expected = pairs.first_loss

    def check(report: StepReport) -> None:
        if report.step != 0 or expected is None:
            return
        # In 16 bits the two forward passes may round differently, so the tolerances are wider.
        wide = np.dtype(precision.compute).itemsize >= 4
        # Relative for losses above 1, absolute below.
        off = abs(report.loss - expected) / max(expected, 1.0)
        warned, refused = (TOLERANCE, MOST) if wide else (TOLERANCE_16, MOST_16)
        message = f"the loss of the first step is {report.loss:.7f}; policy and reference are one model, which makes it"
        if off > refused:
            raise FirstLossError(
                f"{message} {expected:.7f}: they do not compute the same\n"
                "  → check that all files of the reference are those of the model that the run begins from"
            )
        if off > warned:
            logger.warning("%s %.7f; the difference is larger than that of rounding", message, expected)
        else:
            logger.info("%s %.7f", message, expected)

    return check


def validation_pairs(running: Running, logprobs: Mapping[str, np.ndarray]) -> Iterator[PairSet]:
    """The pairs that are evaluated: those held out of training sets, and sets with validation data of their own.

    Args:
        running: the run.
        logprobs: the reference's stored log-probabilities by set; see `stored_logprobs`.
    """
    with_text = _validation_sets(running.run)
    # A set may have both held-out pairs and validation data of its own; two sets must not share a name in the metrics.
    taken = {dataset.name for dataset in with_text}
    for dataset in _data(running).sets:
        if dataset.held_out:
            assert isinstance(dataset.rows, PairRows)
            # The held-out pairs are the last ones of the set; `split` maps positions of this order to row numbers.
            numbers = dataset.split(np.arange(dataset.held_out) + len(dataset.rows) - dataset.held_out)
            name = f"{dataset.name}/held_out" if dataset.name in taken else dataset.name
            set_logprobs = logprobs.get(f"{dataset.name}/{TRAIN}")
            # The store covers the set's rows in their own order.
            stored = None if set_logprobs is None else set_logprobs[numbers]
            yield PairSet(name=name, rows=dataset.rows, numbers=numbers, reference=stored)
    for dataset, rows in _process_rows(running.run):
        yield PairSet(
            name=dataset.name,
            rows=rows,
            numbers=np.arange(len(rows)),
            reference=logprobs.get(f"{dataset.name}/{VALIDATION}"),
        )


def _data(running: Running) -> TrainingData:
    assert isinstance(running.rows, TrainingData)
    return running.rows


def _validation_sets(run: TrainedRun) -> Sequence[EvaluationSet]:
    return () if run.rows.validation is None else run.rows.validation.sets


def _process_rows(run: TrainedRun) -> Iterator[tuple[EvaluationSet, PairRows]]:
    """The sets with validation data of their own, laid into rows."""
    assert run.tokenizer is not None
    for dataset in _validation_sets(run):
        records = as_training_set(dataset, folder=dataset.folder)
        # The same token stores as in training, built on first use.
        (tokens,) = build_tokens(run.config.data, [records], run.tokenizer)
        rows = plan_rows(run.config.data, records, tokens, run.config.positions)
        assert isinstance(rows, PairRows)
        yield dataset, rows


def earlier_logprobs(running: Running) -> Mapping[str, np.ndarray]:
    """What `stored_logprobs` returned, before the state existed."""
    assert isinstance(running.earlier, dict)
    return running.earlier


def stored_logprobs(running: Running) -> dict[str, np.ndarray]:
    """All log-probabilities of a precomputed reference, float32 `[pairs, 2]` by set and split; empty for other kinds.

    The model is on the devices only during this call.
    """
    pairs = preferences_in(running.run)
    if pairs.kind != "precomputed":
        return {}
    second = pairs.reference
    assert second is not None and second.origin.checkpoint is not None
    # Training and validation pairs are both scored, since the model is not in memory later.
    wanted = [_wanted(running.run, dataset.name, TRAIN, dataset.rows) for dataset in _data(running).sets]
    wanted += [_wanted(running.run, dataset.name, VALIDATION, rows) for dataset, rows in _process_rows(running.run)]
    # Weights are identified by contents, not by path: a folder may be replaced.
    digest = digest_of_source(second.origin.checkpoint.source)
    return _score_pairs(running, wanted, digest, lambda: load_reference_model(second, running))


def validation_logprobs(running: Running) -> dict[str, np.ndarray]:
    """Likewise of validation pairs only, under the resident reference (`reference_eval_cache`)."""
    run, reference = running.run, running.reference
    # Only held-out rows are evaluated, but a store covers a whole set, as `precomputed` does.
    wanted = [_wanted(run, dataset.name, TRAIN, dataset.rows) for dataset in _data(running).sets if dataset.held_out]
    wanted += [_wanted(run, dataset.name, VALIDATION, rows) for dataset, rows in _process_rows(run)]
    if reference is not None:
        second = run.models.reference
        assert second is not None and second.origin.checkpoint is not None
        digest = digest_of_source(second.origin.checkpoint.source)
    # Without a second model the reference is the frozen base, whose digests were computed on the devices.
    else:
        assert running.frozen_part is not None
        digests = dict(running.frozen_part.digests)
        digest = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    return _score_pairs(running, wanted, digest, lambda: running.frozen if reference is None else reference)


def _wanted(run: TrainedRun, name: str, split: str, rows: Rows) -> ReferenceRequest:
    assert isinstance(rows, PairRows)
    return ReferenceRequest(name=f"{name}/{split}", rows=rows, template=str(run.config.data.chat_template))


def _score_pairs(
    running: Running, wanted: Sequence[ReferenceRequest], digest: str, model: Callable[[], LmHeadModel | None]
) -> dict[str, np.ndarray]:
    pairs, run = preferences_in(running.run), running.run
    assert pairs.stores is not None
    named = pairs.config.reference_model or run.config.pretrained or "the base of the adapters"
    stores = reference_stores(wanted, pairs.stores, reference=named, digest=digest, precision=run.precision)
    return build_stores(stores, wanted, running.plan.program(SCORE), running.mesh, model, show=running.session.show)


def step_logprobs(running: Running) -> Callable[[int, int, int], np.ndarray] | None:
    """(step, first row, end) → the reference's stored log-probabilities; None if steps score with the reference."""
    if preferences_in(running.run).kind != "precomputed":
        return None
    data, logprobs = _data(running), earlier_logprobs(running)
    # In the order of `data.sets`, by which `data.sources` numbers them.
    logprobs_by_set = [logprobs[f"{dataset.name}/{TRAIN}"] for dataset in data.sets]

    def row_logprobs(step: int, start: int, stop: int) -> np.ndarray:
        # For each row of the step's batch: the index of its set, and its row in the set.
        which, numbers = data.sources(step)
        values = [
            logprobs_by_set[set_index][number]
            for set_index, number in zip(which[start:stop], numbers[start:stop], strict=True)
        ]
        # `np.stack` refuses an empty list; a process without rows still needs the right shape.
        return np.stack(values) if values else np.zeros((0, 2), np.float32)

    return row_logprobs
