"""The output head over chunks of positions: logits, scores of given targets and their gradients, in one loop.

The logits of a whole sequence never exist. One `scan` goes through the positions, a chunk's logits are float32, and the
head's gradient is added up in float32 over the chunks. Under `vocab → model` each device holds its columns of a chunk's
logits: the log-sum-exp is two small all-reduces, and the target's logit is a sum under a mask, so nothing is gathered
across shards. `lm_head.scores` returns scores of single tokens, `lm_head.loss` weighted sums of them.

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
"""Float32, over the axes of the targets: log-probabilities; after them, if requested, the log-normalizers, and 1 where
the target was the likeliest entry, else 0."""

CotangentFn = Callable[[Scores, Scores], Scores]
"""Maps a chunk's scores and the loop's extra arrays for that chunk to the cotangents of the scores."""


@dataclass(frozen=True, kw_only=True)
class HeadScoring:
    """Which scores of each token to compute, and under which distribution.

    Attributes:
        vocab_size: entries of `vocab` that count; None for all.
        soft_cap: bound of the logits; see `head_logits`.
        normalizers: whether to return the log-normalizers too.
        likeliest: whether to return which targets were the likeliest entry; among equally likely ones, the lowest id
            is.
        temperature: the divisor of the logits, after the soft cap.
    """

    vocab_size: int | None
    soft_cap: float | None
    normalizers: bool
    likeliest: bool = False
    temperature: float = 1.0


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
    # `fewest` is the ceiling. A divisor of `positions` below twice that needs no padding; the bound keeps the chunks
    # from becoming so small that rereading the head dominates.
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
        # `Chunk` is the major axis: chunk k holds the positions k, k + n, k + 2n, …, so a shard of `position`, which
        # is contiguous, holds an equal part of every chunk.
        return hax.pad(x, {self.Pos: (0, self._padding)}).unflatten_axis(self.Pos.name, (self.Chunk, self.Chunks))

    def whole(self, x: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """The inverse of `cut`, over `axes`."""
        others = [axis for axis in axes if axis != self.Pos]
        padded = self.Pos.resize(self.Pos.size + self._padding)
        # The order (Chunk, Chunks) must be that of `cut`: with it reversed the positions would be permuted.
        x = x.rearrange((*others, self.Chunk, self.Chunks)).flatten_axes((self.Chunk, self.Chunks), padded)
        return hax.auto_sharded(x[self.Pos.name, 0 : self.Pos.size].rearrange(axes))


def scores(x: NamedArray, head: Linear, targets: NamedArray, Chunks: Axis, how: HeadScoring) -> Scores:
    """The scores of every chunk, in a loop, and no gradient.

    Args:
        x: activations, `[chunks, …, position, embed]` in any order of axes.
        head: the linear layer from `embed` to `vocab`, in the dtype of the activations.
        targets: ids by chunks.
        Chunks: the axis of the loop.
        how: which scores to compute.
    """
    # Only callers with their own derivative rule use this. Under JAX's own derivative the sharding
    # constraint would hold for the head's gradient too, and the gradient would be replicated.
    head = gathered_once(head)

    def step(_: None, x: NamedArray, target: NamedArray) -> tuple[None, Scores]:
        return None, _chunk_scores(x, head, target, how)

    _, chunk_scores = hax.scan(step, Chunks)(None, x, targets)
    return chunk_scores


def gathered_once(head: Linear, learned: tuple[bool, ...] | None = None) -> Linear:
    """The head as a loop over chunks reads it: gathered once before the loop, not once for each chunk.

    Args:
        head: any head.
        learned: for each array of the head, whether its gradient is needed; those arrays stay sharded, since their
            gradient would be gathered, too.
    """
    flat, structure = jax.tree.flatten(head, is_leaf=lambda x: isinstance(x, NamedArray))
    keep = learned or (False,) * len(flat)
    # FSDP cuts the stored head along `embed`. Inside a scan, XLA would all-gather it again in each iteration.
    arrays = (x if is_learned else shard_as_computed(x) for x, is_learned in zip(flat, keep, strict=True))
    return jax.tree.unflatten(structure, arrays)


@dataclass(frozen=True, kw_only=True)
class HeadOutputs:
    """The results of one loop over the chunks.

    Attributes:
        scores: of every chunk.
        of_x: the gradient of the activations, in their dtype and over their axes.
        of_head: gradient of the head, in its dtype and in its parameters' shards; None for its arrays that are not
            learned, and None as a whole if none of them is.
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
    """The scores of every chunk and the gradients of activations and head, by three products of the logits' size.

    The head's gradient is added up in float32 over the chunks and rounded once: in 16 bits, the later chunks of a long
    sequence would hardly count.

    Args:
        x, head, targets, Chunks, how: see `scores`.
        extras: arrays by chunks; each step passes their current chunk to `cotangents`.
        cotangents: computes the cotangents of a chunk's scores.
        learned: for each array of the head, in order, whether to compute its gradient.
    """
    # The hand-written loop needs one matrix and nothing else;
    # adapters, quantized weights and biases take JAX's derivative.
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
    """The loop for any head: JAX differentiates each chunk.

    For an adapted head only the factors are learned: their gradients are as thin as the rank, and no gradient of the
        matrix is computed.
    """
    learns = any(learned)
    is_learned = jax.tree.unflatten(jax.tree.structure(stored), learned)
    # Only the learned arrays are arguments of the vjp, so that frozen ones get no gradient of their size.
    floating, rest = eqx.partition(stored, is_learned)
    floating, rest = hax.auto_sharded((floating, rest))

    def step(
        total: Linear | None, x: NamedArray, target: NamedArray, extras: Scores
    ) -> tuple[Linear | None, tuple[Scores, NamedArray]]:
        def chunk(x: NamedArray, floating: Linear) -> Scores:
            return _chunk_scores(x, eqx.combine(floating, rest), target, how)

        # Without learned arrays the scan carries nothing; only the activations get a gradient.
        if total is None:
            chunk_scores, back = jax.vjp(lambda x: chunk(x, floating), x)
            (of_x,) = back(cotangents(chunk_scores, extras))
            return None, (chunk_scores, of_x)
        chunk_scores, back = jax.vjp(chunk, x, floating)
        of_x, of_head = back(cotangents(chunk_scores, extras))
        # `b` has the head's dtype (one chunk's share); the running sum is float32.
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, of_head), (chunk_scores, of_x)

    start = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), floating) if learns else None
    total, (chunk_scores, of_x) = hax.scan(step, Chunks)(start, x, targets, extras)
    of_head = None
    if learns:
        # Reduce-scatters the sums into the shards in which the parameters are stored, still in float32; the rounding
        # to the parameters' dtype comes after the reduction.
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
    """The loop for a dense head `[vocab, embed]`, with a hand-written derivative.

    The carry holds each shard's own sums, over its own rows: the devices reduce them once, after the loop, each for the
    shard of the head that it stores.

    One device alone with fewer tokens than features computes the gradient in the head's own layout: the product then
    transposes tokens × vocabulary, once. Otherwise XLA for CPUs transposes vocabulary × embed, and again for each value
    that the optimizer derives from it.
    """
    operand, learns = stored.operand, any(learned)
    assert isinstance(operand, Dense)
    # Only sharded token axes (batch, position) get an axis of shards; on one device `rows` is empty and `open` and
    # `close` are identities.
    rows = ShardAxis.of(axis for axis in targets.axes if axis != Chunks) if learns else ShardAxis(())

    def step(
        total: NamedArray | None, x: NamedArray, target: NamedArray, extras: Scores
    ) -> tuple[NamedArray | None, tuple[Scores, NamedArray]]:
        chunk_scores, back = _dense_scores(x, weight, target, how, picks=direct)
        of_products = back(cotangents(chunk_scores, extras))
        # ∂L/∂x = ∂L/∂products · W: [tokens, vocab] × [vocab, embed], accumulated in float32 over the vocabulary.
        of_x = hax.dot(of_products, weight, axis="vocab", preferred_element_type=jnp.float32)
        of_x = of_x.rearrange(x.axes).astype(x.dtype)
        if total is not None:
            # Axes to sum over. The shard axes are in `weight.axes` (it was broadcast over them), so they are not
            # summed here and each shard keeps its own partial sum.
            tokens = tuple(axis for axis in target.axes if axis not in weight.axes)
            factors = (_by_token(of_products, tokens), _by_token(x, tokens)) if direct else (x, of_products)
            over = "token" if direct else tokens
            of_weight = hax.dot(*factors, axis=over, preferred_element_type=jnp.float32)
            # `auto_sharded` pins the carry's layout; otherwise XLA may
            # choose one that needs a reduction in every iteration.
            total = hax.auto_sharded(total + of_weight.rearrange(total.axes))
        return total, (chunk_scores, of_x)

    weight, opened = hax.auto_sharded(operand.array), rows.open(x)
    # `ways_in_scope` 1 for every axis: nothing is sharded. `direct` then also lets the target's logit be picked by
    # index, which a sharded vocabulary does not allow.
    alone = all(ways_in_scope(axis.name) == 1 for axis in {*opened.axes, *weight.axes})
    direct = alone and Chunks.size == 1 and math.prod(axis.size for axis in targets.axes) <= weight.axis_size("embed")
    with rows.mapped():
        # Broadcast over the shard axes, so that the products treat them as batch axes and sum within each shard only.
        weight = hax.auto_sharded(weight.broadcast_to((*rows.shards, *weight.axes)))
        # Else `vocab` last: the devices' sums are cut along `embed`, which is cheap for an outer axis only.
        last = () if direct else (weight.resolve_axis("vocab"),)
        sums = (*(axis for axis in weight.axes if axis not in last), *last)
        start = hax.auto_sharded(hax.zeros(sums, dtype=jnp.float32)) if learns else None
        opened_extras = tuple(map(rows.open, extras))
        total, (chunk_scores, of_x) = hax.scan(step, Chunks)(start, opened, rows.open(targets), opened_extras)
    of_head = None
    if total is not None:
        # The one reduction over shards; the constraint to the parameters' shards makes it a reduce-scatter.
        whole = shard_like_parameter(hax.sum(total, rows.shards) if rows.shards else total)
        # The rounding follows the reduce-scatter, when each device has its part. If the compiler moves it before, it
        # lays the whole sum out anew (2 GiB for Llama 3.1 8B); the barrier prevents that.
        array = operand.array
        of_weight = jax.lax.optimization_barrier(whole).rearrange(array.axes).astype(array.dtype)
        structure = jax.tree.structure(stored, is_leaf=lambda x: isinstance(x, NamedArray))
        of_head = jax.tree.unflatten(structure, [of_weight])
    of_x = hax.auto_sharded(rows.close(of_x.rearrange(opened.axes)))
    return HeadOutputs(scores=tuple(map(rows.close, chunk_scores)), of_x=of_x, of_head=of_head)


