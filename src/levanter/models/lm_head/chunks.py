"""The output head over chunks of positions: logits, the scores of given targets, and what they give back, in one loop.

The logits of a whole sequence never exist. One `scan` goes through the positions, a chunk's logits are float32, and the
head's gradient is added up in float32 over the chunks. Under `vocab → model` each device holds its columns of a chunk's
logits: the log-sum-exp is two small all-reduces, and the target's logit is a sum under a mask, so nothing is gathered
across shards. `models.head_scores` gives scores of single tokens, `models.head_loss` weighted sums of them.

A chunk holds every n-th position, not a run of them: a mapping that shards `position` then shards every chunk.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from haliax_ext.divisibility import divisors
from haliax_ext.mapping import shard_as_computed, shard_like_parameter, ways_in_scope
from haliax_ext.partial_sums import ShardAxis
from levanter.layers.attention.reference import HIDDEN, soft_capped
from levanter.layers.linear import Dense, Linear

Scores = tuple[NamedArray, ...]
"""Float32, over the axes of the targets: log-probabilities; behind them, each where it is wanted, the log-normalizers,
and 1 where the target was the likeliest entry, else 0."""

CotangentFn = Callable[[Scores, Scores], Scores]
"""From the scores of a chunk, and what a loop carries beside them, to the cotangents of the scores."""


@dataclass(frozen=True, kw_only=True)
class HeadScoring:
    """What is found of each token: by which distribution, and what is wanted beside its log-probability.

    Attributes:
        vocab_size: entries of `vocab` that count; None for all.
        soft_cap: bound of the logits; see `head_logits`.
        normalizers: whether the log-normalizers are wanted.
        likeliest: whether it is wanted which targets were the likeliest entry; of equally likely ones the lowest id is.
    """

    vocab_size: int | None
    soft_cap: float | None
    normalizers: bool
    likeliest: bool = False


def chunking(positions: int, chunk: int) -> tuple[int, int]:
    """How many chunks `positions` are scored in, and how many positions each holds.

    At most `chunk` each; all equal where up to twice the necessary number of chunks allows it, so that nothing is
    padded and a mesh axis that divides the positions has a good chance to divide a chunk.

    Raises:
        ValueError: a chunk must hold at least one position.
    """
    if chunk < 1:
        raise ValueError(f"a chunk must have at least one position, got {chunk}")
    fewest = -(-positions // chunk)
    count = next((n for n in divisors(positions) if fewest <= n < 2 * fewest), fewest)
    return count, -(-positions // count)


@dataclass(frozen=True)
class Chunked:
    """Positions cut into chunks.

    Attributes:
        Pos: the axis of positions.
        Chunks: the axis that counts the chunks.
        Chunk: the positions of one.
    """

    Pos: Axis
    Chunks: Axis
    Chunk: Axis

    @staticmethod
    def of(Pos: Axis, chunk: int) -> "Chunked":
        """Chunks of at most `chunk` positions; see `chunking`."""
        count, size = chunking(Pos.size, chunk)
        return Chunked(Pos=Pos, Chunks=Axis("chunks", count), Chunk=Pos.resize(size))

    @property
    def _padding(self) -> int:
        return self.Chunk.size * self.Chunks.size - self.Pos.size

    def cut(self, x: NamedArray) -> NamedArray:
        """`x` by chunks; zeros where the last ones are not full."""
        return hax.pad(x, {self.Pos: (0, self._padding)}).unflatten_axis(self.Pos.name, (self.Chunk, self.Chunks))

    def whole(self, x: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """The inverse of `cut`, over `axes`."""
        others = [axis for axis in axes if axis != self.Pos]
        padded = self.Pos.resize(self.Pos.size + self._padding)
        x = x.rearrange((*others, self.Chunk, self.Chunks)).flatten_axes((self.Chunk, self.Chunks), padded)
        return hax.auto_sharded(x[self.Pos.name, 0 : self.Pos.size].rearrange(axes))


def scores(x: NamedArray, head: Linear, targets: NamedArray, Chunks: Axis, how: HeadScoring) -> Scores:
    """The scores of every chunk, in a loop, and no gradient.

    Args:
        x: activations by chunks.
        head: from `embed` to `vocab`, in the dtype of the activations.
        targets: ids by chunks.
        Chunks: the axis of the loop.
        how: what is found.
    """
    # Whoever calls this has a derivative of its own: the constraint would hold for the gradient too, which nobody needs
    # whole.
    head = gathered_once(head)

    def step(_: None, x: NamedArray, target: NamedArray) -> tuple[None, Scores]:
        return None, _chunk_scores(x, head, target, how)

    _, chunk_scores = hax.scan(step, Chunks)(None, x, targets)
    return chunk_scores


def gathered_once(head: Linear, learned: tuple[bool, ...] | None = None) -> Linear:
    """A head as a loop over chunks reads it: gathered outside of it where it is cut for storage, not for each chunk.

    Args:
        head: any.
        learned: its arrays of which a gradient is asked for are left as they are: a gradient would be whole, too.
    """
    flat, structure = jax.tree.flatten(head, is_leaf=lambda x: isinstance(x, NamedArray))
    keep = learned or (False,) * len(flat)
    arrays = (x if is_learned else shard_as_computed(x) for x, is_learned in zip(flat, keep, strict=True))
    return jax.tree.unflatten(structure, arrays)


@dataclass(frozen=True, kw_only=True)
class HeadOutputs:
    """What one loop over the chunks has made.

    Attributes:
        scores: of every chunk.
        of_x: the gradient of the activations, in their dtype and over their axes.
        of_head: of the head, in its dtype and in its parameters' shards; None for arrays in it that nobody learns, and
            as a whole where nobody learns any.
    """

    scores: Scores
    of_x: NamedArray
    of_head: Linear | None


def scores_and_gradients(
    x: NamedArray,
    head: Linear,
    targets: NamedArray,
    extras: Scores,
    cotangents: CotangentFn,
    *,
    Chunks: Axis,
    how: HeadScoring,
    learned: tuple[bool, ...],
) -> HeadOutputs:
    """The scores of every chunk and what they give back, by three products of a chunk's logits' size.

    The head's gradient is added up in float32 over the chunks and rounded once: in 16 bits, the later chunks of a long
    sequence would hardly count.

    Args:
        x, head, targets, Chunks, how: see `scores`.
        extras: arrays by chunks that `cotangents` gets a chunk of.
        cotangents: the cotangents of a chunk's scores.
        learned: of which arrays of the head, in their order, the gradient is wanted.
    """
    loop = _dense_loop if isinstance(head.operand, Dense) and head.bias is None else _loop
    return loop(x, head, targets, extras, cotangents, Chunks, how, learned)


def _loop(
    x: NamedArray,
    stored: Linear,
    targets: NamedArray,
    extras: Scores,
    cotangents: CotangentFn,
    Chunks: Axis,
    how: HeadScoring,
    learned: tuple[bool, ...],
) -> HeadOutputs:
    """Any head, by JAX's derivative of each chunk.

    Of an adapted one the factors are learned alone: their sums are as thin as the rank, and no gradient of the matrix
    is made.
    """
    learns = any(learned)
    is_learned = jax.tree.unflatten(jax.tree.structure(stored), learned)
    floating, rest = eqx.partition(stored, is_learned)
    floating, rest = hax.auto_sharded((floating, rest))

    def step(
        total: Linear | None, x: NamedArray, target: NamedArray, extras: Scores
    ) -> tuple[Linear | None, tuple[Scores, NamedArray]]:
        def chunk(x: NamedArray, floating: Linear) -> Scores:
            return _chunk_scores(x, eqx.combine(floating, rest), target, how)

        if total is None:
            chunk_scores, back = jax.vjp(lambda x: chunk(x, floating), x)
            (of_x,) = back(cotangents(chunk_scores, extras))
            return None, (chunk_scores, of_x)
        chunk_scores, back = jax.vjp(chunk, x, floating)
        of_x, of_head = back(cotangents(chunk_scores, extras))
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, of_head), (chunk_scores, of_x)

    start = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), floating) if learns else None
    total, (chunk_scores, of_x) = hax.scan(step, Chunks)(start, x, targets, extras)
    of_head = None
    if learns:
        stored_alike = jax.tree.map(
            lambda a: shard_like_parameter(a) if eqx.is_array(a.array) else a,
            total,
            is_leaf=lambda a: isinstance(a, NamedArray),
        )
        of_head = jax.tree.map(lambda a, like: a.astype(like.dtype), stored_alike, floating)
    return HeadOutputs(scores=chunk_scores, of_x=hax.auto_sharded(of_x.rearrange(x.axes)), of_head=of_head)


def _dense_loop(
    x: NamedArray,
    stored: Linear,
    targets: NamedArray,
    extras: Scores,
    cotangents: CotangentFn,
    Chunks: Axis,
    how: HeadScoring,
    learned: tuple[bool, ...],
) -> HeadOutputs:
    """A head `[vocab, embed]` that is an array, by hand.

    What is added up are each shard's own sums, over its own rows: the devices add theirs up once, behind the loop, each
    for the shard of the head that it stores.

    One device alone with fewer tokens than features makes the gradient as the head lies: then the product turns tokens
    × vocabulary around, once. Otherwise XLA for CPUs turns vocabulary × embed around, and again for each thing that the
    optimizer makes of it.
    """
    operand, learns = stored.operand, any(learned)
    assert isinstance(operand, Dense)
    rows = ShardAxis.of(axis for axis in targets.axes if axis != Chunks) if learns else ShardAxis(())

    def step(
        total: NamedArray | None, x: NamedArray, target: NamedArray, extras: Scores
    ) -> tuple[NamedArray | None, tuple[Scores, NamedArray]]:
        chunk_scores, back = _dense_scores(x, weight, target, how, picks=direct)
        of_products = back(cotangents(chunk_scores, extras))
        of_x = hax.dot(of_products, weight, axis="vocab", preferred_element_type=jnp.float32)
        of_x = of_x.rearrange(x.axes).astype(x.dtype)
        if total is not None:
            tokens = tuple(axis for axis in target.axes if axis not in weight.axes)
            factors = (_by_token(of_products, tokens), _by_token(x, tokens)) if direct else (x, of_products)
            over = "token" if direct else tokens
            of_weight = hax.dot(*factors, axis=over, preferred_element_type=jnp.float32)
            total = hax.auto_sharded(total + of_weight.rearrange(total.axes))
        return total, (chunk_scores, of_x)

    weight, opened = hax.auto_sharded(operand.array), rows.open(x)
    alone = all(ways_in_scope(axis.name) == 1 for axis in {*opened.axes, *weight.axes})
    direct = alone and Chunks.size == 1 and math.prod(axis.size for axis in targets.axes) <= weight.axis_size("embed")
    with rows.mapped():
        weight = hax.auto_sharded(weight.broadcast_to((*rows.shards, *weight.axes)))
        # Else `vocab` last: the devices' sums are cut along `embed`, which is cheap for an outer axis only.
        last = () if direct else (weight.resolve_axis("vocab"),)
        sums = (*(axis for axis in weight.axes if axis not in last), *last)
        start = hax.auto_sharded(hax.zeros(sums, dtype=jnp.float32)) if learns else None
        opened_extras = tuple(map(rows.open, extras))
        total, (chunk_scores, of_x) = hax.scan(step, Chunks)(start, opened, rows.open(targets), opened_extras)
    of_head = None
    if total is not None:
        whole = shard_like_parameter(hax.sum(total, rows.shards) if rows.shards else total)
        # Rounded when each device has its part: before, the compiler lays the whole sum out anew (2 GiB for Llama 3.1
        # 8B).
        array = operand.array
        of_weight = jax.lax.optimization_barrier(whole).rearrange(array.axes).astype(array.dtype)
        structure = jax.tree.structure(stored, is_leaf=lambda x: isinstance(x, NamedArray))
        of_head = jax.tree.unflatten(structure, [of_weight])
    of_x = hax.auto_sharded(rows.close(of_x.rearrange(opened.axes)))
    return HeadOutputs(scores=tuple(map(rows.close, chunk_scores)), of_x=of_x, of_head=of_head)


def _by_token(x: NamedArray, tokens: tuple[Axis, ...]) -> NamedArray:
    """`x` with its tokens as one axis, the first: what XLA for CPUs multiplies as it lies, along whichever axis.

    Along two axes it would have a transposed copy of one factor.
    """
    first = x.rearrange((*tokens, *(axis for axis in x.axes if axis not in tokens)))
    return first.flatten_axes(tokens, "token")


def head_logits(x: NamedArray, head: Linear, *, vocab_size: int | None, soft_cap: float | None) -> NamedArray:
    """Float32 logits of a chunk of activations. Constraint point: the products.

    Args:
        x: activations, `[…, embed]`.
        head: from `embed` to `vocab`.
        vocab_size: entries of `vocab` that count, the others are hidden; None for all.
        soft_cap: bound of the logits, `bound · tanh(logit / bound)`; None for none.
    """
    return _bounded(_products(x, head), vocab_size=vocab_size, soft_cap=soft_cap)


def _products(x: NamedArray, head: Linear) -> NamedArray:
    return hax.auto_sharded(head(x, dtype=jnp.float32))


def _bounded(products: NamedArray, *, vocab_size: int | None, soft_cap: float | None) -> NamedArray:
    Vocab = products.resolve_axis("vocab")
    logits = soft_capped(products, soft_cap)
    if vocab_size is not None and vocab_size < Vocab.size:
        logits = hax.where(hax.arange(Vocab) < vocab_size, logits, HIDDEN)
    return logits


def _is_target(target: NamedArray, logits: NamedArray) -> NamedArray:
    Vocab = logits.resolve_axis("vocab")
    is_target = target.broadcast_axis(Vocab).rearrange(logits.axes) == hax.arange(Vocab).astype(target.dtype)
    return cast(NamedArray, is_target)


def _chunk_scores(x: NamedArray, head: Linear, target: NamedArray, how: HeadScoring) -> Scores:
    """The scores of one chunk."""
    logits = head_logits(x, head, vocab_size=how.vocab_size, soft_cap=how.soft_cap)
    Vocab = logits.resolve_axis("vocab")
    top = hax.max(logits, Vocab)
    return _scores_from_logits(logits, top, hax.sum(hax.exp(logits - top), Vocab), target, how)


def _scores_from_logits(
    logits: NamedArray, top: NamedArray, total: NamedArray, target: NamedArray, how: HeadScoring, *, picks: bool = False
) -> Scores:
    """From logits, their maximum, and the sum of the powers of their distance to it.

    A target's logit is a sum of which one term counts, since `vocab` may be cut over devices, or is picked (`picks`):
    XLA for CPUs writes the terms of the sum out.
    """
    normalizer = hax.log(total) + top
    if picks:
        of_target = _picked(logits, target)
    else:
        of_target = hax.sum(hax.where(_is_target(target, logits), logits, 0.0), logits.resolve_axis("vocab"))
    scores = (of_target - normalizer, normalizer) if how.normalizers else (of_target - normalizer,)
    return (*scores, _is_likeliest(logits, top, of_target, target)) if how.likeliest else scores


def _picked(logits: NamedArray, target: NamedArray) -> NamedArray:
    """The logit of each target; 0 for one that is no entry, as of the sum."""
    Vocab, ids = logits.resolve_axis("vocab"), target.array[..., None]
    last = logits.rearrange((*target.axes, Vocab)).array
    ids = jnp.where(ids < 0, Vocab.size, ids)
    return hax.named(jnp.take_along_axis(last, ids, axis=-1, mode="fill", fill_value=0.0)[..., 0], target.axes)


def _is_likeliest(logits: NamedArray, top: NamedArray, of_target: NamedArray, target: NamedArray) -> NamedArray:
    """1 where no entry is likelier than the target, and none with a lower id is as likely; 0 elsewhere."""
    Vocab = logits.resolve_axis("vocab")
    lower = hax.arange(Vocab).astype(target.dtype).broadcast_to(logits.axes)
    lower = lower < target.broadcast_axis(Vocab).rearrange(logits.axes)
    as_likely = hax.any((logits == top.broadcast_axis(Vocab).rearrange(logits.axes)) & lower, Vocab)
    return ((of_target == top) & ~as_likely).astype(jnp.float32)


def _dense_scores(
    x: NamedArray, weight: NamedArray, target: NamedArray, how: HeadScoring, *, picks: bool
) -> tuple[Scores, Callable[[Scores], NamedArray]]:
    """The scores of one chunk; and from their cotangents to that of the products of activations and head.

    The latter is in the dtype of the activations. With p the distribution over the vocabulary,
    ∂ log p[target] / ∂ logits = onehot(target) − p and ∂ log-normalizer / ∂ logits = p. By hand, because of how XLA for
    CPUs compiles JAX's: it subtracts the normalizer again for each of the two products that read this, for one of them
    column by column, and has the head's gradient from a transposed copy of it. Here both products take it as it lies.
    On TPUs it is no array at all but part of the products, as in JAX's; p as a quotient would be one (3.9 GiB more for
    64k positions × 32k entries in one chunk).
    """
    Vocab = weight.resolve_axis("vocab")
    bounded = functools.partial(_bounded, vocab_size=how.vocab_size, soft_cap=how.soft_cap)
    products = _products(x, Linear(weight=weight, bias=None, In=("embed",)))
    logits, through_bounds = jax.vjp(bounded, products)
    top = hax.max(logits, Vocab)
    powers = hax.exp(logits - top)
    total = hax.sum(powers, Vocab)

    def back(cotangents: Scores) -> NamedArray:
        p = powers * (1.0 / total)
        of_logprob = cotangents[0]
        of_p = cotangents[1] - of_logprob if how.normalizers else -of_logprob
        of_logits = hax.where(_is_target(target, logits), of_logprob + of_p * p, of_p * p)
        (of_products,) = through_bounds(of_logits.rearrange(logits.axes))
        return hax.auto_sharded(of_products.astype(x.dtype))

    return _scores_from_logits(logits, top, total, target, how, picks=picks), back
