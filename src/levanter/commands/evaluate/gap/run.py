"""Compares the losses of two models on the same bytes, independent of their tokenizers.

    python -m levanter.main.perplexity_gap --config_path config/gap/demo.yaml

The steps: the texts are read, and each model is described as in `eval_lm`; then A is loaded, scores all texts and is
freed, and then B. Losses of tokens are spread over the bytes that they cover and
summed up by set and by kind of text. With `model` in place of `model_a` and `model_b` one model is scored by itself.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.abstract import with_arrays
from haliax_ext.load_progress import LoadReport
from haliax_ext.prefetch import results
from haliax_ext.program import Program
from levanter.commands.cli.consistency import require_same_text
from levanter.commands.cli.outputs import write_all
from levanter.commands.cli.runner import run_config
from levanter.commands.evaluate import eval_lm
from levanter.commands.evaluate.gap.config import PerplexityGapConfig
from levanter.commands.evaluate.gap.plan import NAME, GapWork, ModelHalf, describe, lost_text_error
from levanter.commands.model.pretrained import load_pretrained
from levanter.config import ExplicitKeys
from levanter.data import EvalBatches, EvalSequences
from levanter.distributed.compile_barrier import jit_together
from levanter.eval.gap.byte_losses import ComparedDocument, TokenLosses, token_losses
from levanter.eval.gap.files import (
    gap_files,
    gap_table,
    score_files,
    score_summary,
    score_table,
    tracked_score,
    tracker_metrics,
)
from levanter.eval.gap.page import gap_page
from levanter.eval.gap.report import GapReport
from levanter.eval.perplexity import RowScores, fetch_scores
from levanter.io import Output, Progress
from levanter.runplan import OK, EntryPoint, NonFiniteResultError, RunPlan, Session

SHOWN_TEXTS = 12
"""Texts on the page for each direction of the difference."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelLosses:
    """The losses of one model.

    Attributes:
        documents: losses of each text.
        ids: tokens of each text, without BOS.
        loading: report of the loading.
        seconds: that scoring took, compilation included.
    """

    documents: tuple[TokenLosses, ...]
    ids: tuple[np.ndarray, ...]
    loading: LoadReport
    seconds: float


def execute(plan: RunPlan[GapWork], mesh: Mesh | None, session: Session | None = None) -> tuple[ModelLosses, ...]:
    """Scores the texts by each model in turn; nothing runs that is not in `plan`."""
    assert mesh is not None, "models run on devices"
    show = session is not None and session.show
    # Texts of both models first: problems with them are reported before a weight is read.
    rows = [half.work.sequences or eval_lm.tokenize(half.work, show=show) for half in plan.work.halves]
    for half, sequences in zip(plan.work.halves, rows, strict=True):
        require_same_text(sequences)
        if (error := lost_text_error(half.key, sequences)) is not None:
            raise error
    return tuple(
        _scored(plan.work, half, sequences, plan.program(half.program), mesh, show=show)
        for half, sequences in zip(plan.work.halves, rows, strict=True)
    )


def _scored(
    work: GapWork, half: ModelHalf, sequences: EvalSequences, program: Program, mesh: Mesh, *, show: bool
) -> ModelLosses:
    """Loads a model, scores all texts, and frees the model."""
    loaded = load_pretrained(half.work.pretrained, mesh, show=show)
    model = with_arrays(half.work.pretrained.abstract, loaded.arrays)
    batches = EvalBatches(sequences=sequences, batch_size=half.work.batch_rows)
    # One loss for each token of the concatenated documents; NaN until it is scored.
    nats = np.full(len(sequences.stream), np.nan)
    scores = RowScores(sequences.row_count)
    began = time.perf_counter()
    with Progress(f"scoring by {half.key}", total=sequences.token_count, unit="tokens", show=show) as progress:
        inputs = ((batch, batch.inputs) for batch in batches)
        for batch, outputs in results(program, mesh, model, inputs, behind=eval_lm.FETCH_BEHIND, jit=jit_together):
            logprobs, _ = fetch_scores(outputs)
            scores.add(batch, logprobs)
            # The value at position i of a row is that of token i + 1 of the stream.
            nats[sequences.stream_indices(batch.rows)[batch.loss_mask] + 1] = -logprobs[batch.loss_mask].astype(
                np.float64
            )
            progress.advance(int(batch.scored_tokens.sum()))
    if (bad := scores.first_not_finite(sequences)) is not None:
        raise NonFiniteResultError(f"{half.key}: log-probabilities are not finite: {bad}")
    tokens, documents = [], []
    for ids, losses in _by_document(work, half, sequences, nats):
        tokens.append(ids)
        documents.append(losses)
    return ModelLosses(
        documents=tuple(documents),
        ids=tuple(tokens),
        loading=loaded.report,
        seconds=time.perf_counter() - began,
    )