def _by_token(x: NamedArray, tokens: tuple[Axis, ...]) -> NamedArray:
    """`x` with its tokens as one axis, the first.

    XLA for CPUs multiplies this layout without a copy, along either axis; a contraction along two axes would make a
    transposed copy of one factor.
    """
    first = x.rearrange((*tokens, *(axis for axis in x.axes if axis not in tokens)))
    return first.flatten_axes(tokens, "token")


def head_logits(
    x: NamedArray, head: Linear, *, vocab_size: int | None, soft_cap: float | None, temperature: float = 1.0
) -> NamedArray:
    """Float32 logits of a chunk of activations. Constraint point: the products.

    Args:
        x: activations, `[…, embed]`.
        head: from `embed` to `vocab`.
        vocab_size: real entries of `vocab`; the padding after them gets no probability. None for all.
        soft_cap: bound of the logits, `bound · tanh(logit / bound)`; None for none.
        temperature: the divisor of the logits, after the soft cap.
    """
    return _bounded(_products(x, head), vocab_size=vocab_size, soft_cap=soft_cap, temperature=temperature)


def _products(x: NamedArray, head: Linear) -> NamedArray:
    # float32 even from bfloat16 factors: rounded logits would change the log-sum-exp over a large vocabulary.
    return hax.auto_sharded(head(x, dtype=jnp.float32))


