"""Greedy text by the run's own Programs, prompt by prompt, and what torch says of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from haliax_ext.abstract import with_arrays
from levanter.commands.model.pretrained import PretrainedModel, load_pretrained
from levanter.inference.cache import plan_cache
from levanter.inference.config import Allocation
from levanter.inference.device import DeviceRows
from levanter.inference.engine import Engine, schedule_of
from levanter.inference.generation import GenerationPrograms, generation_programs
from levanter.inference.params import SamplingParams
from levanter.inference.programs import ServedModel
from levanter.inference.requests import Failed, Request, Token
from levanter.models.decoder.config import DecoderConfig

GAP = 1e-3
"""Where torch's two best logits are nearer than this, either may be ours."""


@dataclass(frozen=True)
class Written:
    """What was generated behind a prompt: ids, and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


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
) -> GenerationPrograms:
    """The Programs for a cache of these sizes."""
    assert not described.sharding.errors, described.sharding.errors
    assert isinstance(described.config, DecoderConfig)
    cache = plan_cache(
        described.config,
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
    return generation_programs(served(described), cache, prefill=prefill, steps=steps)


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
    params = SamplingParams(temperature=0.0, max_tokens=new, logprobs=0)
    requests = [
        Request(id=str(n), tokens=tuple(map(int, prompt)), params=params, seed=0, stop_ids=tuple(stops))
        for n, prompt in enumerate(prompts)
    ]
    found = [Written([], []) for _ in prompts]
    finished = set()
    for event in Engine(DeviceRows(programs, mesh, model), schedule_of(programs), behind=behind).run(requests):
        assert not isinstance(event, Failed), event
        if isinstance(event, Token):
            assert event.of not in finished and event.logprob is not None
            found[int(event.of.request)].tokens.append(event.id)
            found[int(event.of.request)].logprobs.append(event.logprob)
        else:
            finished.add(event.of)
    assert len(finished) == len(prompts)
    return found


def check_by_torch(model: Any, prompt: Sequence[int], written: Written) -> float:
    """Asserts that each token is torch's, given those before it; the share of positions where the gap decides."""
    import torch

    whole = torch.tensor([[*prompt, *written.tokens]])
    with torch.no_grad():
        logits = model(whole).logits[0].double()
    at = slice(len(prompt) - 1, whole.shape[1] - 1)
    best, ids = logits[at].topk(2, dim=-1)
    clear = (best[:, 0] - best[:, 1] > GAP).numpy()
    mine = np.asarray(written.tokens)
    np.testing.assert_array_equal(mine[clear], ids[:, 0].numpy()[clear])
    logprobs = logits[at].log_softmax(-1)[torch.arange(len(mine)), torch.from_numpy(mine)].numpy()
    np.testing.assert_allclose(written.logprobs, logprobs, atol=2e-4, rtol=0)
    return float(clear.mean())
