"""Evaluates a language model on text: loss, perplexity and bits per byte, per data set and per tag.

    python -m levanter.main.eval_lm --config_path config/eval/demo.yaml

The model comes from Hugging Face files (`hf_checkpoint:` a folder, a hub id, a .gguf file). What happens, in order:
the run is described (files, tokenizer, data, mesh, every parameter's place, the bytes that will be read, the Program
that will run) and checked; the text is tokenized; the weights are streamed into their final shards; the batches are
scored. Whatever is wrong with the input is reported before a weight is read.
"""

import logging
import platform
import time
from dataclasses import dataclass, replace
from typing import Any

import haliax as hax
import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.abstract import with_arrays
from haliax_ext.load_progress import LoadReport
from haliax_ext.mapping import AxisMapping
from haliax_ext.prefetch import results
from haliax_ext.program import Input, Program
from levanter.commands.cli.consistency import require_same_text
from levanter.commands.cli.outputs import output_checks, write_or_show
from levanter.commands.cli.runner import run_config
from levanter.commands.evaluate.config import EvalLmConfig
from levanter.commands.model.pretrained import ModelChoice, PretrainedModel, describe_pretrained, load_pretrained
from levanter.commands.model.scoring_common import (
    configured_rows,
    context_length_checks,
    output_key,
    per_device,
    result_output,
)
from levanter.commands.model.source import ModelBlock
from levanter.commands.model.unsupported import unsupported_option_checks
from levanter.commands.model.workloads import COUNTED_CHARACTERS, is_short, scoring_workload
from levanter.config import ExplicitKeys
from levanter.data import (
    AbsentTextError,
    DataError,
    EvalBatches,
    EvalSequences,
    EvaluationData,
    evaluation_rows,
    has_chats,
    resolve_evaluation,
)
from levanter.data.tokenizer import bos_note
from levanter.distributed.compile_barrier import jit_together
from levanter.eval.perplexity import EvalResult, RowScores, fetch_scores, summarize
from levanter.eval.report import format_result, result_json
from levanter.io import MissingFileError, Output, Progress, UnreadableFileError
from levanter.models.registry import LmConfig
from levanter.models.scoring import token_hits, token_logprobs
from levanter.runplan import OK, Check, EntryPoint, NonFiniteResultError, RunPlan, Session, Target

logger = logging.getLogger(__name__)