def _bounded(products: NamedArray, *, vocab_size: int | None, soft_cap: float | None, temperature: float) -> NamedArray:
    Vocab = products.resolve_axis("vocab")
    logits = soft_capped(products, soft_cap)
    # The division is in float32; without a temperature there is no operation at all.
    if temperature != 1.0:
        logits = logits / temperature
    # Ids from `vocab_size` on are padding (the table is rounded up so that a mesh axis divides it). HIDDEN is finite,
    # so exp gives 0 and gradients have no NaN.
    if vocab_size is not None and vocab_size < Vocab.size:
        logits = hax.where(hax.arange(Vocab) < vocab_size, logits, HIDDEN)
    return logits


def _is_target(target: NamedArray, logits: NamedArray) -> NamedArray:
    Vocab = logits.resolve_axis("vocab")
    # A one-hot mask by comparison, not by gathering: it stays sharded over `vocab`, and XLA fuses it into the sum. A
    # negative target equals no entry.
    is_target = target.broadcast_axis(Vocab).rearrange(logits.axes) == hax.arange(Vocab).astype(target.dtype)
    return cast(NamedArray, is_target)


def _chunk_scores(x: NamedArray, head: Linear, target: NamedArray, how: HeadScoring) -> Scores:
    """The scores of one chunk."""
    logits = head_logits(x, head, vocab_size=how.vocab_size, soft_cap=how.soft_cap, temperature=how.temperature)
    Vocab = logits.resolve_axis("vocab")
    # Subtracting the maximum keeps exp from overflowing; the
    # maximum is one small all-reduce under a sharded vocabulary.
    top = hax.max(logits, Vocab)
    return _scores_from_logits(logits, top, hax.sum(hax.exp(logits - top), Vocab), target, how)