def _by_document(
    work: GapWork, half: ModelHalf, sequences: EvalSequences, nats: np.ndarray
) -> Iterator[tuple[np.ndarray, TokenLosses]]:
    tokenizer = half.work.pretrained.tokenizer
    # BOS, if the tokenizer has one, is a token of the stream but covers no bytes.
    leading = 0 if tokenizer.bos_id is None else 1
    at = 0
    for text in work.texts:
        ids, offsets = tokenizer.encode_with_offsets(text.text)
        end = at + leading + len(ids)
        # The second tokenization gives byte offsets; it must agree with the first one token for token.
        assert np.array_equal(sequences.stream[at + leading : end], ids), (
            f"{text.shard}: tokens differ from their spans"
        )
        yield ids, token_losses(text.text, offsets, nats[at:end], leading=leading)
        at = end
    assert at == len(sequences.stream), f"{at} tokens of {len(sequences.stream)}"


def finish(plan: RunPlan[GapWork], done: tuple[ModelLosses, ...], session: Session) -> int:
    """Prints the comparison, writes its files, and logs metrics to trackers."""
    work = plan.work
    if not session.show:
        return OK
    # With a single model, `first` and `last` are the same losses.
    first, last = done[0], done[-1]
    report = GapReport(model_a=work.halves[0].label, model_b=work.halves[-1].label)
    texts = [
        ComparedDocument(text=text, a=a, b=b)
        for text, a, b in zip(work.texts, first.documents, last.documents, strict=True)
    ]
    for text in texts:
        report.add(text)
    summary = report.summary((first.seconds, last.seconds))
    if work.config.model is not None:
        alone = score_summary(summary)
        print(score_table(alone), flush=True)
        files, metrics = score_files(work.config.folder, alone, texts, first.ids), tracked_score(alone)
    else:
        print(f"A: {work.halves[0].label}\nB: {work.halves[1].label}\n{gap_table(summary)}", flush=True)
        page = gap_page(summary, _shown(texts), title="Two models on the same bytes", facts=_facts(plan, done))
        files, metrics = gap_files(work.config.folder, summary, page), tracker_metrics(summary)
    try:
        # Metrics go to trackers even if the files cannot be written.
        print("\n".join(write_all(files)))
    finally:
        session.tracker.log(metrics, step=0)
        session.tracker.log_summary(metrics)
    return OK


def _shown(texts: list[ComparedDocument]) -> list[ComparedDocument]:
    """The texts on the page: those with the largest differences in either direction."""
    ordered = sorted(texts, key=lambda document: -document.sums.delta_bits)
    # Largest positive differences from the front, largest negative ones from the back; few texts appear once only.
    both = [*ordered[:SHOWN_TEXTS], *ordered[SHOWN_TEXTS:][-SHOWN_TEXTS:]]
    return sorted(both, key=lambda document: -abs(document.sums.delta_bits))


def _facts(plan: RunPlan[GapWork], done: tuple[ModelLosses, ...]) -> dict[str, str]:
    config, facts = plan.work.config, {}
    for half, losses in zip(plan.work.halves, done, strict=True):
        facts[half.key] = (
            f"{half.work.pretrained.checkpoint.description}; tokenizer {half.work.pretrained.tokenizer.name}, rows of "
            f"{half.work.config.max_eval_length:,} tokens, {losses.seconds:.1f} s"
        )
    limits = [
        f"{config.max_docs_per_dataset:,} documents of each set" if config.max_docs_per_dataset else "all documents",
        f"{config.max_doc_bytes:,} bytes of a document" if config.max_doc_bytes else "whole documents",
    ]
    mesh = f"{plan.mesh} of {plan.target.devices} {plan.target.kind}"
    precision = str(plan.work.halves[0].work.pretrained.precision)
    return {**facts, "read": ", ".join(limits), "precision": precision, "mesh": mesh, "jax": jax.__version__}


def outputs(plan: RunPlan[GapWork], session: Session) -> tuple[Output, ...]:
    """The folder of the files."""
    del session
    return (Output(key="output_path", path=plan.work.config.folder, kind="folder"),)


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=PerplexityGapConfig,
    describe=describe,
    execute=execute,
    outputs=outputs,
    finish=finish,
)


def main(config: PerplexityGapConfig, *, written: ExplicitKeys | None = None) -> int:
    """Compares two models on the devices of this run."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
