"""Engines on a tiny Llama with random weights, on any mesh of the virtual devices, and what they were seen to do."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from helpers.llama_on_mesh import abstract_model, mappings_for, place, random_arrays, tiny_config

from haliax_ext.abstract import cast, leaves
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from levanter.inference.engine import DeviceRunner, Engine, make_schedule
from levanter.inference.kv_cache import CachePlan, plan_cache
from levanter.inference.programs import GenerationPrograms, ServedModel, generation_programs
from levanter.inference.requests import ChoiceId, Failed, Request, Token
from levanter.models.decoder import DecoderLmHeadModel

GAP = 1e-3
"""Where the two best logits are nearer than this, either may be next on another mesh or in another call."""


@dataclass(frozen=True, kw_only=True)
class TinyEngine:
    """What to build.

    Attributes:
        axes: mesh axis names and sizes.
        heads: mesh axes of attention heads, `mlp` and `vocab`.
        kv_heads: of 16 heads.
        rows, prefill, steps, allocation, page_size, pages, max_seq_len: see `plan_cache`, `generation_programs`.
        share_prefixes: see `Schedule`.
        behind: see `Engine`.
        dtype: of weights, activations and cache.
        cache_dtype: of the cache, where it is another.
        matrix_unit, policy_logprobs: see `ServedModel`.
    """

    axes: tuple[tuple[str, int], ...] = (("data", 1), ("model", 1))
    heads: tuple[str, ...] = ("model",)
    kv_heads: int = 8
    rows: int = 16
    prefill: tuple[tuple[int, int], ...] = ((1, 16),)
    steps: int = 1
    allocation: Any = "fixed"
    page_size: int = 4
    pages: int | None = None
    max_seq_len: int = 96
    share_prefixes: bool = False
    behind: int = 2
    dtype: str = "float32"
    cache_dtype: str | None = None
    matrix_unit: bool = False
    policy_logprobs: bool = False

    def engine(self) -> Engine:
        """A fresh engine; what it needs is made once."""
        programs, mesh, model = _made(self)
        schedule = make_schedule(programs, share_prefixes=self.share_prefixes)
        return Engine(DeviceRunner(programs, mesh, model), schedule, max_inflight=self.behind)

    def cache(self) -> CachePlan:
        """Its cache."""
        return _made(self)[0].cache


@functools.cache
def _made(asked: TinyEngine) -> tuple[GenerationPrograms, Any, Any]:
    spec = MeshSpec.of(**dict(asked.axes))
    config = tiny_config(
        num_heads=16, num_kv_heads=asked.kv_heads, max_seq_len=asked.max_seq_len, gradient_checkpointing=False
    )
    mappings = mappings_for(config, spec, heads=asked.heads)
    module = cast(abstract_model(config), jnp.dtype(asked.dtype))
    assert isinstance(module, DecoderLmHeadModel)
    cache = plan_cache(
        module,
        mappings,
        spec,
        batch_axis="batch",
        rows=asked.rows,
        max_seq_len=asked.max_seq_len,
        dtype=jnp.dtype(asked.cache_dtype or asked.dtype),
        allocation=asked.allocation,
        page_size=asked.page_size,
        pages=asked.pages,
    )
    served = ServedModel(
        abstract=module,
        sharding=plan_sharding(leaves(module), mappings, spec),
        counts_tokens=True,
        matrix_unit=asked.matrix_unit,
        policy_logprobs=asked.policy_logprobs,
    )
    mesh = spec.build(jax.devices()[: spec.size])
    programs = generation_programs(served, cache, prefill=asked.prefill, steps=asked.steps)
    arrays = {path: each.astype(jnp.dtype(asked.dtype)) for path, each in random_arrays(config, seed=5).items()}
    return programs, mesh, place(config, arrays, mappings, mesh)


@dataclass
class Seen:
    """What became of some requests.

    Attributes:
        texts: the tokens of each choice.
        logprobs: theirs.
        gaps: between the two likeliest tokens, where top log-probabilities were asked for.
        failed: what happened to those that could not go on.
        computed: tokens of prompts that were computed, those of rows that came back included.
        hits: parts that began behind pages of other rows.
        comebacks: rows that were computed again after they gave way.
    """

    texts: dict[ChoiceId, list[int]] = field(default_factory=dict)
    logprobs: dict[ChoiceId, list[float]] = field(default_factory=dict)
    gaps: dict[ChoiceId, list[float]] = field(default_factory=dict)
    failed: dict[ChoiceId, str] = field(default_factory=dict)
    computed: int = 0
    hits: int = 0
    comebacks: int = 0


def observed(engine: Engine, requests: Iterable[Request]) -> Seen:
    """Runs an engine to its end."""
    seen, begun = Seen(), set()
    prefill = engine.device.prefill

    def listening(bucket, parts, *rest):
        for part in parts:
            seen.computed += len(part.tokens)
            seen.hits += part.fresh and part.start > 0
            seen.comebacks += part.fresh and part.id in begun
            begun.add(part.id)
        return prefill(bucket, parts, *rest)

    # Over the method, for this run.
    vars(engine.device)["prefill"] = listening
    for event in engine.run(requests):
        if isinstance(event, Failed):
            seen.failed[event.of] = event.error
        elif isinstance(event, Token):
            seen.texts.setdefault(event.of, []).append(event.id)
            if event.logprob is not None:
                seen.logprobs.setdefault(event.of, []).append(event.logprob)
            if len(event.top) > 1:
                seen.gaps.setdefault(event.of, []).append(event.top[0][1] - event.top[1][1])
    del vars(engine.device)["prefill"]
    return seen


def together(parts: Sequence[Seen]) -> Seen:
    """Several runs as one."""
    whole = Seen()
    for part in parts:
        for name in ("texts", "logprobs", "gaps", "failed"):
            mine: dict[ChoiceId, Any] = getattr(whole, name)
            theirs: Mapping[ChoiceId, Any] = getattr(part, name)
            assert not mine.keys() & theirs.keys()
            mine.update(theirs)
    return whole