def _scores_from_logits(
    logits: NamedArray, top: NamedArray, total: NamedArray, target: NamedArray, how: HeadScoring, *, picks: bool = False
) -> Scores:
    """The scores, from logits, their maximum `top`, and `total` = Σ exp(logits − top).

    A target's logit is a masked sum of which one term counts, since `vocab` may be sharded; with `picks` it is gathered
    by index instead, because XLA for CPUs writes the terms of the sum to memory.
    """
    # log Σ exp(logits) = log Σ exp(logits − top) + top.
    normalizer = hax.log(total) + top
    if picks:
        of_target = _picked(logits, target)
    else:
        of_target = hax.sum(hax.where(_is_target(target, logits), logits, 0.0), logits.resolve_axis("vocab"))
    scores = (of_target - normalizer, normalizer) if how.normalizers else (of_target - normalizer,)
    return (*scores, _is_likeliest(logits, top, of_target, target)) if how.likeliest else scores


def _picked(logits: NamedArray, target: NamedArray) -> NamedArray:
    """The logit of each target; 0 for a target that is no entry, as in the masked sum."""
    Vocab, ids = logits.resolve_axis("vocab"), target.array[..., None]
    last = logits.rearrange((*target.axes, Vocab)).array
    # take_along_axis counts negative indices from the end; an index past the end is what `mode="fill"` replaces by 0.
    ids = jnp.where(ids < 0, Vocab.size, ids)
    return hax.named(jnp.take_along_axis(last, ids, axis=-1, mode="fill", fill_value=0.0)[..., 0], target.axes)


def _is_likeliest(logits: NamedArray, top: NamedArray, of_target: NamedArray, target: NamedArray) -> NamedArray:
    """1 where no entry is likelier than the target, and none with a lower id is as likely; 0 elsewhere."""
    Vocab = logits.resolve_axis("vocab")
    lower = hax.arange(Vocab).astype(target.dtype).broadcast_to(logits.axes)
    # True at entries whose id is below the target's, for the rule of ties: argmax takes the lowest id.
    lower = lower < target.broadcast_axis(Vocab).rearrange(logits.axes)
    as_likely = hax.any((logits == top.broadcast_axis(Vocab).rearrange(logits.axes)) & lower, Vocab)
    return ((of_target == top) & ~as_likely).astype(jnp.float32)


def _dense_scores(
    x: NamedArray, weight: NamedArray, target: NamedArray, how: HeadScoring, *, picks: bool
) -> tuple[Scores, Callable[[Scores], NamedArray]]:
    """The scores of one chunk, and the function from their cotangents to that of the products of activations and head.

    The latter is in the dtype of the activations. With p the distribution over the vocabulary, ∂ log p[target] / ∂
    logits = onehot(target) − p and ∂ log-normalizer / ∂ logits = p. It is written by hand because of how XLA for CPUs
    compiles JAX's derivative: it subtracts the normalizer again for each of the two products that read this, for one of
    them column by column, and computes the head's gradient from a transposed copy of it. Here both products read it in
    its own layout. On TPUs it never becomes an array but is fused into the products, as with JAX's; p as a quotient
    would become one (3.9 GiB more for 64k positions × 32k entries in one chunk).
    """
    Vocab = weight.resolve_axis("vocab")
    bounded = functools.partial(_bounded, vocab_size=how.vocab_size, soft_cap=how.soft_cap, temperature=how.temperature)
    products = _products(x, Linear(weight=weight, bias=None, In=("embed",)))
    # The vjp goes through soft cap and padding mask: tanh's
    # derivative comes from JAX, and masked columns get gradient 0.
    logits, through_bounds = jax.vjp(bounded, products)
    top = hax.max(logits, Vocab)
    # `powers` serves the log-sum-exp here and p in the backward pass; the exponential is computed once.
    powers = hax.exp(logits - top)
    total = hax.sum(powers, Vocab)

    def back(cotangents: Scores) -> NamedArray:
        # A multiplication by the reciprocal, not a division: see the docstring on what a quotient costs on TPUs.
        p = powers * (1.0 / total)
        of_logprob = cotangents[0]
        of_p = cotangents[1] - of_logprob if how.normalizers else -of_logprob
        # c · (onehot − p) + z · p = c · onehot + (z − c) · p, with c and z the cotangents of log p and log-normalizer.
        of_logits = hax.where(_is_target(target, logits), of_logprob + of_p * p, of_p * p)
        (of_products,) = through_bounds(of_logits.rearrange(logits.axes))
        # Rounded to the activations' dtype, so that the two products that follow run on the matrix units in 16 bits.
        return hax.auto_sharded(of_products.astype(x.dtype))

    return _scores_from_logits(logits, top, total, target, how, picks=picks), back