NAME = "eval_lm"
DEFAULT_ROWS_PER_DEVICE = 8
MIN_ROW = 128
"""Rows of a short text are not shortened below this length."""
FETCH_BEHIND = 2
"""Batches in flight before a result is fetched, so that host work overlaps with device work."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EvalWork:
    """The resolved inputs of `execute` besides the Programs.

    Attributes:
        config: as the user wrote it.
        pretrained: the model.
        data: the data sets; None if they are not available here.
        batch_rows: rows of a batch.
        sequences: the text's rows, if planning has made them.
    """

    config: EvalLmConfig
    pretrained: PretrainedModel
    data: EvaluationData | None
    batch_rows: int
    sequences: EvalSequences | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results and the timings.

    Attributes:
        result: the results.
        loading: report of the loading.
        scoring_seconds: from the first batch to the last result, compilation included.
        compile_seconds: until the first batch was done.
        scored_tokens: tokens scored.
        not_finite: the first token without a finite log-probability; None if there is none.
    """

    result: EvalResult
    loading: LoadReport
    scoring_seconds: float
    compile_seconds: float
    scored_tokens: int
    not_finite: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Scored tokens per second after the first batch; a single batch is counted itself."""
        return self.scored_tokens / max(self.scoring_seconds, 1e-9)


def describe(config: EvalLmConfig, target: Target, *, written: ExplicitKeys | None = None) -> RunPlan[EvalWork]:
    """Describes the evaluation for `target`; reads metadata, no weights, and the text only if it is short.

    Args:
        config: what is evaluated.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.
    """
    return _describe(config, target, ExplicitKeys.in_python(config) if written is None else written, None)


def _describe(
    config: EvalLmConfig, target: Target, written: ExplicitKeys, filled_rows: int | None
) -> RunPlan[EvalWork]:
    """As `describe`.

    Args:
        config: what is evaluated.
        target: the devices.
        written: the keys that the user wrote.
        filled_rows: the number of rows of the text, if they are fewer than those of a batch and known.
    """
    data, checks = _find_data(config)
    pretrained = describe_pretrained(
        ModelChoice.of(
            config,
            files=config.reference or None,
            saved=config.checkpoint_path,
            model=ModelBlock.of(config.model, written),
            # The checkpoint's own tokenizer is used unless the user wrote another one; the config's default does not
            # count.
            tokenizer=config.data.tokenizer if "data.tokenizer" in written else None,
        ),
        target,
        batch=lambda ways: batch_rows(config, ways, filled_rows)[0],
        positions=config.max_eval_length,
    )
    trained_length = pretrained.config.max_seq_len
    if pretrained.local_tokenizer is not None:
        note = bos_note(
            pretrained.local_tokenizer, enforce=config.data.enforce_bos, what="document", key="data.enforce_bos"
        )
        checks += [] if note is None else [Check(name="data", status="note", message=note)]
    # The default may exceed the model's context, which is known only now. Described again with the shorter length,
    # marked as written so that this happens once.
    if "max_eval_length" not in written and config.max_eval_length > trained_length:
        chosen = replace(written, keys=written.keys | {"max_eval_length"})
        return _describe(replace(config, max_eval_length=trained_length), target, chosen, filled_rows)
    checks += [*pretrained.checks, *unsupported_option_checks(config, written)]
    checks += _length_checks(config.max_eval_length, pretrained.config)
    rows, why = batch_rows(config, pretrained.resolved.batch_ways, filled_rows)
    checks.append(Check(name="batch", status="ok", message=f"{rows} rows of {config.max_eval_length} tokens: {why}"))
    checks += output_checks(*output_key(config))
    work = EvalWork(config=config, pretrained=pretrained, data=data, batch_rows=rows)
    try:
        batches, how, sequences = _count_batches(work)
    except (DataError, MissingFileError, UnreadableFileError) as error:
        checks.append(Check(name="text", status="error", message=str(error), error=error))
        batches, how, sequences = None, "the text cannot be read", None
    if sequences is not None and filled_rows is None:
        # The rows of short text are known: described again, with a batch that is no larger than the text fills.
        length, filled = _filled(sequences, rows)
        if length < config.max_eval_length or filled < rows:
            chosen = replace(written, keys=written.keys | {"max_eval_length"})
            return _describe(replace(config, max_eval_length=length), target, chosen, filled)
    if sequences is not None:
        losses = (f"no bits per byte for {loss}" for loss in sequences.text_losses)
        checks += [Check(name="data", status="note", message=message) for message in losses]
    return pretrained.run_plan(
        NAME,
        target,
        checks=checks,
        computing=(
            score_program(pretrained, rows=rows, positions=config.max_eval_length, accuracy=has_chats(config.data)),
        ),
        workloads=(
            scoring_workload(pretrained, rows=rows, positions=config.max_eval_length, runs=batches, reason=how),
        ),
        work=replace(work, sequences=sequences),
        searchable=pretrained.searchable(
            positions=config.max_eval_length,
        ),
    )


def _length_checks(length: int, model: LmConfig) -> list[Check]:
    """Refuses or notes rows that are longer than the trained context."""
    if length <= model.max_seq_len:
        return []
    return context_length_checks(
        model, f"max_eval_length: {length:,} tokens per row", name="rows", advice="max_eval_length:"
    )


def _find_data(config: EvalLmConfig) -> tuple[EvaluationData | None, list[Check]]:
    """The data sets, if they are available here."""
    try:
        # Absent text is no error here: another machine may have it.
        data = resolve_evaluation(config.data, split="train" if config.eval_on_train else None)
    except AbsentTextError as error:
        return None, [Check(name="text", status="unchecked", message=str(error), error=error)]
    except DataError as error:
        return None, [Check(name="data", status="error", message=str(error), error=error)]
    notes = [Check(name="data", status="note", message=note) for note in data.notes]
    return data, [Check(name="data", status="ok", message="; ".join(map(str, data.sets))), *notes]


def _count_batches(work: EvalWork) -> tuple[int | None, str, EvalSequences | None]:
    """The number of batches, the reason for it, and the text's rows if they were needed to count."""
    config, limit = work.config, work.config.trainer.max_eval_batches
    if (tokens := config.plan.assume_tokens) is not None:
        # A row shares one token with the next, so that every token but the first is scored once.
        rows = -(-(tokens - 1) // (config.max_eval_length - 1)) if tokens > 1 else 1
        batches = -(-rows // work.batch_rows)
        return batches if limit is None else min(batches, limit), f"{tokens:,} tokens (plan.assume_tokens)", None
    # Without text or tokenizer nothing can be counted; the plan's work stays unknown.
    if work.data is None or work.pretrained.local_tokenizer is None:
        what = "the text" if work.data is None else "the tokenizer"
        return None, f"{what} is not available here; set plan.assume_tokens (--assume_tokens N)", None
    if not all(is_short(dataset) for dataset in work.data.sets):
        return None, f"the text has more than {COUNTED_CHARACTERS:,} characters; set plan.assume_tokens", None
    # Short text is tokenized while planning, and the rows are passed on to `execute`.
    sequences = tokenize(work, show=False)
    batches = _batches(work, sequences)
    return len(batches), f"{sequences.token_count:,} tokens of text", sequences


def _filled(sequences: EvalSequences, rows: int) -> tuple[int, int]:
    """The length of rows and the number of rows that a text fills, at most those of a batch of `rows`."""
    length, tokens = sequences.max_length, max((span.stop - span.start for span in sequences.sets), default=0)
    # Sets given as rows (chats) keep their length. Halves are sharded as the whole is; below 128 nothing is gained.
    while length % 2 == 0 and length // 2 >= max(tokens, MIN_ROW) and all(s.stride is None for s in sequences.sets):
        length //= 2
    # A row that contains a whole set is its only one.
    filled = len(sequences.sets) if length < sequences.max_length else sequences.row_count
    return length, min(filled, rows)


def batch_rows(config: EvalLmConfig, ways: int, filled_rows: int | None = None) -> tuple[int, str]:
    """Rows of a global batch, and why.

    Args:
        config: what is evaluated.
        ways: shards of the batch axis.
        filled_rows: see `_describe`.
    """
    # Per device and step by configuration; a batch covers all shards of the batch axis.
    rows, why = configured_rows(config.trainer) or (DEFAULT_ROWS_PER_DEVICE, "the default")
    if filled_rows is not None and -(-max(filled_rows, 1) // ways) < rows:
        rows, why = -(-max(filled_rows, 1) // ways), f"the text fills {filled_rows}"
    return rows * ways, per_device(rows, why, ways)


def score_program(pretrained: PretrainedModel, *, rows: int, positions: int, accuracy: bool = False) -> Program:
    """The Program that scores one batch: model, tokens, targets, segments → log-probabilities, `[batch, position]`.

    Args:
        pretrained: the model.
        rows: of a batch.
        positions: tokens in a row.
        accuracy: whether it also returns which tokens were the likeliest.
    """
    Batch, Pos = hax.Axis(pretrained.resolved.batch_axis, rows), hax.Axis("position", positions)
    ids = hax.NamedArray(jax.ShapeDtypeStruct((rows, positions), np.int32), (Batch, Pos))  # pyright: ignore
    mappings = pretrained.resolved.mappings

    def score(
        model: Any, tokens: hax.NamedArray, targets: hax.NamedArray, segment_ids: hax.NamedArray
    ) -> hax.NamedArray | tuple[hax.NamedArray, hax.NamedArray]:
        # Hits cost a pass over the logits for the argmax, so they are computed for chats only.
        if not accuracy:
            return token_logprobs(model, tokens, targets, segment_ids=segment_ids)
        return token_hits(model, tokens, targets, segment_ids=segment_ids)

    return Program(
        name="score",
        function=score,
        inputs=(
            Input(name="model", value=pretrained.abstract, placement=pretrained.sharding),
            Input(name="tokens", value=ids, placement=mappings.compute),
            Input(name="targets", value=ids, placement=mappings.compute),
            Input(name="segment_ids", value=ids, placement=mappings.compute),
        ),
        mappings=mappings,
        # A few kilobytes that every host reads, hence replicated.
        out_placement=AxisMapping(),
        matmul_precision=pretrained.precision.matmul,
        compiler_options=pretrained.compiler_options,
    )


def execute(plan: RunPlan[EvalWork], mesh: Mesh | None, session: Session | None = None) -> Evaluation:
    """Tokenizes, loads, scores; nothing runs that is not in `plan`."""
    assert mesh is not None, "an evaluation runs on devices"
    work, show = plan.work, session is not None and session.show
    # Text first: whatever is wrong with it is reported before a weight is read.
    sequences = work.sequences or tokenize(work, show=show)
    # Hosts with different text would run different numbers of batches and hang.
    require_same_text(sequences)
    batches = _batches(work, sequences)
    loaded = load_pretrained(work.pretrained, mesh, show=show)
    model = with_arrays(work.pretrained.abstract, loaded.arrays)
    scores = RowScores(sequences.row_count)
    began = time.perf_counter()
    first = done = 0.0
    program = plan.program("score")
    with Progress("scoring", total=_scored_tokens(batches), unit="tokens", show=show) as progress:
        inputs = ((batch, batch.inputs) for batch in batches)
        for batch, outputs in results(program, mesh, model, inputs, behind=FETCH_BEHIND, jit=jit_together):
            logprobs, hits = fetch_scores(outputs)
            scores.add(batch, logprobs, likeliest=hits)
            # The first result includes compilation.
            first = first or time.perf_counter() - began
            done += batch.scored_tokens.sum()
            progress.advance_to(done)
    return Evaluation(
        result=summarize(sequences, scores, max_rows_per_set=batches.max_rows_per_set),
        loading=loaded.report,
        scoring_seconds=time.perf_counter() - began,
        compile_seconds=first,
        scored_tokens=int(done),
        not_finite=scores.first_not_finite(sequences),
    )


def _scored_tokens(batches: EvalBatches) -> int:
    rows = batches.rows
    step = 4096  # rows whose masks are made at once
    return sum(int(batches.sequences.take(rows[i : i + step]).scored_tokens.sum()) for i in range(0, len(rows), step))


def _batches(work: EvalWork, sequences: EvalSequences) -> EvalBatches:
    limit = work.config.trainer.max_eval_batches
    return EvalBatches(
        sequences=sequences,
        batch_size=work.batch_rows,
        max_rows_per_set=None if limit is None else limit * work.batch_rows,
    )


def tokenize(work: EvalWork, *, show: bool) -> EvalSequences:
    """The rows of a run's text."""
    config = work.config
    assert work.data is not None, "a plan without its text must not run: RunPlan.check() comes first"
    with Progress("tokenizing", total=None, unit="characters", show=show) as progress:
        return evaluation_rows(
            config.data,
            work.data.sets,
            work.pretrained.tokenizer,
            max_length=config.max_eval_length,
            vocab_size=work.pretrained.Vocab.size,
            on_progress=progress.advance_to,
        )


def finish(plan: RunPlan[EvalWork], done: Evaluation, session: Session) -> int:
    """Prints the results, then writes them: if writing fails, they have been shown."""
    # Metrics go to trackers even if the output cannot be written.
    try:
        if session.show:
            (output,) = outputs(plan, session)
            facts = run_facts(plan, done)
            print(format_result(done.result, {**facts, "written to": output.path}), flush=True)
            write_or_show(output.path, result_json(done.result, facts))
    finally:
        session.tracker.log(done.result.metrics(), step=0)
        session.tracker.log_summary(done.result.metrics())
    if done.not_finite is not None:
        raise NonFiniteResultError(f"the loss is not finite: {done.not_finite}")
    return OK


def outputs(plan: RunPlan[EvalWork], session: Session) -> tuple[Output, ...]:
    """The file of the results."""
    return (result_output(plan.work.config, session.run_id, "eval_lm.json", kind="file"),)


def run_facts(plan: RunPlan[EvalWork], done: Evaluation) -> dict[str, str]:
    """Facts shown with the results: model source, devices, times, versions."""
    report = done.loading
    return {
        "model": plan.work.pretrained.checkpoint.description,
        "precision": str(plan.work.pretrained.precision),
        "mesh": f"{plan.mesh} of {plan.target.devices} {plan.target.kind}",
        "loading": str(report),
        "scoring": f"{done.scored_tokens:,} tokens in {done.scoring_seconds:.1f} s = {done.tokens_per_second:,.0f} "
        f"tokens/s (first batch after {done.compile_seconds:.1f} s, compilation included)",
        "versions": f"Python {platform.python_version()}, jax {jax.__version__}",
    }


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=EvalLmConfig,
    describe=describe,
    execute=execute,
    outputs=outputs,
    finish=finish,
)


def main(config: EvalLmConfig, *, written: ExplicitKeys | None = None) -> int:
    """Runs an evaluation on the devices of this run."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
