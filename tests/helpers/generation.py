"""Greedy text by the run's own Programs, prompt by prompt, and what torch says of it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from haliax_ext.abstract import with_arrays
from levanter.commands.model.pretrained import PretrainedModel, load_pretrained
from levanter.inference.config import Allocation
from levanter.inference.engine import DeviceRunner, Engine, make_schedule
from levanter.inference.kv_cache import plan_cache
from levanter.inference.programs import GenerationPrograms, ServedModel, generation_programs
from levanter.inference.requests import Failed, Request, SamplingParams, Token
from levanter.models.base import Decodes

GAP = 1e-3
"""Where torch's two best logits are nearer than this, either may be ours."""
TOLERANCE = 2e-4
"""Of a log-probability, in nats."""


@dataclass(frozen=True)
class Written:
    """What was generated behind a prompt: ids, their log-probabilities, and the likeliest ids with theirs."""

    tokens: list[int]
    logprobs: list[float]
    top: list[tuple[tuple[int, float], ...]]


@dataclass(frozen=True)
class Judged:
    """How many positions of a text were compared, and where torch's two best logits were too near to decide."""

    positions: int
    undecided: list[tuple[int, float]]


def served(described: PretrainedModel) -> ServedModel:
    """A described model as the Programs take it."""
    return ServedModel(
        abstract=described.abstract,
        sharding=described.sharding,
        matmul_precision=described.precision.matmul,
    )


def planned(
    described: PretrainedModel,
    *,
    rows: int,
    max_seq_len: int,
    prefill: Sequence[tuple[int, int]],
    allocation: Allocation = "fixed",
    page_size: int = 8,
    pages: int | None = None,
    steps: int = 1,
    dtype: Any = np.float32,
    cache_block: int | None = None,
) -> GenerationPrograms:
    """The Programs for a cache of these sizes."""
    assert not described.sharding.errors, described.sharding.errors
    assert isinstance(described.abstract, Decodes)
    cache = plan_cache(
        described.abstract,
        described.resolved.mappings,
        described.resolved.spec,
        batch_axis=described.resolved.batch_axis,
        rows=rows,
        max_seq_len=max_seq_len,
        dtype=np.dtype(dtype),
        allocation=allocation,
        page_size=page_size,
        pages=pages,
    )
    cache.sharding.check()
    model = replace(served(described), cache_block=cache_block)
    return generation_programs(model, cache, prefill=prefill, steps=steps)


def on_devices(described: PretrainedModel) -> tuple[Any, Any]:
    """The mesh, and the model with its weights on it."""
    mesh = described.resolved.spec.build(jax.devices()[: described.resolved.spec.size])
    return mesh, with_arrays(described.abstract, load_pretrained(described, mesh, show=False).arrays)


def generate(
    programs: GenerationPrograms,
    mesh: Any,
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    new: int,
    stops: Sequence[int] = (),
    behind: int = 2,
) -> list[Written]:
    """Greedy text behind each prompt, by the engine."""
    params = SamplingParams(temperature=0.0, max_tokens=new, logprobs=20)
    requests = [
        Request(id=str(n), tokens=tuple(map(int, prompt)), params=params, seed=0, stop_ids=tuple(stops))
        for n, prompt in enumerate(prompts)
    ]
    found = [Written([], [], []) for _ in prompts]
    finished = set()
    for event in Engine(DeviceRunner(programs, mesh, model), make_schedule(programs), max_inflight=behind).run(
        requests
    ):
        assert not isinstance(event, Failed), event
        if isinstance(event, Token):
            assert event.of not in finished and event.logprob is not None
            found[int(event.of.request)].tokens.append(event.id)
            found[int(event.of.request)].logprobs.append(event.logprob)
            found[int(event.of.request)].top.append(event.top)
        else:
            finished.add(event.of)
    assert len(finished) == len(prompts)
    return found


def check_by_torch(model: Any, prompt: Sequence[int], written: Written) -> Judged:
    """Asserts that each token is torch's, given those before it, and that log-probabilities are torch's."""
    import torch

    whole = torch.tensor([[*prompt, *written.tokens]])
    at = slice(len(prompt) - 1, whole.shape[1] - 1)
    with torch.no_grad():
        logits = model(whole).logits[0, at].double()
    best, ids = logits.topk(2, dim=-1)
    gaps = (best[:, 0] - best[:, 1]).numpy()
    mine = np.asarray(written.tokens)
    np.testing.assert_array_equal(mine[gaps > GAP], ids[:, 0].numpy()[gaps > GAP])
    logprobs = logits.log_softmax(-1)
    rows = torch.arange(len(mine))
    np.testing.assert_allclose(written.logprobs, logprobs[rows, torch.from_numpy(mine)], atol=TOLERANCE, rtol=0)
    top_ids, top = (np.asarray([[pair[n] for pair in pairs] for pairs in written.top]) for n in (0, 1))
    assert all(len(set(row)) == len(row) for row in top_ids.tolist())
    # Of ids that are nearly as likely either may come first: each must have its own number, and the numbers torch's.
    np.testing.assert_allclose(top, logprobs.gather(-1, torch.from_numpy(top_ids)), atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(top, logprobs.topk(top.shape[1], dim=-1).values, atol=TOLERANCE, rtol=0)
    np.testing.assert_array_equal(top[:, 0], written.logprobs)
    (undecided,) = np.nonzero(gaps <= GAP)
    return Judged(len(mine), [(len(prompt) + int(n), float(gaps[n])) for n in undecided])


def decided(judged: Sequence[Judged]) -> None:
    """Asserts that the gap decides 99 % of all positions; prints the others."""
    undecided = {n: each.undecided for n, each in enumerate(judged) if each.undecided}
    positions = sum(each.positions for each in judged)
    count = sum(len(each) for each in undecided.values())
    sys.stdout.write(
        f"{positions - count} of {positions} positions are decided; not, by prompt, with gaps: {undecided}\n"
    )
    assert count <= 0.01 * positions, undecided


def check_by_scores(described: PretrainedModel, prompts: Sequence[Sequence[int]], found: Sequence[Written]) -> None:
    """Compares log-probabilities with those of `eval_lm`'s Program on the same texts."""
    from helpers.family_models import score

    length = max(len(prompt) + len(written.tokens) for prompt, written in zip(prompts, found, strict=True))
    rows = -(-len(prompts) // described.resolved.spec.size) * described.resolved.spec.size
    tokens, segments = np.zeros((rows, length), np.int32), np.full((rows, length), -1, np.int32)
    for row, (prompt, written) in enumerate(zip(prompts, found, strict=True)):
        text = [*prompt, *written.tokens]
        tokens[row, : len(text)], segments[row, : len(text)] = text, 0
    _, scores = score(described, tokens, segments)
    for row, (prompt, written) in enumerate(zip(prompts, found, strict=True)):
        mine = scores[row, len(prompt) - 1 : len(prompt) - 1 + len(written.tokens)]
        np.testing.assert_allclose(written.logprobs, mine, atol=TOLERANCE, rtol=0)
