"""Evaluation during training: the validation sets of a run, scored with the training state between two steps.

With validation sets a configuration has one more Program, `evaluate`. The results are those of `eval_lm`, under the
same names: the same rows, the same scoring, the same averages.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import haliax as hax
import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.mapping import AxisMapping
from haliax_ext.prefetch import results
from haliax_ext.program import Input, Program
from levanter.data import (
    FORMATS,
    AbsentTextError,
    DataError,
    DatasetComponent,
    EvalBatches,
    EvalSequences,
    EvaluationData,
    LmDataConfig,
    Tokenizer,
    TrainingData,
    concatenate_sequences,
    evaluation_rows,
    held_out_sequences,
    resolve_evaluation,
)
from levanter.data.documents import Formats
from levanter.distributed.compile_barrier import jit_together
from levanter.eval.perplexity import EvalResult, RowScores, fetch_scores, summarize
from levanter.io import Progress
from levanter.mesh import ResolvedMesh
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision
from levanter.models.scoring import token_hits
from levanter.runplan import Check, Recorder
from levanter.trainer.loss import LmBatch, LmObjective, in_compute_dtype
from levanter.trainer.state import StatePlan
from levanter.trainer.train_state import TrainState
from levanter.trainer.trainable import bind

logger = logging.getLogger(__name__)

PROGRAM = "evaluate"
# While a batch is fetched to the host, the next one is already dispatched.
FETCH_BEHIND = 1


def find_validation(config: LmDataConfig, formats: Formats = FORMATS) -> tuple[EvaluationData | None, list[Check]]:
    """The validation sets of a run, if it has any.

    If their text is unavailable, the evaluation is still planned, Program included, but a run does not begin.
    """
    if not config.components:
        return None, []
    try:
        data = resolve_evaluation(config, in_training=True, formats=formats)
    except AbsentTextError as error:
        # An empty value keeps the Program in the plan; the `unchecked` check prevents a run before the value is used.
        absent = EvaluationData(sets=(), notes=())
        return absent, [Check(name="validation", status="unchecked", message=str(error), error=error)]
    except DataError as error:
        return None, [Check(name="validation", status="error", message=str(error), error=error)]
    # Components without a source are legal (weights may name them) but have nothing to score.
    notes = [
        Check(name="validation", status="note", message=f"data.components.{name}: has no source; nothing is evaluated")
        for name, component in config.components.items()
        if isinstance(component, DatasetComponent) and component.source is None
    ]
    if not data.sets and not config.num_validation_sequences:
        return None, notes
    # Rows held out of training sets are cut once the token stores exist, so only their number is known here.
    held_out = [f"{name}: {count} rows held out" for name, count in (config.num_validation_sequences or {}).items()]
    message = "; ".join([*map(str, data.sets), *held_out])
    return data, [Check(name="validation", status="ok", message=message), *notes]


def evaluate_program(
    objective: LmObjective,
    model: LmHeadModel,
    plan: StatePlan,
    *,
    rows: int,
    positions: int,
    precision: Precision,
    resolved: ResolvedMesh,
    compiler_options: Mapping[str, str],
    accuracy: bool = False,
) -> Program:
    """The Program that scores one batch with the parameters of a training run.

    Args:
        objective: of the run; its log-probabilities are evaluated.
        model: its parameters, abstract.
        plan: their placement.
        rows: of a batch.
        positions: tokens per row.
        precision: the run's.
        resolved: its mesh and mappings.
        compiler_options: see `Program`.
        accuracy: whether it also returns which tokens were the likeliest.
    """
    Batch, Pos = hax.Axis(resolved.batch_axis, rows), hax.Axis("position", positions)
    ids = hax.NamedArray(jax.ShapeDtypeStruct((rows, positions), np.int32), (Batch, Pos))  # pyright: ignore

    def evaluate(
        model: LmHeadModel, tokens: hax.NamedArray, targets: hax.NamedArray, segment_ids: hax.NamedArray
    ) -> hax.NamedArray | tuple[hax.NamedArray, hax.NamedArray]:
        # Cast inside the Program: the parameters keep their dtype on the devices, and XLA can fuse the casts.
        usable = in_compute_dtype(model, precision.compute, plan.model)
        batch = LmBatch(tokens=tokens, targets=targets, segment_ids=segment_ids)
        if not accuracy:
            return objective.logprobs(usable, batch)
        # `token_hits` gives log-probabilities and hits in one pass through the head.
        scored = token_hits(usable, tokens, targets, segment_ids=segment_ids, chunk=objective.chunk)
        if type(objective).logprobs is LmObjective.logprobs:
            return scored
        # An objective from Python may define its own log-probabilities; only the hits are taken from the default ones.
        return objective.logprobs(usable, batch), scored[1]

    return Program(
        name=PROGRAM,
        function=evaluate,
        inputs=(
            Input(name="model", value=model, placement=plan.model),
            Input(name="tokens", value=ids, placement=resolved.mappings.compute),
            Input(name="targets", value=ids, placement=resolved.mappings.compute),
            Input(name="segment_ids", value=ids, placement=resolved.mappings.compute),
        ),
        mappings=resolved.mappings,
        # A few kilobytes that every host reads, hence replicated.
        out_placement=AxisMapping(),
        matmul_precision=precision.matmul,
        compiler_options=compiler_options,
    )


def validation_rows(
    config: LmDataConfig, validation: EvaluationData, data: TrainingData, tokenizer: Tokenizer, *, vocab_size: int
) -> EvalSequences:
    """The rows of all validation sets: those with text of their own, and those held out of training data."""
    with_text = None
    # A set may have text of its own, rows held out of the training rows, or both.
    if validation.sets:
        with_text = evaluation_rows(
            config, validation.sets, tokenizer, max_length=data.positions, vocab_size=vocab_size
        )
    held_out = held_out_sequences(
        data, tokenizer.byte_lengths(), separate_documents=config.block_cross_document_attention
    )
    sequences = concatenate_sequences(with_text, held_out)
    assert sequences is not None, "a run without validation sets has no evaluation"
    return sequences


@dataclass(kw_only=True)
class Evaluate:
    """Evaluates between two steps, and logs the results under the last step's number.

    Attributes:
        program: `evaluate`.
        frozen: the part of the model that is not in the state; None for nothing.
        mesh: the devices.
        sequences: the rows.
        tracker: where the numbers go.
        every: steps between two evaluations.
        last: the run's last step, which is always evaluated.
        max_batches: batches of each set; None for all.
        show: whether this process prints.
        prefix: what the numbers' names begin with.
        result: of the last evaluation.
    """

    program: Program
    frozen: LmHeadModel | None
    mesh: Mesh
    sequences: EvalSequences
    tracker: Recorder
    every: int
    last: int
    max_batches: int | None
    show: bool
    prefix: str = "eval"
    result: EvalResult | None = None

    def due(self, taken: int) -> bool:
        """Whether an evaluation is due."""
        return taken % self.every == 0 or taken == self.last

    def __call__(self, taken: int, state: TrainState) -> None:
        """Scores all sets."""
        # The Program fixes the batch; the last batch of a set is padded to it.
        (Batch, _) = self.program.inputs[1].value.axes
        batches = EvalBatches(
            sequences=self.sequences,
            batch_size=Batch.size,
            # The limit counts batches of each set, the reader rows.
            max_rows_per_set=None if self.max_batches is None else self.max_batches * Batch.size,
        )
        scores = RowScores(self.sequences.row_count)
        inputs = ((batch, batch.inputs) for batch in batches)
        with Progress("evaluating", total=len(batches), unit="batches", show=self.show) as progress:
            for batch, outputs in results(
                self.program,
                self.mesh,
                # The average of the parameters, where the run keeps one.
                bind(state.eval_params, self.frozen),
                inputs,
                behind=FETCH_BEHIND,
                jit=jit_together,
            ):
                # Fetched while the next batch is being computed.
                logprobs, hits = fetch_scores(outputs)
                scores.add(batch, logprobs, likeliest=hits)
                progress.advance(1)
        self.result = summarize(self.sequences, scores, max_rows_per_set=batches.max_rows_per_set)
        # Trackers number steps from 0: after `taken` steps the last one is `taken - 1`. An evaluation before the first
        # step is logged under 0.
        self.tracker.log(self.result.metrics(self.prefix), step=max(taken - 1, 0))
        overall = self.result.overall.micro
        bits = overall.bits_per_byte
        # NaN where a tokenizer has no byte lengths.
        progress_note = "" if np.isnan(bits) else f", {bits:.4f} bits per byte"
        progress_note += (
            "" if overall.accuracy is None else f", {overall.accuracy:.1%} of the tokens were the likeliest"
        )
        logger.info("step %d: validation loss %.4f nats per token%s", taken, overall.loss, progress_note)
