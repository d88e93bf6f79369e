"""Scoring: log-probabilities of the tokens that are there. Evaluation, memorization and training all use this.

The logits of a whole sequence never exist. Positions are scored a chunk at a time inside one `scan`, with the chunk's
logits in float32 and recomputed in the backward pass. Under `vocab → model` each device holds its columns of the
chunk's logits: the log-sum-exp is two small all-reduces, and the target's logit is a sum under a mask, so nothing is
gathered across shards.

A chunk holds every n-th position, not a run of them: a mapping that shards `position` then shards every chunk.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from haliax_ext.by_shard import Opened
from haliax_ext.mapping import AxisMapping, shard_like_parameter, ways_in_scope
from haliax_ext.meshspec import MeshSpec
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.attention.reference import HIDDEN, soft_capped
from levanter.models.base import LmHeadModel
from levanter.models.registry import LmConfig

LOGITS_BYTES = 256 << 20
"""What the logits that exist at a time may take on a device."""


def default_chunk(*, rows: int, vocab: int, parts: int = 1) -> int:
    """Positions scored at a time, where nobody says: as many as `LOGITS_BYTES` of logits hold.

    Each chunk reads the whole head, and in the backward pass reads and writes its whole gradient. With few tokens a
    chunk, that and not the products is the time it takes: Llama 3.1 8B on v6e-128 has one sequence a device, and spent
    27 % of its step on chunks of 128 tokens.

    Args:
        rows: sequences on a device.
        vocab: entries of the head on a device.
        parts: what the positions of a sequence are cut in.
    """
    return max(1, LOGITS_BYTES // (4 * rows * vocab)) * parts


def planned_chunk(config: LmConfig, *, batch: tuple[str, int], vocab: int, mapping: AxisMapping, mesh: MeshSpec) -> int:
    """The chunk that `token_logprobs` takes by itself under a compute mapping and a mesh that are not in scope.

    Args:
        config: the model's.
        batch: the batch axis, name and size.
        vocab: entries of the head.
        mapping: of activations.
        mesh: what it maps to.
    """
    if config.cross_entropy_block_size is not None:
        return config.cross_entropy_block_size

    def ways(name: str) -> int:
        return mesh.ways(mapping.mesh_axes(name))

    rows, entries = -(-batch[1] // ways(batch[0])), -(-vocab // ways("vocab"))
    return default_chunk(rows=rows, vocab=entries, parts=ways("position"))


def token_logprobs(
    model: LmHeadModel,
    tokens: NamedArray,
    *,
    segment_ids: NamedArray | None = None,
    attn_mask: AttentionMask | None = None,
    positions: NamedArray | None = None,
    chunk: int | None = None,
    activations: NamedArray | None = None,
) -> NamedArray:
    """Log-probability of each next token.

    Where the vocabulary axis is longer than the config's `vocab_size`, the added entries are left out of the
    distribution. Matrix products are in the dtype of the weights; the head's result and everything after it is float32.

    Args:
        model: its weights in the compute dtype.
        tokens: ids, `[…, position]`.
        segment_ids: `[…, position]`; tokens see, and are scored within, their own segment.
        attn_mask: causal by default.
        positions: the position of each token, where it is not its index.
        chunk: positions scored at a time; default the config's `cross_entropy_block_size`, else `default_chunk`.
        activations: the model's for these tokens, where they are there already.

    Returns:
        Float32 with the axes of `tokens`; entry t is log p(tokens[t+1] | tokens[..t]). The last entry of a sequence,
        and of each segment, is 0.
    """
    if activations is None:
        activations = model(tokens, segment_ids=segment_ids, attn_mask=attn_mask, positions=positions).activations
    logprobs, _ = _scores(model, activations, tokens, segment_ids, chunk, normalizers=False)
    return logprobs


def token_scores(
    model: LmHeadModel,
    tokens: NamedArray,
    *,
    segment_ids: NamedArray | None = None,
    chunk: int | None = None,
    activations: NamedArray | None = None,
) -> tuple[NamedArray, NamedArray]:
    """Log-probability of each next token, and the log-normalizer of the distribution it is from.

    The log-normalizer is the log-sum-exp of the logits, which z-loss keeps near 0.

    Args:
        model, tokens, segment_ids, chunk, activations: see `token_logprobs`.

    Returns:
        Both as `token_logprobs` returns the first: float32, 0 where nothing follows.
    """
    if activations is None:
        activations = model(tokens, segment_ids=segment_ids).activations
    logprobs, normalizers = _scores(model, activations, tokens, segment_ids, chunk, normalizers=True)
    assert normalizers is not None
    return logprobs, normalizers


def _scores(
    model: LmHeadModel,
    activations: NamedArray,
    tokens: NamedArray,
    segment_ids: NamedArray | None,
    chunk: int | None,
    *,
    normalizers: bool,
) -> tuple[NamedArray, NamedArray | None]:
    chunk = chunk or model.config.cross_entropy_block_size
    if chunk is None:
        others = [-(-axis.size // ways_in_scope(axis.name)) for axis in tokens.axes if axis.name != "position"]
        vocab = -(-model.Vocab.size // ways_in_scope("vocab"))
        chunk = default_chunk(rows=math.prod(others), vocab=vocab, parts=ways_in_scope("position"))
    found = _target_scores(
        activations,
        model.head_weight(),
        hax.roll(tokens, -1, "position"),
        chunk=chunk,
        how=_How(vocab_size=model.config.vocab_size, soft_cap=model.config.logit_soft_cap, normalizers=normalizers),
    )
    counts = has_next(tokens.axes, segment_ids)
    return hax.where(counts, found[0], 0.0), hax.where(counts, found[1], 0.0) if normalizers else None


def has_next(axes: tuple[Axis, ...], segment_ids: NamedArray | None = None) -> NamedArray:
    """Whether a token is followed by another one of its sequence and segment, boolean over `axes`."""
    (Pos,) = [axis for axis in axes if axis.name == "position"]
    inside = hax.named(hax.arange(Pos).array < Pos.size - 1, Pos).broadcast_to(axes).rearrange(axes)
    if segment_ids is None:
        return inside
    following = hax.roll(segment_ids, -1, Pos).rearrange(segment_ids.axes)
    same = hax.named(segment_ids.array == following.array, segment_ids.axes)
    return inside & same.broadcast_to(axes).rearrange(axes)


def chunking(positions: int, chunk: int) -> tuple[int, int]:
    """How many chunks `positions` are scored in, and how many positions each holds.

    At most `chunk` each; all equal where up to twice the necessary number of chunks allows it, so that nothing is
    padded and a mesh axis that divides the positions has a good chance to divide a chunk.

    Raises:
        ValueError: a chunk must hold at least one position.
    """
    if chunk < 1:
        raise ValueError(f"a chunk holds at least one position, got {chunk}")
    fewest = -(-positions // chunk)
    count = next((n for n in range(fewest, 2 * fewest) if positions % n == 0), fewest)
    return count, -(-positions // count)


def target_logprobs(
    activations: NamedArray,
    head_weight: NamedArray,
    targets: NamedArray,
    *,
    chunk: int,
    vocab_size: int | None = None,
    soft_cap: float | None = None,
) -> NamedArray:
    """Log-probability of `targets` under the head's distribution at each activation, float32.

    Args:
        activations: `[…, position, embed]`.
        head_weight: `[vocab, embed]`, in the dtype of the activations.
        targets: ids, `[…, position]`.
        chunk: positions at a time.
        vocab_size: entries of `vocab` that count; None for all.
        soft_cap: bound of the logits; see `head_logits`.
    """
    how = _How(vocab_size=vocab_size, soft_cap=soft_cap, normalizers=False)
    return _target_scores(activations, head_weight, targets, chunk=chunk, how=how)[0]


@dataclass(frozen=True, kw_only=True)
class _How:
    """What is found of each token: by which distribution (`head_logits`), and whether its log-normalizer is wanted."""

    vocab_size: int | None
    soft_cap: float | None
    normalizers: bool


def _target_scores(
    activations: NamedArray, head_weight: NamedArray, targets: NamedArray, *, chunk: int, how: _How
) -> tuple[NamedArray, ...]:
    Pos = targets.resolve_axis("position")
    count, size = chunking(Pos.size, chunk)
    Chunks, Chunk = Axis("chunks", count), Pos.resize(size)
    padding = Chunk.size * Chunks.size - Pos.size

    def cut(x: NamedArray) -> NamedArray:
        return hax.pad(x, {Pos: (0, padding)}).unflatten_axis(Pos.name, (Chunk, Chunks))

    with jax.named_scope("lm_head"):
        found: Any = _in_chunks(cut(activations), head_weight, cut(targets), Chunks, how)
    others = [axis for axis in targets.axes if axis != Pos]

    def whole(x: NamedArray) -> NamedArray:
        x = x.rearrange((*others, Chunk, Chunks)).flatten_axes((Chunk, Chunks), Pos.resize(Pos.size + padding))
        return hax.auto_sharded(x[Pos.name, 0 : Pos.size].rearrange(targets.axes))

    return tuple(whole(x) for x in found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _in_chunks(
    x: NamedArray, weight: NamedArray, targets: NamedArray, Chunks: Axis, how: _How
) -> tuple[NamedArray, ...]:
    """`_chunk_scores` of each chunk, in a loop.

    Its own derivative, because JAX's would add up the head's gradient over the chunks in the head's dtype: in 16 bits,
    the later chunks of a long sequence hardly count. Here it is added up in float32 and rounded once. And what is
    added up are each shard's own sums, over its own rows: the devices add theirs up once, behind the loop, each for the
    shard of the head that it stores.
    """
    # Outside of the loop, so that a head that is sharded for storage is gathered once and not in each chunk. Inside of
    # this function, because the constraint would hold for the gradient too, which nobody needs whole.
    weight = hax.auto_sharded(weight)

    def step(_: None, x: NamedArray, target: NamedArray) -> tuple[None, tuple[NamedArray, ...]]:
        return None, _chunk_scores(x, weight, target, how)

    _, found = hax.scan(step, Chunks)(None, x, targets)
    return found


def _in_chunks_forward(x, weight, targets, Chunks, how):
    return _in_chunks(x, weight, targets, Chunks, how), (x, weight, targets)


def _in_chunks_backward(Chunks, how, kept, cotangent):
    x, stored, targets = kept
    rows = Opened.of(axis for axis in targets.axes if axis != Chunks)

    def step(
        total: NamedArray, x: NamedArray, target: NamedArray, given: tuple[NamedArray, ...]
    ) -> tuple[NamedArray, NamedArray]:
        of_x, of_weight = _chunk_gradients(x, weight, target, given, how)
        return hax.auto_sharded(total + of_weight.rearrange(total.axes)), of_x

    weight, opened = hax.auto_sharded(stored), rows.open(x)
    with rows.mapped():
        weight = hax.auto_sharded(weight.broadcast_to((*rows.shards, *weight.axes)))
        # `vocab` last: the devices' sums are cut along `embed`, which is cheap for an outer axis only.
        sums = (*(axis for axis in weight.axes if axis.name != "vocab"), weight.resolve_axis("vocab"))
        start = hax.auto_sharded(hax.zeros(sums, dtype=jnp.float32))
        total, of_x = hax.scan(step, Chunks)(
            start, opened, rows.open(targets), tuple(rows.open(given) for given in cotangent)
        )
    whole = shard_like_parameter(hax.sum(total, rows.shards) if rows.shards else total)
    # Rounded when each device has its part: before, the compiler lays the whole sum out anew (2 GiB for Llama 3.1 8B).
    of_head = jax.lax.optimization_barrier(whole).rearrange(stored.axes).astype(stored.dtype)
    return hax.auto_sharded(rows.close(of_x.rearrange(opened.axes))), of_head, None


_in_chunks.defvjp(_in_chunks_forward, _in_chunks_backward)


def head_logits(x: NamedArray, weight: NamedArray, *, vocab_size: int | None, soft_cap: float | None) -> NamedArray:
    """Float32 logits of a chunk of activations. Constraint point: the products.

    Args:
        x: activations, `[…, embed]`.
        weight: the head, `[vocab, embed]`.
        vocab_size: entries of `vocab` that count, the others are hidden; None for all.
        soft_cap: bound of the logits, `bound · tanh(logit / bound)`; None for none.
    """
    return _bounded(_products(x, weight), vocab_size=vocab_size, soft_cap=soft_cap)


def _products(x: NamedArray, weight: NamedArray) -> NamedArray:
    return hax.auto_sharded(hax.dot(x, weight, axis="embed", preferred_element_type=jnp.float32))


def _bounded(products: NamedArray, *, vocab_size: int | None, soft_cap: float | None) -> NamedArray:
    Vocab = products.resolve_axis("vocab")
    logits = soft_capped(products, soft_cap)
    if vocab_size is not None and vocab_size < Vocab.size:
        logits = hax.where(hax.arange(Vocab) < vocab_size, logits, HIDDEN)
    return logits


def _is_target(target: NamedArray, logits: NamedArray) -> NamedArray:
    Vocab = logits.resolve_axis("vocab")
    found: Any = target.broadcast_axis(Vocab).rearrange(logits.axes) == hax.arange(Vocab).astype(target.dtype)
    return found


def _chunk_scores(x: NamedArray, weight: NamedArray, target: NamedArray, how: _How) -> tuple[NamedArray, ...]:
    """The log-probabilities of the targets; behind them the log-normalizers, where they are wanted."""
    Vocab = weight.resolve_axis("vocab")
    logits = head_logits(x, weight, vocab_size=how.vocab_size, soft_cap=how.soft_cap)
    top = hax.max(logits, Vocab)
    normalizer = hax.log(hax.sum(hax.exp(logits - top), Vocab)) + top
    logprob = hax.sum(hax.where(_is_target(target, logits), logits, 0.0), Vocab) - normalizer
    return (logprob, normalizer) if how.normalizers else (logprob,)


def _chunk_gradients(
    x: NamedArray, weight: NamedArray, target: NamedArray, given: tuple[NamedArray, ...], how: _How
) -> tuple[NamedArray, NamedArray]:
    """What `_chunk_scores` gives back for `given`: the gradient of `x` in its dtype, the head's in float32.

    With p the distribution over the vocabulary, ∂ log p[target] / ∂ logits = onehot(target) − p and
    ∂ log-normalizer / ∂ logits = p. By hand, because of how XLA for CPUs compiles JAX's: it subtracts the normalizer
    again for each of the two products that read this, for one of them column by column, and has the head's gradient
    from a transposed copy of it. Here both products take it as it lies. On TPUs it is no array at all but part of the
    products, as in JAX's; p as a quotient would be one (3.9 GiB more for 64k positions × 32k entries in one chunk).
    """
    Vocab = weight.resolve_axis("vocab")
    bounded = functools.partial(_bounded, vocab_size=how.vocab_size, soft_cap=how.soft_cap)
    logits, through_bounds = jax.vjp(bounded, _products(x, weight))
    powers = hax.exp(logits - hax.max(logits, Vocab))
    p = powers * (1.0 / hax.sum(powers, Vocab))
    of_logprob = given[0]
    of_p = given[1] - of_logprob if how.normalizers else -of_logprob
    (of_products,) = through_bounds(
        hax.where(_is_target(target, logits), of_logprob + of_p * p, of_p * p).rearrange(logits.axes)
    )
    of_products = hax.auto_sharded(of_products.astype(x.dtype))
    of_x = hax.dot(of_products, weight, axis=Vocab, preferred_element_type=jnp.float32)
    tokens = tuple(axis for axis in target.axes if axis not in weight.axes)
    of_weight = hax.dot(x, of_products, axis=tokens, preferred_element_type=jnp.float32)
    return of_x.rearrange(x.axes).astype(x.dtype), of_weight


def mean_loss(
    model: LmHeadModel,
    tokens: NamedArray,
    *,
    weights: NamedArray | None = None,
    segment_ids: NamedArray | None = None,
    chunk: int | None = None,
) -> NamedArray:
    """The mean of −log p over the tokens that count, a float32 scalar to differentiate.

    Args:
        model: its weights in the compute dtype.
        tokens: ids, `[…, position]`.
        weights: float32 weight of predicting *from* each position, `[…, position]`; default 1.
        segment_ids: see `token_logprobs`.
        chunk: see `token_logprobs`.
    """
    logprobs = token_logprobs(model, tokens, segment_ids=segment_ids, chunk=chunk)
    counts = has_next(tokens.axes, segment_ids).astype(jnp.float32)
    if weights is not None:
        counts = counts * weights
    return -hax.sum(logprobs * counts) / hax.maximum(hax.sum(counts), 1e-9)


def sequence_sums(logprobs: NamedArray, weights: NamedArray) -> tuple[NamedArray, NamedArray]:
    """Per sequence, the weighted sum of log-probabilities and the sum of weights, over `position`, float32.

    A sequence's sums do not depend on the batch it is in; `LossMean` adds them up on the host in float64.
    """
    exact = weights.astype(jnp.float32)
    # A position that does not count must not spoil the sum, whatever its value is.
    counted = hax.where(exact != 0, logprobs, 0.0)
    return hax.sum(counted * exact, "position"), hax.sum(exact, "position")


@dataclass(frozen=True, kw_only=True)
class LossMean:
    """A mean of −log p under way: float64 sums on the host.

    Attributes:
        total: sum of −log p, in nats.
        count: sum of weights (tokens).
    """

    total: float = 0.0
    count: float = 0.0

    @classmethod
    def of(cls, logprob_sums: Iterable[float] | np.ndarray, counts: Iterable[float] | np.ndarray) -> "LossMean":
        """From per-sequence sums, as `sequence_sums` gives them."""
        return cls(
            total=-float(np.sum(np.asarray(logprob_sums), dtype=np.float64)),
            count=float(np.sum(np.asarray(counts), dtype=np.float64)),
        )

    def __add__(self, other: "LossMean") -> "LossMean":
        return LossMean(total=self.total + other.total, count=self.count + other.count)

    @property
    def loss(self) -> float:
        """Nats a token; NaN if nothing was counted."""
        return self.total / self.count if self.count else float("nan")
