"""FLOPs and run counts of the Programs of a run, from which the plan models its time.

FLOPs are the model's (`levanter.models.flops`), over all devices. A Program that runs once per job in negligible time
has no workload.
"""

from collections.abc import Callable, Iterator
from typing import Literal

from haliax_ext.program import Program
from levanter.commands.model.pretrained import PretrainedModel
from levanter.data import EvaluationSet, FileDocuments
from levanter.io import file_size, is_remote
from levanter.models.flops import FlopsPerToken
from levanter.models.registry import LmConfig
from levanter.runplan import RunPlan, Workload
from levanter.trainer.batch_plan import BatchStage

COUNTED_CHARACTERS = 1_000_000
"""Texts up to this length in characters are tokenized in a plan, to count batches; longer ones only in a run."""


def is_short(evaluation_set: EvaluationSet) -> bool:
    """Whether a set's text is local and short enough for planning to tokenize it."""
    remaining = COUNTED_CHARACTERS
    # File sizes first: text that is too long by bytes is not opened.
    for part in evaluation_set.document_sources:
        if isinstance(part, FileDocuments) and any(
            is_remote(path) or file_size(path) > remaining for path in part.paths
        ):
            return False
    if not evaluation_set.is_text:
        return True
    # Then by characters, up to the limit.
    for document in evaluation_set.documents():
        remaining -= len(document.text)
        if remaining < 0:
            return False
    return True


def scoring_workload(
    pretrained: PretrainedModel, *, rows: int, positions: int, runs: int | None, reason: str, program: str = "score"
) -> Workload:
    """The work of scoring one batch.

    Args:
        pretrained: the model.
        rows: rows per batch, over all devices.
        positions: tokens in a row.
        runs: number of batches of the job, if known.
        reason: how the number is known, or what would determine it.
        program: name of the Program.
    """

    def flops(attention: Literal["causal", "full"]) -> float:
        per_token = pretrained.config.flops(
            vocab_size=pretrained.Vocab.size, context_length=positions, attention=attention
        )
        return rows * positions * per_token.scoring

    return Workload(
        program=program,
        tokens=rows * positions,
        unit="tokens",
        items=rows * positions,
        flops_full=flops("full"),
        flops_causal=flops("causal"),
        executions=runs,
        reason=reason,
    )


def training_workloads(
    model: LmConfig,
    batches: tuple[BatchStage, ...],
    vocab: int,
    *,
    positions: int,
    steps: int,
    spared: Callable[[FlopsPerToken], float] = lambda _: 0.0,
    sequences: int = 1,
    scored_besides: float = 0.0,
) -> Iterator[Workload]:
    """The work of one step of each Program, and the number of steps.

    Args:
        model: the architecture.
        batches: the stages of the batch size, by first step.
        vocab: ids of the head, without padding rows.
        positions: tokens per row.
        steps: steps of the complete run.
        spared: FLOPs per token that the backward pass saves, such as gradients of frozen weights.
        sequences: sequences per row of a batch.
        scored_besides: additional forward passes, such as that of a reference model.
    """
    # A stage ends where the next one starts, the last one with the run.
    ends = (*(stage.start for stage in batches[1:]), steps)
    # Stages behind the last step take no steps.
    done = [max(0, min(end, steps) - stage.start) for stage, end in zip(batches, ends, strict=True)]
    for distinct in distinct_stages(batches):
        # Stages of equal size run the same Program, so their steps are counted together.
        alike = [n for n, stage in enumerate(batches) if _size(stage) == _size(distinct)]
        tokens = distinct.plan.placed_rows * sequences * positions

        # The default binds this iteration's tokens.
        def flops(attention: Literal["causal", "full"], tokens: int = tokens) -> float:
            per_token = model.flops(vocab_size=vocab, context_length=positions, attention=attention)
            return tokens * (per_token.training - spared(per_token) + scored_besides * per_token.scoring)

        yield Workload(
            program=program_name(distinct),
            tokens=tokens,
            unit="tokens",
            items=tokens,
            flops_full=flops("full"),
            flops_causal=flops("causal"),
            executions=sum(done[n] for n in alike),
            reason="trainer.num_train_steps",
        )


WATCHED = "_watched"
"""Suffix of the name of a train step that also computes histograms."""


def program_name(stage: BatchStage) -> str:
    """The name of a stage's train step: `train_step`; later stages append their first step."""
    return "train_step" if stage.start == 0 else f"train_step_from_{stage.start}"


def stage_program(plan: RunPlan, batches: tuple[BatchStage, ...], step: int, *, watched: bool = False) -> Program:
    """The Program of a step; with `watched`, the one with histograms, if there is one."""
    # The last stage that has started by this step.
    (*_, stage) = [stage for stage in batches if stage.start <= step]
    name = program_name(next(other for other in distinct_stages(batches) if _size(other) == _size(stage)))
    # A run without watched histograms has no such Program.
    names = {program.name for program in plan.programs}
    return plan.program(name + WATCHED if watched and name + WATCHED in names else name)


def distinct_stages(batches: tuple[BatchStage, ...]) -> Iterator[BatchStage]:
    """The stages with distinct batch sizes, each of which needs a Program."""
    seen = set()
    for stage in batches:
        if _size(stage) not in seen:
            yield stage
        seen.add(_size(stage))


def _size(stage: BatchStage) -> tuple[int, int]:
    """The sizes that two stages must share to use one Program."""
    return stage.plan.placed_rows, stage.plan.accumulation
