"""The Programs of a run that generates text, as one value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from haliax_ext.program import Program
from levanter.inference.kv_cache import CachePlan
from levanter.inference.programs import ServedModel, decode_program, prefill_program, start_program
from levanter.inference.prompt_logprobs import score_program


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerationPrograms:
    """The Programs of a run that generates text.

    Attributes:
        cache: the cache that they share.
        start: makes it, and the state of the rows.
        prefill: takes parts of prompts, by (rows, tokens).
        decode: gives rows their next tokens.
        steps: how many, at most.
        score: scores prompts, by the tokens that it takes; none where nobody may ask for that.
    """

    cache: CachePlan
    start: Program
    prefill: Mapping[tuple[int, int], Program]
    decode: Program
    steps: int
    score: Mapping[int, Program] = field(default_factory=dict[int, Program])

    @property
    def all(self) -> tuple[Program, ...]:
        """In the order in which they are first called."""
        return (self.start, *self.prefill.values(), self.decode, *self.score.values())


def generation_programs(
    model: ServedModel,
    cache: CachePlan,
    *,
    prefill: Sequence[tuple[int, int]],
    steps: int = 1,
    score: Sequence[int] = (),
) -> GenerationPrograms:
    """The Programs of a run.

    Args:
        model: the model.
        cache: the cache.
        prefill: of each call for prompts how many it takes of each shard, and tokens of each.
        steps: tokens that a row gets in a call, at most.
        score: tokens of prompts that are scored, of each call.
    """
    buckets = sorted({(rows * cache.shards, tokens) for rows, tokens in prefill}, key=lambda bucket: bucket[::-1])
    return GenerationPrograms(
        cache=cache,
        start=start_program(model, cache),
        prefill={(rows, tokens): prefill_program(model, cache, rows=rows, tokens=tokens) for rows, tokens in buckets},
        decode=decode_program(model, cache, steps=steps),
        steps=steps,
        score={tokens: score_program(model, cache, tokens=tokens) for tokens in sorted(set(score))},
    )
