"""Writes a page that shows some validation text token by token, each as dark as the model was surprised by it.

    python -m levanter.main.viz_logprobs --checkpoint_path checkpoints/run --config_path data.yaml --path logprobs.html

The model is a checkpoint of `train_lm`, or Hugging Face files (`checkpoint_is_hf`, or `hf_checkpoint`). The run is
described like an evaluation (`eval_lm`), with the same Program: one row of text for each document shown.
"""

from dataclasses import dataclass, field, replace
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.abstract import with_arrays
from haliax_ext.batches import results
from levanter.commands.evaluate import eval_lm
from levanter.commands.evaluate.eval_lm import EvalLmConfig, EvalWork
from levanter.commands.model.pretrained import load_pretrained
from levanter.commands.shell.perform import perform
from levanter.commands.shell.sameness import require_same_text
from levanter.config import Written
from levanter.data import EvalSequences, LmDataConfig
from levanter.eval.logprob_page import ScoredText, logprob_page
from levanter.io import Progress, atomic_write
from levanter.models.registry import LmConfig
from levanter.processes.together import jit_together
from levanter.run import OK, EntryPoint, PlanOptions, RunPlan, Session, Target
from levanter.trainer.config import TrainerConfig

NAME = "viz_logprobs"


@dataclass(frozen=True, kw_only=True)
class VizLmConfig:
    """What `viz_logprobs` shows.

    Attributes:
        checkpoint_path: a checkpoint of `train_lm`, or the folder of a run, for its newest.
        checkpoint_is_hf: whether `checkpoint_path` names Hugging Face files.
        hf_checkpoint: Hugging Face files: a folder, a hub id, a .gguf file.
        path: the page.
        num_docs: rows of text that are shown.
        data_seed: which ones; null for the first of them.
        max_eval_length: tokens in a row; where it is not said, no more than the model is meant for (`max_seq_len`).
        trainer: devices, mesh, precision.
        data: the data sets.
        model: the architecture, where the checkpoint does not say; checked against it where it does.
        comparison_model_path, comparison_is_hf: a second model to compare with, not supported yet.
        plan: what planning is told that a run would find out by itself.
    """

    checkpoint_path: str | None = None
    checkpoint_is_hf: bool = False
    hf_checkpoint: str | None = None
    path: str = "logprobs.html"
    num_docs: int = 32
    data_seed: int | None = 0
    max_eval_length: int = 4096
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    data: LmDataConfig = field(default_factory=LmDataConfig)
    model: LmConfig | None = None
    comparison_model_path: str | None = None
    comparison_is_hf: bool = False
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        problems = []
        if (self.checkpoint_path is None) == (self.hf_checkpoint is None):
            problems.append("give one model: checkpoint_path, or hf_checkpoint")
        if self.comparison_model_path is not None:
            problems.append("comparison_model_path: not supported yet; make a page of each model")
        if self.num_docs < 1:
            problems.append(f"num_docs must be at least 1, got {self.num_docs}")
        if self.max_eval_length < 2:
            problems.append(f"max_eval_length must be at least 2 (a token and the next), got {self.max_eval_length}")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def evaluation(self) -> EvalLmConfig:
        """The evaluation whose numbers are shown."""
        named = self.hf_checkpoint or (self.checkpoint_path if self.checkpoint_is_hf else None)
        return EvalLmConfig(
            hf_checkpoint=named,
            checkpoint_path=None if named else self.checkpoint_path,
            trainer=self.trainer,
            data=self.data,
            model=self.model,
            max_eval_length=self.max_eval_length,
            output_path=self.path,
            plan=self.plan,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class VizWork:
    """What `execute` needs beside the Programs.

    Attributes:
        config: as the user wrote it.
        evaluation: what the rows are scored with.
    """

    config: VizLmConfig
    evaluation: EvalWork


def describe(config: VizLmConfig, target: Target, *, written: Written | None = None) -> RunPlan[VizWork]:
    """Describes the run for `target`; reads metadata, no weight, and of the text at most a short one."""
    written = Written.in_python(config) if written is None else written
    plan = eval_lm.describe(config.evaluation, target, written=written)
    work = plan.work
    batches = -(-config.num_docs // work.batch_rows)
    (workload,) = plan.workloads
    reason = f"num_docs: {config.num_docs} rows at most"
    found = replace(
        plan,
        entry_point=NAME,
        workloads=(replace(workload, executions=batches, reason=reason),),
        work=VizWork(config=config, evaluation=work),
    )
    return cast(RunPlan[VizWork], found)


def execute(plan: RunPlan[VizWork], mesh: Mesh | None, session: Session | None = None) -> list[ScoredText]:
    """Scores the chosen rows; nothing runs that is not in `plan`."""
    assert mesh is not None, "an evaluation runs on devices"
    config, work = plan.work.config, plan.work.evaluation
    show = session is not None and session.show
    sequences = work.sequences or eval_lm.tokenize(work, show=show)
    require_same_text(sequences)
    chosen = chosen_rows(sequences, count=config.num_docs, seed=config.data_seed)
    model = with_arrays(work.pretrained.abstract, load_pretrained(work.pretrained, mesh, show=show).arrays)
    parts = [chosen[first : first + work.batch_rows] for first in range(0, len(chosen), work.batch_rows)]
    batches = [sequences.take(np.pad(part, (0, work.batch_rows - len(part)), constant_values=-1)) for part in parts]
    given = (((part, batch), batch.inputs) for part, batch in zip(parts, batches, strict=True))
    found: list[ScoredText] = []
    with Progress("scoring", total=len(chosen), unit="rows", show=show) as progress:
        scored = results(plan.program("score"), mesh, model, given, behind=eval_lm.FETCH_BEHIND, jit=jit_together)
        for (part, batch), logprobs in scored:
            values = np.where(batch.loss_mask, logprobs.array, np.nan)
            for n, row in enumerate(part.tolist()):
                found.append(_scored(sequences, row, batch.tokens[n], batch.segment_ids[n], values[n]))
            progress.advance(len(part))
    return found


def chosen_rows(sequences: EvalSequences, *, count: int, seed: int | None) -> np.ndarray:
    """Some rows of all sets, in order.

    Args:
        sequences: all rows.
        count: how many, where there are so many.
        seed: of the choice; None for the first ones.
    """
    there = sequences.row_count
    if seed is None or count >= there:
        return np.arange(min(count, there))
    return np.sort(np.random.default_rng(seed).choice(there, count, replace=False))


def _scored(
    sequences: EvalSequences, row: int, tokens: np.ndarray, segments: np.ndarray, behind: np.ndarray
) -> ScoredText:
    """A row without its padding; the log-probability of a token stands at the position before it."""
    real = int((segments >= 0).sum())
    (span,) = [span for span in sequences.sets if span.first_row <= row < span.first_row + span.rows]
    logprobs = np.concatenate([[np.nan], behind[: real - 1]]).astype(np.float32)
    place = f"row {row - span.first_row + 1:,} of {span.rows:,}"
    return ScoredText(name=span.name, place=place, ids=tokens[:real], logprobs=logprobs)


def conclude(plan: RunPlan[VizWork], texts: list[ScoredText], session: Session) -> int:
    """Writes the page."""
    config, work = plan.work.config, plan.work.evaluation
    pretrained = work.pretrained
    if session.show:
        page = logprob_page(
            texts,
            pretrained.tokenizer.decode,
            title=f"Log-probabilities of {pretrained.checkpoint.description.split(' (')[0]}",
            facts={
                "model": pretrained.checkpoint.description,
                "tokenizer": pretrained.tokenizer.name,
                "precision": str(pretrained.precision),
                "rows": f"of {work.config.max_eval_length} tokens; a row does not see the one before it",
                "jax": jax.__version__,
            },
        )
        with atomic_write(config.path) as file:
            file.write(page.encode())
        scored = np.concatenate([text.scored for text in texts])
        print(f"{len(scored):,} tokens, {-scored.mean(dtype=np.float64):.4f} nats a token; page in {config.path}")
    return OK


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=VizLmConfig,
    describe=describe,
    execute=execute,
    conclude=conclude,
    tracked=False,
)


def main(config: VizLmConfig, *, written: Written | None = None) -> int:
    """Writes the page with the devices that are here."""
    return perform(ENTRY_POINT, config, written=written).exit_code
