"""Evaluation during training: the validation sets of a run, scored with the training state between two steps.

With validation sets a configuration has one more Program, `evaluate`. The results are those of `eval_lm`, under the
same names: the same rows, the same scoring, the same averages.
"""

import logging
from dataclasses import dataclass, replace

import haliax as hax
import jax
import numpy as np

from haliax_ext.mapping import AxisMapping
from haliax_ext.prefetch import results
from haliax_ext.program import Input, Program
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.task import PlannedEvaluation, Running, TrainingEvaluation
from levanter.commands.train.trained_run import TrainedRun
from levanter.data import (
    EvalBatches,
    EvalSequences,
    EvaluationData,
    LmDataConfig,
    Tokenizer,
    TrainingData,
    concatenate_sequences,
    evaluation_rows,
    held_out_sequences,
)
from levanter.distributed.compile_barrier import jit_together
from levanter.eval.perplexity import EvalResult, RowScores, fetch_scores, summarize
from levanter.io import Progress
from levanter.models.base import LmHeadModel
from levanter.models.registry import LmConfig
from levanter.models.scoring import token_hits
from levanter.trainer.batch_plan import BatchPlan
from levanter.trainer.loss import LmBatch, LmObjective, in_compute_dtype
from levanter.trainer.train_state import TrainState
from levanter.trainer.trainable import bind

logger = logging.getLogger(__name__)

PROGRAM = "evaluate"
# While a batch is fetched to the host, the next one is already dispatched.
FETCH_BEHIND = 1


def text_objective(config: TrainLmConfig, model: LmConfig, kind: LmObjective | None = None) -> LmObjective:
    """An objective of text with the settings of a run.

    Args:
        config: the run's.
        model: its architecture.
        kind: the objective, before the configuration's settings are applied; None for the plain one.
    """
    return replace(
        kind or LmObjective(),
        segments=config.data.block_cross_document_attention,
        z_loss_weight=config.z_loss_weight,
        auxiliary_weights=model.auxiliary_weights,
    )


def evaluation_program(
    run: TrainedRun, objective: LmObjective, largest: BatchPlan, *, accuracy: bool = False
) -> Program:
    """The Program that scores a batch of the validation sets between two steps.

    Args:
        run: the training run.
        objective: its log-probabilities are evaluated.
        largest: see `TrainedRun.evaluation_rows`.
        accuracy: whether it also returns which tokens were the likeliest.
    """
    plan, resolved, precision, rows = run.state_plan, run.resolved, run.precision, run.evaluation_rows(largest)
    objective = objective.in_chunks(run.head(rows).chunk)
    Batch, Pos = hax.Axis(resolved.batch_axis, rows), hax.Axis("position", run.config.positions)
    ids = hax.NamedArray(jax.ShapeDtypeStruct((Batch.size, Pos.size), np.int32), (Batch, Pos))  # pyright: ignore

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
            Input(name="model", value=bind(run.state.model, run.frozen), placement=plan.model),
            Input(name="tokens", value=ids, placement=resolved.mappings.compute),
            Input(name="targets", value=ids, placement=resolved.mappings.compute),
            Input(name="segment_ids", value=ids, placement=resolved.mappings.compute),
        ),
        mappings=resolved.mappings,
        # A few kilobytes that every host reads, hence replicated.
        out_placement=AxisMapping(),
        matmul_precision=precision.matmul,
        compiler_options=run.compiler.working["score"],
    )


def validation_rows(
    config: LmDataConfig,
    validation: EvaluationData,
    data: TrainingData | None,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    positions: int,
) -> EvalSequences:
    """The rows of all validation sets: those with text of their own, and those held out of training data, if any."""
    with_text = held_out = None
    # A set may have text of its own, rows held out of the training rows, or both.
    if validation.sets:
        with_text = evaluation_rows(config, validation.sets, tokenizer, max_length=positions, vocab_size=vocab_size)
    if data is not None:
        separate = config.block_cross_document_attention
        held_out = held_out_sequences(data, tokenizer, separate_documents=separate)
    sequences = concatenate_sequences(with_text, held_out)
    assert sequences is not None, "a run without validation sets has no evaluation"
    return sequences


def plan_evaluation(
    run: TrainedRun, program: Program, config: LmDataConfig, validation: EvaluationData, *, prefix: str | None = None
) -> PlannedEvaluation:
    """The evaluation between steps.

    Args:
        run: the training run.
        program: from `evaluation_program`.
        config: the block of the data whose settings the rows follow.
        validation: its sets.
        prefix: what the numbers' names begin with; None for `eval`, and then rows that are held out of the training
            sets are scored too.
    """

    def start(running: Running) -> Evaluate:
        assert run.tokenizer is not None and isinstance(running.rows, TrainingData)
        data = running.rows if prefix is None else None
        sequences = validation_rows(
            config, validation, data, run.tokenizer, vocab_size=run.vocab, positions=run.config.positions
        )
        running = replace(running, state=None)
        return Evaluate(program=program, running=running, sequences=sequences, prefix=prefix or "eval")

    return PlannedEvaluation(programs=(program,), start=start)


@dataclass(kw_only=True)
class Evaluate(TrainingEvaluation):
    """Evaluates between two steps, and logs the results under the last step's number.

    Attributes:
        program: `evaluate`.
        running: the run.
        sequences: the rows.
        prefix: what the numbers' names begin with.
        result: of the last evaluation.
    """

    program: Program
    running: Running
    sequences: EvalSequences
    prefix: str = "eval"
    result: EvalResult | None = None

    def due(self, taken: int) -> bool:
        """Whether an evaluation is due; the run's last step is always evaluated."""
        return taken % self.running.run.config.trainer.steps_per_eval == 0 or taken == self.running.stop

    def __call__(self, taken: int, state: TrainState) -> None:
        """Scores all sets."""
        running, most = self.running, self.running.run.config.trainer.max_eval_batches
        # The Program fixes the batch; the last batch of a set is padded to it.
        (Batch, _) = self.program.inputs[1].value.axes
        batches = EvalBatches(
            sequences=self.sequences,
            batch_size=Batch.size,
            # The limit counts batches of each set, the reader rows.
            max_rows_per_set=None if most is None else most * Batch.size,
        )
        scores = RowScores(self.sequences.row_count)
        inputs = ((batch, batch.inputs) for batch in batches)
        with Progress("evaluating", total=len(batches), unit="batches", show=running.session.show) as progress:
            for batch, outputs in results(
                self.program,
                running.mesh,
                # The average of the parameters, where the run keeps one.
                bind(state.eval_params, running.frozen),
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
        running.session.tracker.log(self.result.metrics(self.prefix), step=max(taken - 1, 0))
        overall = self.result.overall.micro
        bits = overall.bits_per_byte
        # None where ids do not keep the text.
        progress_note = "" if bits is None else f", {bits:.4f} bits per byte"
        progress_note += (
            "" if overall.accuracy is None else f", {overall.accuracy:.1%} of the tokens were the likeliest"
        )
        logger.info("step %d: validation loss %.4f nats per token%s", taken, overall.loss, progress_note)
