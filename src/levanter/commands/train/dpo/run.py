"""What a run on preference pairs executes in addition: loading the reference, checking the first loss, evaluation."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from haliax_ext.abstract import with_arrays
from levanter.commands.model.sharding import load_weights
from levanter.commands.train.dpo.evaluation import PROGRAM, EvaluatePairs, PairSet
from levanter.commands.train.dpo.reference_logprobs import (
    ReferenceRequest,
    build_stores,
    digest_of_source,
    reference_stores,
)
from levanter.commands.train.dpo.setup import SCORE, Preferences, ReferenceModel
from levanter.commands.train.lm.evaluation import PROGRAM as EVALUATE
from levanter.commands.train.lm.evaluation import Evaluate
from levanter.commands.train.work import TrainPlan, TrainWork
from levanter.data import (
    EvaluationData,
    EvaluationSet,
    PairRows,
    TrainingData,
    as_training_set,
    build_tokens,
    evaluation_rows,
)
from levanter.data.rows import Rows
from levanter.data.train_builder import plan_rows
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision
from levanter.runplan import Session
from levanter.trainer.frozen_identity import FrozenPart
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


def loaded_reference(plan: TrainPlan, mesh: Mesh, *, show: bool) -> LmHeadModel | None:
    """Loads the second model; None if steps need none."""
    work: TrainWork = plan.work
    if work.pairs is None or work.pairs.resident is None:
        return None
    return _loaded(plan, work.pairs.resident, mesh, show=show)


def _loaded(plan: TrainPlan, second: ReferenceModel, mesh: Mesh, *, show: bool) -> LmHeadModel:
    work: TrainWork = plan.work
    assert second.load is not None and second.origin.checkpoint is not None
    logger.info("the reference: %s", second.origin.description)
    loaded = load_weights(
        second.load,
        second.plan,
        second.origin.checkpoint.source,
        mesh,
        show=show,
        allow_nonfinite=work.config.trainer.allow_nonfinite,
    )
    return with_arrays(second.module, loaded.arrays)


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


def pair_evaluation(
    plan: TrainPlan,
    pairs: Preferences,
    mesh: Mesh,
    data: TrainingData,
    session: Session,
    frozen: LmHeadModel | None,
    reference: LmHeadModel | None,
    logprobs: Mapping[str, np.ndarray],
    *,
    last: int,
) -> EvaluatePairs | None:
    """The evaluation between steps; None if there is nothing to evaluate."""
    config, trainer = pairs.config, pairs.config.trainer
    sets = tuple(validation_pairs(plan, data, logprobs))
    text = None if pairs.text is None else _text_evaluation(plan, pairs.text, mesh, session, frozen, last=last)
    if not sets and text is None:
        return None
    return EvaluatePairs(
        program=plan.program(PROGRAM),
        frozen=frozen,
        # With stored log-probabilities the Program has no input for a reference.
        reference=None if pairs.evaluates_alone else reference,
        mesh=mesh,
        sets=sets,
        loss=config.loss,
        beta=config.beta,
        tracker=session.tracker,
        every=trainer.steps_per_eval,
        steps=None if config.scheduled_eval_steps is None else frozenset(config.scheduled_eval_steps),
        last=last,
        max_batches=trainer.max_eval_batches,
        show=session.show,
        text_evaluation=text,
    )


def _text_evaluation(
    plan: TrainPlan,
    text: EvaluationData,
    mesh: Mesh,
    session: Session,
    frozen: LmHeadModel | None,
    *,
    last: int,
) -> Evaluate:
    """The evaluation of the policy on text (`lm_validation_data`)."""
    work: TrainWork = plan.work
    assert work.pairs is not None and work.tokenizer is not None
    config = work.pairs.config
    assert config.lm_validation_data is not None
    rows = evaluation_rows(
        config.lm_validation_data,
        text.sets,
        work.tokenizer,
        max_length=config.positions,
        vocab_size=work.model.vocab_size,
    )
    return Evaluate(
        program=plan.program(EVALUATE),
        frozen=frozen,
        mesh=mesh,
        sequences=rows,
        tracker=session.tracker,
        every=config.trainer.steps_per_eval,
        last=last,
        max_batches=config.trainer.max_eval_batches,
        show=session.show,
        prefix=config.lm_validation_prefix,
    )


def validation_pairs(plan: TrainPlan, data: TrainingData, logprobs: Mapping[str, np.ndarray]) -> Iterator[PairSet]:
    """The pairs that are evaluated: those held out of training sets, and sets with validation data of their own.

    Args:
        plan: the run's.
        data: its training data.
        logprobs: the reference's stored log-probabilities by set; see `stored_logprobs`.
    """
    work: TrainWork = plan.work
    assert work.tokenizer is not None
    with_text = () if work.validation is None else work.validation.sets
    # A set may have both held-out pairs and validation data of its own; two sets must not share a name in the metrics.
    taken = {dataset.name for dataset in with_text}
    for dataset in data.sets:
        if dataset.held_out:
            assert isinstance(dataset.rows, PairRows)
            # The held-out pairs are the last ones of the set; `split` maps positions of this order to row numbers.
            numbers = dataset.split(np.arange(dataset.held_out) + len(dataset.rows) - dataset.held_out)
            name = f"{dataset.name}/held_out" if dataset.name in taken else dataset.name
            set_logprobs = logprobs.get(f"{dataset.name}/{TRAIN}")
            # The store covers the set's rows in their own order.
            stored = None if set_logprobs is None else set_logprobs[numbers]
            yield PairSet(name=name, rows=dataset.rows, numbers=numbers, reference=stored)
    for dataset, rows in _process_rows(plan):
        yield PairSet(
            name=dataset.name,
            rows=rows,
            numbers=np.arange(len(rows)),
            reference=logprobs.get(f"{dataset.name}/{VALIDATION}"),
        )


def _process_rows(plan: TrainPlan) -> Iterator[tuple[EvaluationSet, PairRows]]:
    """The sets with validation data of their own, laid into rows."""
    work: TrainWork = plan.work
    assert work.tokenizer is not None
    for dataset in () if work.validation is None else work.validation.sets:
        records = as_training_set(dataset, folder=dataset.folder)
        # The same token stores as in training, built on first use.
        (tokens,) = build_tokens(work.config.data, [records], work.tokenizer)
        rows = plan_rows(work.config.data, records, tokens, work.config.positions)
        assert isinstance(rows, PairRows)
        yield dataset, rows


def stored_logprobs(plan: TrainPlan, mesh: Mesh, data: TrainingData, *, show: bool) -> dict[str, np.ndarray]:
    """All log-probabilities of a precomputed reference, float32 `[pairs, 2]` by set and split; empty for other kinds.

    The model is on the devices only during this call.
    """
    work: TrainWork = plan.work
    if work.pairs is None or work.pairs.kind != "precomputed":
        return {}
    second = work.pairs.model
    assert second is not None and second.origin.checkpoint is not None
    # Training and validation pairs are both scored, since the model is not in memory later.
    wanted = [_wanted(work, dataset.name, TRAIN, dataset.rows) for dataset in data.sets]
    wanted += [_wanted(work, dataset.name, VALIDATION, rows) for dataset, rows in _process_rows(plan)]
    # Weights are identified by contents, not by path: a folder may be replaced.
    digest = digest_of_source(second.origin.checkpoint.source)
    return _score_pairs(plan, mesh, wanted, digest, lambda: _loaded(plan, second, mesh, show=show), show=show)


def validation_logprobs(
    plan: TrainPlan,
    mesh: Mesh,
    data: TrainingData,
    frozen: LmHeadModel | None,
    reference: LmHeadModel | None,
    part: FrozenPart | None,
    *,
    show: bool,
) -> dict[str, np.ndarray]:
    """Likewise of validation pairs only, under the resident reference (`reference_eval_cache`)."""
    work: TrainWork = plan.work
    if work.pairs is None or work.pairs.stores is None:
        return {}
    # Only held-out rows are evaluated, but a store covers a whole set, as `precomputed` does.
    wanted = [_wanted(work, dataset.name, TRAIN, dataset.rows) for dataset in data.sets if dataset.held_out]
    wanted += [_wanted(work, dataset.name, VALIDATION, rows) for dataset, rows in _process_rows(plan)]
    if reference is not None:
        second = work.pairs.model
        assert second is not None and second.origin.checkpoint is not None
        digest = digest_of_source(second.origin.checkpoint.source)
    # Without a second model the reference is the frozen base, whose digests were computed on the devices.
    else:
        assert part is not None
        digest = hashlib.sha256(json.dumps(dict(part.digests), sort_keys=True).encode()).hexdigest()
    return _score_pairs(plan, mesh, wanted, digest, lambda: frozen if reference is None else reference, show=show)


def _wanted(work: TrainWork, name: str, split: str, rows: Rows) -> ReferenceRequest:
    assert isinstance(rows, PairRows) and work.tokenizer is not None
    return ReferenceRequest(name=f"{name}/{split}", rows=rows, template=str(work.config.data.chat_template))


def _score_pairs(
    plan: TrainPlan,
    mesh: Mesh,
    wanted: Sequence[ReferenceRequest],
    digest: str,
    model: Callable[[], LmHeadModel | None],
    *,
    show: bool,
) -> dict[str, np.ndarray]:
    work: TrainWork = plan.work
    assert work.pairs is not None and work.pairs.stores is not None
    named = work.pairs.config.reference_model or work.config.pretrained or "the base of the adapters"
    stores = reference_stores(wanted, work.pairs.stores, reference=named, digest=digest, precision=work.precision)
    return build_stores(stores, wanted, plan.program(SCORE), mesh, model, show=show)


def step_logprobs(
    plan: TrainPlan, data: TrainingData, logprobs: Mapping[str, np.ndarray]
) -> Callable[[int, int, int], np.ndarray] | None:
    """(step, first row, end) → the reference's stored log-probabilities; None if steps score with the reference."""
    work: TrainWork = plan.work
    if work.pairs is None or not work.pairs.objective.stored:
        return None
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
