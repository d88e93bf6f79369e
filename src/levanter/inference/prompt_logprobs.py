"""How likely a prompt is, token by token: what `echo` shows beside its text.

`score_RxT` reads whole prompts, padded to T tokens, as scoring does everywhere else: by the model without a cache. Each
token's log-probability and the likeliest tokens in its place are of one array of logits, so that the likeliest one of
greedy text has exactly the largest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import Mesh

from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.prefetch import place
from haliax_ext.program import Input, Jit, Program
from haliax_ext.pytree import PyTree
from levanter.inference.kv_cache import CachePlan
from levanter.inference.programs import ServedModel
from levanter.inference.sampling import Top
from levanter.inference.top_logprobs import likeliest
from levanter.models.lm_head.chunks import head_logits

CHUNK = 16
"""Positions of a prompt whose logits exist at a time."""


class ScoredPositions(eqx.Module):
    """What each position says of the token behind it.

    Attributes:
        logprobs: float32 `[batch, position]`.
        top_ids: int32 `[batch, position, top]`, the likeliest tokens there, the likeliest first.
        top_logprobs: float32 `[batch, position, top]`.
    """

    logprobs: NamedArray
    top_ids: NamedArray
    top_logprobs: NamedArray


@dataclass(frozen=True, kw_only=True)
class PromptScores:
    """A prompt's log-probabilities.

    Attributes:
        logprobs: of each token but the first, given those before it.
        top: ids and log-probabilities of the likeliest tokens in the place of each.
    """

    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


def score_program(model: ServedModel, cache: CachePlan, *, tokens: int) -> Program:
    """Scores a prompt of each shard of the batch.

    Its inputs: the model; `tokens [batch, position]`, ids; `targets [batch, position]`, the ids behind them.

    Args:
        model: the model.
        cache: the run's, for its mappings and the shards of its batch.
        tokens: of a prompt.
    """
    size = min(CHUNK, tokens)
    Batch, Pos = Axis("batch", cache.shards), Axis("position", tokens)
    Chunks, Chunk = Axis("chunks", -(-tokens // size)), Axis("position", size)

    def cut(x: NamedArray) -> NamedArray:
        padded = hax.pad(x, {Pos: (0, Chunks.size * size - tokens)})
        return padded.unflatten_axis("position", (Chunks, Chunk))

    def score(net, ids: NamedArray, targets: NamedArray) -> ScoredPositions:
        activations, config = net(ids).activations, net.config
        head = hax.auto_sharded(net.head)

        def some(_: None, x: NamedArray, target: NamedArray) -> tuple[None, ScoredPositions]:
            flat = x.flatten_axes(("batch", "position"), "batch")
            logits = head_logits(flat, head, vocab_size=config.vocab_size, soft_cap=config.logit_soft_cap)
            return None, _scored(logits, target.flatten_axes(("batch", "position"), "batch"), (Batch, Chunk))

        _, found = hax.scan(some, Chunks)(None, cut(activations), cut(targets))

        def joined(x: NamedArray) -> NamedArray:
            whole = Axis("position", Chunks.size * size)
            others = tuple(axis for axis in x.axes if axis.name not in ("chunks", "batch", "position"))
            flat = x.rearrange(("batch", "chunks", "position", *(a.name for a in others)))
            return flat.flatten_axes(("chunks", "position"), whole)["position", 0:tokens]

        return jax.tree.map(joined, found, is_leaf=lambda x: isinstance(x, NamedArray))

    def integers(name: str) -> Input:
        array = NamedArray(jax.ShapeDtypeStruct((Batch.size, Pos.size), np.dtype(np.int32)), (Batch, Pos))  # pyright: ignore
        return Input(name=name, value=array, placement=AxisMapping())

    return Program(
        name=f"score_{Batch.size}x{tokens}",
        function=score,
        inputs=(
            Input(name="model", value=model.abstract, placement=model.sharding),
            integers("tokens"),
            integers("targets"),
        ),
        mappings=cache.mappings,
        out_placement=Mappings(params=AxisMapping()),
        matmul_precision=model.matmul_precision,
        compiler_options=model.compiler_options,
    )


def _scored(logits: NamedArray, targets: NamedArray, axes: tuple[Axis, Axis]) -> ScoredPositions:
    """The scores of targets `[batch]` under logits `[batch, vocab]`, where `batch` holds the positions of prompts."""
    Vocab = logits.resolve_axis("vocab")
    logits = hax.auto_sharded(logits)
    most = hax.max(logits, Vocab)
    normalizer = hax.log(hax.sum(hax.exp(logits - most), Vocab)) + most
    ids = hax.arange(Vocab, dtype=jnp.int32).broadcast_to(logits.axes)
    of_target = hax.sum(hax.where(ids == targets, logits, 0.0), Vocab)
    Found = Top.resize(min(Top.size, Vocab.size))
    values, top_ids = likeliest(logits, Found)
    found = ScoredPositions(logprobs=of_target - normalizer, top_ids=top_ids, top_logprobs=values - normalizer)
    return jax.tree.map(
        lambda x: hax.auto_sharded(x.unflatten_axis("batch", axes)), found, is_leaf=lambda x: isinstance(x, NamedArray)
    )


ScoresPrompts = Callable[[Sequence[int], int], PromptScores]
"""The scores of a prompt's tokens, and how many of the likeliest ones are wanted in the place of each."""


class PromptScorer:
    """Scores prompts, one at a time.

    Args:
        programs: by the tokens that they take.
        mesh: the devices.
        model: the model on them.
        jit: makes a Program callable.
    """

    def __init__(self, programs: Mapping[int, Program], mesh: Mesh, model: PyTree, *, jit: Jit = Program.jit):
        self._programs, self._mesh, self._model, self._jit = dict(programs), mesh, model, jit
        self._calls: dict[int, Callable[..., PyTree]] = {}

    def __call__(self, tokens: Sequence[int], top: int) -> PromptScores:
        """The scores of a prompt, whose tokens fit the longest Program.

        Args:
            tokens: its ids.
            top: how many of the likeliest tokens are wanted in the place of each.
        """
        size = min(each for each in self._programs if each >= len(tokens))
        program = self._programs[size]
        ids = np.zeros((program.inputs[1].value.axes[0].size, size), np.int32)
        targets = np.zeros_like(ids)
        ids[:, : len(tokens)], targets[:, : len(tokens) - 1] = tokens, tokens[1:]
        if size not in self._calls:
            self._calls[size] = self._jit(program, self._mesh)
        named = {"tokens": ids, "targets": targets}
        values = [place(one, named[one.name], self._mesh) for one in program.inputs[1:]]
        found = self._calls[size](self._model, *values)
        count = len(tokens) - 1
        logprobs, top_ids, top_logprobs = (
            np.asarray(x.array.addressable_data(0))[0, :count]
            for x in (found.logprobs, found.top_ids, found.top_logprobs)
        )
        likeliest_ = [
            tuple(zip(ids[:top].tolist(), values[:top].tolist(), strict=True))
            for ids, values in zip(top_ids, top_logprobs, strict=True)
        ]
        return PromptScores(logprobs=tuple(logprobs.tolist()), top=tuple(likeliest_))
