"""Writes an HTML page of validation text in which each token is shaded by its log-probability.

    python -m levanter.main.viz_logprobs --checkpoint_path checkpoints/run --config_path data.yaml --path logprobs.html

The model is a checkpoint of `train_lm`, or Hugging Face files (`checkpoint_is_hf`, or `hf_checkpoint`). The run is
described like an evaluation (`eval_lm`), with the same Program: one row of text for each document shown.
"""

from dataclasses import dataclass, replace
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.abstract import with_arrays
from haliax_ext.prefetch import results
from levanter.commands.cli.consistency import require_same_text
from levanter.commands.cli.outputs import write_or_keep
from levanter.commands.cli.runner import run_config
from levanter.commands.evaluate import eval_lm
from levanter.commands.evaluate.config import VizLmConfig
from levanter.commands.evaluate.eval_lm import EvalWork
from levanter.commands.model.pretrained import load_pretrained
from levanter.config import ExplicitKeys
from levanter.data import EvalSequences
from levanter.distributed.compile_barrier import jit_together
from levanter.eval.logprob_page import ScoredText, logprob_page
from levanter.eval.perplexity import RowScores, fetch_scores
from levanter.io import Output, Progress
from levanter.runplan import OK, EntryPoint, NonFiniteResultError, RunPlan, Session, Target

NAME = "viz_logprobs"


@dataclass(frozen=True, kw_only=True, eq=False)
class VizWork:
    """The resolved inputs of `execute` besides the Programs.

    Attributes:
        config: as the user wrote it.
        evaluation: the evaluation that scores the rows.
    """

    config: VizLmConfig
    evaluation: EvalWork


def describe(config: VizLmConfig, target: Target, *, written: ExplicitKeys | None = None) -> RunPlan[VizWork]:
    """Describes the run for `target`; reads metadata, no weights, and the text only if it is short."""
    written = ExplicitKeys.in_python(config) if written is None else written
    plan = eval_lm.describe(config.evaluation, target, written=written)
    work = plan.work
    batches = -(-config.num_docs // work.batch_rows)
    # The Program is that of `eval_lm`; only the number of its executions differs.
    (workload,) = plan.workloads
    reason = f"num_docs: at most {config.num_docs} rows"
    viz_plan = replace(
        plan,
        entry_point=NAME,
        workloads=(replace(workload, executions=batches, reason=reason),),
        work=VizWork(config=config, evaluation=work),
    )
    return cast(RunPlan[VizWork], viz_plan)


def execute(plan: RunPlan[VizWork], mesh: Mesh | None, session: Session | None = None) -> list[ScoredText]:
    """Scores the chosen rows; nothing runs that is not in `plan`."""
    assert mesh is not None, "an evaluation runs on devices"
    config, work = plan.work.config, plan.work.evaluation
    show = session is not None and session.show
    sequences = work.sequences or eval_lm.tokenize(work, show=show)
    require_same_text(sequences)
    chosen = chosen_rows(sequences, count=config.num_docs, seed=config.data_seed)
    model = with_arrays(work.pretrained.abstract, load_pretrained(work.pretrained, mesh, show=show).arrays)
    pieces = [chosen[first : first + work.batch_rows] for first in range(0, len(chosen), work.batch_rows)]
    # The last batch is padded with row -1, an empty row.
    batches = [sequences.take(np.pad(part, (0, work.batch_rows - len(part)), constant_values=-1)) for part in pieces]
    inputs = (((part, batch), batch.inputs) for part, batch in zip(pieces, batches, strict=True))
    texts: list[ScoredText] = []
    with Progress("scoring", total=len(chosen), unit="rows", show=show) as progress:
        scored = results(plan.program("score"), mesh, model, inputs, behind=eval_lm.FETCH_BEHIND, jit=jit_together)
        for (part, batch), outputs in scored:
            logprobs, _ = fetch_scores(outputs)
            # A fresh accumulator for each batch: it is only used to find values that are not finite.
            scores = RowScores(sequences.row_count)
            scores.add(batch, logprobs)
            if (bad := scores.first_not_finite(sequences)) is not None:
                raise NonFiniteResultError(f"log-probabilities are not finite: {bad}")
            # NaN marks positions without a scored target.
            values = np.where(batch.loss_mask, logprobs, np.nan)
            for n, row in enumerate(part.tolist()):
                texts.append(_scored(sequences, row, batch.tokens[n], batch.segment_ids[n], values[n]))
            progress.advance(len(part))
    return texts


def chosen_rows(sequences: EvalSequences, *, count: int, seed: int | None) -> np.ndarray:
    """A selection of the rows of all sets, in order.

    Args:
        sequences: all rows.
        count: the number of rows, at most all.
        seed: of the selection; None for the first ones.
    """
    available = sequences.row_count
    if seed is None or count >= available:
        return np.arange(min(count, available))
    # Sorted, so that the page has the order of the data.
    return np.sort(np.random.default_rng(seed).choice(available, count, replace=False))


def _scored(
    sequences: EvalSequences, row: int, tokens: np.ndarray, segments: np.ndarray, shifted: np.ndarray
) -> ScoredText:
    """A row without its padding; the log-probability of a token is at the position before it."""
    # Padding has segment -1.
    real = int((segments >= 0).sum())
    (span,) = [span for span in sequences.sets if span.first_row <= row < span.first_row + span.rows]
    # A value at position i is that of token i + 1; the first token has none.
    logprobs = np.concatenate([[np.nan], shifted[: real - 1]]).astype(np.float32)
    place = f"row {row - span.first_row + 1:,} of {span.rows:,}"
    return ScoredText(name=span.name, place=place, ids=tokens[:real], logprobs=logprobs)


def finish(plan: RunPlan[VizWork], texts: list[ScoredText], session: Session) -> int:
    """Writes the page."""
    config, work = plan.work.config, plan.work.evaluation
    pretrained = work.pretrained
    if session.show:
        page = logprob_page(
            texts,
            pretrained.tokenizer,
            title=f"Log-probabilities of {pretrained.checkpoint.description.split(' (')[0]}",
            facts={
                "model": pretrained.checkpoint.description,
                "tokenizer": pretrained.tokenizer.name,
                "precision": str(pretrained.precision),
                "rows": f"of {work.config.max_eval_length} tokens; rows do not see one another",
                "jax": jax.__version__,
            },
        )
        # Written by one process, which has all texts: results are replicated.
        scored = np.concatenate([text.scored for text in texts])
        print(f"{len(scored):,} tokens, {-scored.mean(dtype=np.float64):.4f} nats per token; page in {config.path}")
        write_or_keep(config.path, page.encode())
    return OK


def outputs(plan: RunPlan[VizWork], session: Session) -> tuple[Output, ...]:
    """The page."""
    del session
    return (Output(key="path", path=plan.work.config.path, kind="file"),)


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=VizLmConfig,
    describe=describe,
    execute=execute,
    outputs=outputs,
    finish=finish,
    tracked=False,
)


def main(config: VizLmConfig, *, written: ExplicitKeys | None = None) -> int:
    """Writes the page, with the devices of this run."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
