"""How much work the Programs of a run do and how often they run: the factors of modelled times.

FLOPs are the model's (`levanter.models.flops`), over all devices; a Program that runs once per job and takes negligible
time has no workload.
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
"""Texts up to this length are tokenized to plan how many batches are scored; longer ones only in a run."""


def is_short(each: EvaluationSet) -> bool:
    """Whether a set's text is local and short enough for planning to tokenize it."""
    left = COUNTED_CHARACTERS
    for part in each.document_sources:
        if isinstance(part, FileDocuments) and any(is_remote(path) or file_size(path) > left for path in part.paths):
            return False
    if not each.is_text:
        return True
    for document in each.documents():
        left -= len(document.text)
        if left < 0:
            return False
    return True


def scoring_workload(
    pretrained: PretrainedModel, *, rows: int, positions: int, runs: int | None, reason: str, program: str = "score"
) -> Workload:
    """The work of scoring one batch.

    Args:
        pretrained: the model.
        rows: of a batch, over all devices.
        positions: tokens in a row.
        runs: how many batches the job has, if known.
        reason: how that is known, or what would make it known.
        program: the Program's name.
    """

    def flops(attention: Literal["causal", "full"]) -> float:
        each = pretrained.config.flops(vocab_size=pretrained.Vocab.size, context_length=positions, attention=attention)
        return rows * positions * each.scoring

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
        steps: of the complete run.
        spared: FLOPs per token that the backward pass saves, such as gradients of frozen weights.
        sequences: in a row of a batch.
        scored_besides: forward passes beside the trained one, such as a reference's.
    """
    ends = (*(stage.start for stage in batches[1:]), steps)
    done = [max(0, min(end, steps) - stage.start) for stage, end in zip(batches, ends, strict=True)]
    for own in distinct(batches):
        alike = [n for n, stage in enumerate(batches) if _size(stage) == _size(own)]
        tokens = own.plan.placed_rows * sequences * positions

        def flops(attention: Literal["causal", "full"], tokens: int = tokens) -> float:
            each = model.flops(vocab_size=vocab, context_length=positions, attention=attention)
            return tokens * (each.training - spared(each) + scored_besides * each.scoring)

        yield Workload(
            program=program_name(own),
            tokens=tokens,
            unit="tokens",
            items=tokens,
            flops_full=flops("full"),
            flops_causal=flops("causal"),
            executions=sum(done[n] for n in alike),
            reason="trainer.num_train_steps",
        )


WATCHED = "_watched"
"""Suffix of a train step's name: the same step, with histograms."""


def program_name(stage: BatchStage) -> str:
    """The name of a stage's train step: `train_step`; for later stages with their first step."""
    return "train_step" if stage.start == 0 else f"train_step_from_{stage.start}"


def stage_program(plan: RunPlan, batches: tuple[BatchStage, ...], step: int, *, watched: bool = False) -> Program:
    """The train step that a step runs; `watched` asks for the one with histograms, if there is one."""
    (*_, stage) = [stage for stage in batches if stage.start <= step]
    own = program_name(next(each for each in distinct(batches) if _size(each) == _size(stage)))
    there = {program.name for program in plan.programs}
    return plan.program(own + WATCHED if watched and own + WATCHED in there else own)


def distinct(batches: tuple[BatchStage, ...]) -> Iterator[BatchStage]:
    """The stages that need a Program of their own: one for each size."""
    seen = set()
    for stage in batches:
        if _size(stage) not in seen:
            yield stage
        seen.add(_size(stage))


def _size(stage: BatchStage) -> tuple[int, int]:
    """What two stages must share to be one Program."""
    return stage.plan.placed_rows, stage.plan.accumulation
