"""The output head over many positions: log-probabilities of given targets, a chunk of positions at a time.

The logits of a whole sequence never exist. One `scan` goes through the positions, a chunk's logits are float32 and
recomputed in the backward pass, and the head's gradient is added up in float32 over the chunks. Under `vocab → model`
each device holds its columns of a chunk's logits: the log-sum-exp is two small all-reduces, and the target's logit is a
sum under a mask, so nothing is gathered across shards.

A chunk holds every n-th position, not a run of them: a mapping that shards `position` then shards every chunk.
"""

import functools
from dataclasses import dataclass
from typing import cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.custom_derivatives import SymbolicZero

from haliax_ext.by_shard import OpenedAxes
from haliax_ext.divisibility import divisors
from haliax_ext.mapping import shard_like_parameter
from levanter.layers.attention.reference import HIDDEN, soft_capped
from levanter.layers.linear import Dense, Linear


@dataclass(frozen=True, kw_only=True)
class HeadScoring:
    """What is found of each token: by which distribution, and whether its log-normalizer is wanted.

    Attributes:
        vocab_size: entries of `vocab` that count; None for all.
        soft_cap: bound of the logits; see `head_logits`.
        normalizers: whether the log-normalizers are wanted beside the log-probabilities.
    """

    vocab_size: int | None
    soft_cap: float | None
    normalizers: bool


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


def target_scores(
    activations: NamedArray, head: Linear, targets: NamedArray, *, chunk: int, how: HeadScoring
) -> tuple[NamedArray, ...]:
    """Log-probability of `targets` at each activation; behind it the log-normalizer, where it is wanted. Float32.

    Args:
        activations: `[…, position, embed]`.
        head: from `embed` to `vocab`, in the dtype of the activations.
        targets: ids, `[…, position]`; what is found where one is negative means nothing.
        chunk: positions at a time.
        how: what is found.
    """
    Pos = targets.resolve_axis("position")
    count, size = chunking(Pos.size, chunk)
    Chunks, Chunk = Axis("chunks", count), Pos.resize(size)
    padding = Chunk.size * Chunks.size - Pos.size

    def cut(x: NamedArray) -> NamedArray:
        return hax.pad(x, {Pos: (0, padding)}).unflatten_axis(Pos.name, (Chunk, Chunks))

    with jax.named_scope("lm_head"):
        found = cast(tuple[NamedArray, ...], _in_chunks(cut(activations), head, cut(targets), Chunks, how))
    others = [axis for axis in targets.axes if axis != Pos]

    def whole(x: NamedArray) -> NamedArray:
        x = x.rearrange((*others, Chunk, Chunks)).flatten_axes((Chunk, Chunks), Pos.resize(Pos.size + padding))
        return hax.auto_sharded(x[Pos.name, 0 : Pos.size].rearrange(targets.axes))

    return tuple(whole(x) for x in found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _in_chunks(
    x: NamedArray, head: Linear, targets: NamedArray, Chunks: Axis, how: HeadScoring
) -> tuple[NamedArray, ...]:
    """`_chunk_scores` of each chunk, in a loop.

    Its own derivative, because JAX's would add up the head's gradient over the chunks in the head's dtype: in 16 bits,
    the later chunks of a long sequence hardly count. Here it is added up in float32 and rounded once.
    """
    # Outside of the loop, so that a head that is sharded for storage is gathered once and not in each chunk. Inside of
    # this function, because the constraint would hold for the gradient too, which nobody needs whole.
    head = hax.auto_sharded(head)

    def step(_: None, x: NamedArray, target: NamedArray) -> tuple[None, tuple[NamedArray, ...]]:
        return None, _chunk_scores(x, head, target, how)

    _, found = hax.scan(step, Chunks)(None, x, targets)
    return found


class _Kept(eqx.Module):
    """What the backward pass needs.

    Attributes:
        x, head, targets: the inputs.
        learns: whether anybody asks for a gradient of the head.
    """

    x: NamedArray
    head: Linear
    targets: NamedArray
    learns: bool = eqx.field(static=True)


def _in_chunks_forward(x, head, targets, Chunks, how):
    # JAX says of each input whether it is differentiated. Where a head is not, the sum of its gradients would be a
    # carry of a loop that nobody reads: XLA for CPUs drops it, but not before each chunk's rows are spread for it.
    learns = any(each.perturbed for each in jax.tree.leaves(head))
    x, head, targets = jax.tree.map(lambda each: each.value, (x, head, targets))
    return _in_chunks(x, head, targets, Chunks, how), _Kept(x=x, head=head, targets=targets, learns=learns)


def _in_chunks_backward(Chunks, how, kept, cotangent):
    x, head, targets = kept.x, kept.head, kept.targets
    cotangent = jax.tree.map(
        lambda each: jnp.zeros(each.shape, jnp.float32) if isinstance(each, SymbolicZero) else each,
        cotangent,
        is_leaf=lambda each: isinstance(each, SymbolicZero),
    )
    if not kept.learns:
        return _activation_gradients(x, head, targets, cotangent, Chunks, how), None, None
    if isinstance(head.operand, Dense) and head.bias is None:
        of_x, of_weight = _dense_gradients(x, head.operand.array, targets, cotangent, Chunks, how)
        structure = jax.tree.structure(head, is_leaf=lambda x: isinstance(x, NamedArray))
        return of_x, jax.tree.unflatten(structure, [of_weight]), None
    return *_gradients(x, head, targets, cotangent, Chunks, how), None


_in_chunks.defvjp(_in_chunks_forward, _in_chunks_backward, symbolic_zeros=True)


def _activation_gradients(
    x: NamedArray,
    stored: Linear,
    targets: NamedArray,
    cotangent: tuple[NamedArray, ...],
    Chunks: Axis,
    how: HeadScoring,
) -> NamedArray:
    """What `_in_chunks` gives back to the activations, where the head is frozen."""
    head = hax.auto_sharded(stored)

    def step(_: None, x: NamedArray, target: NamedArray, given: tuple[NamedArray, ...]) -> tuple[None, NamedArray]:
        if isinstance(head.operand, Dense) and head.bias is None:
            weight = head.operand.array
            of_products = _product_gradients(x, weight, target, given, how)
            return None, _activation_products(of_products, weight).rearrange(x.axes).astype(x.dtype)
        (of_x,) = jax.vjp(lambda x: _chunk_scores(x, head, target, how), x)[1](given)
        return None, of_x

    _, of_x = hax.scan(step, Chunks)(None, x, targets, cotangent)
    return hax.auto_sharded(of_x.rearrange(x.axes))


def _gradients(
    x: NamedArray,
    stored: Linear,
    targets: NamedArray,
    cotangent: tuple[NamedArray, ...],
    Chunks: Axis,
    how: HeadScoring,
) -> tuple[NamedArray, Linear]:
    """What `_in_chunks` gives back for `cotangent`, by JAX's derivative of each chunk; None for integers."""
    floating, rest = eqx.partition(stored, eqx.is_inexact_array)
    floating, rest = hax.auto_sharded((floating, rest))

    def step(
        total: Linear, x: NamedArray, target: NamedArray, given: tuple[NamedArray, ...]
    ) -> tuple[Linear, NamedArray]:
        def scores(x: NamedArray, floating: Linear) -> tuple[NamedArray, ...]:
            return _chunk_scores(x, eqx.combine(floating, rest), target, how)

        of_x, of_head = jax.vjp(scores, x, floating)[1](given)
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, of_head), of_x

    start = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), floating)
    total, of_x = hax.scan(step, Chunks)(start, x, targets, cotangent)
    stored_alike = jax.tree.map(
        lambda a: shard_like_parameter(a) if eqx.is_array(a.array) else a,
        total,
        is_leaf=lambda a: isinstance(a, NamedArray),
    )
    of_head = jax.tree.map(lambda a, like: a.astype(like.dtype), stored_alike, floating)
    return hax.auto_sharded(of_x.rearrange(x.axes)), of_head


def _dense_gradients(
    x: NamedArray,
    stored: NamedArray,
    targets: NamedArray,
    cotangent: tuple[NamedArray, ...],
    Chunks: Axis,
    how: HeadScoring,
) -> tuple[NamedArray, NamedArray]:
    """`_gradients` for a head `[vocab, embed]` that is an array, by hand.

    What is added up are each shard's own sums, over its own rows: the devices add theirs up once, behind the loop, each
    for the shard of the head that it stores.
    """
    rows = OpenedAxes.of(axis for axis in targets.axes if axis != Chunks)

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
    return hax.auto_sharded(rows.close(of_x.rearrange(opened.axes))), of_head


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
    found = target.broadcast_axis(Vocab).rearrange(logits.axes) == hax.arange(Vocab).astype(target.dtype)
    return cast(NamedArray, found)


def _chunk_scores(x: NamedArray, head: Linear, target: NamedArray, how: HeadScoring) -> tuple[NamedArray, ...]:
    """The log-probabilities of the targets; behind them the log-normalizers, where they are wanted."""
    logits = head_logits(x, head, vocab_size=how.vocab_size, soft_cap=how.soft_cap)
    Vocab = logits.resolve_axis("vocab")
    top = hax.max(logits, Vocab)
    normalizer = hax.log(hax.sum(hax.exp(logits - top), Vocab)) + top
    logprob = hax.sum(hax.where(_is_target(target, logits), logits, 0.0), Vocab) - normalizer
    return (logprob, normalizer) if how.normalizers else (logprob,)


def _chunk_gradients(
    x: NamedArray, weight: NamedArray, target: NamedArray, given: tuple[NamedArray, ...], how: HeadScoring
) -> tuple[NamedArray, NamedArray]:
    """What `_chunk_scores` gives back for `given`: the gradient of `x` in its dtype, the head's in float32."""
    of_products = _product_gradients(x, weight, target, given, how)
    of_x = _activation_products(of_products, weight)
    tokens = tuple(axis for axis in target.axes if axis not in weight.axes)
    of_weight = hax.dot(x, of_products, axis=tokens, preferred_element_type=jnp.float32)
    return of_x.rearrange(x.axes).astype(x.dtype), of_weight


def _activation_products(of_products: NamedArray, weight: NamedArray) -> NamedArray:
    return hax.dot(of_products, weight, axis="vocab", preferred_element_type=jnp.float32)


def _product_gradients(
    x: NamedArray, weight: NamedArray, target: NamedArray, given: tuple[NamedArray, ...], how: HeadScoring
) -> NamedArray:
    """What a chunk's products of activations and head get back for `given`, in the dtype of the activations.

    With p the distribution over the vocabulary, ∂ log p[target] / ∂ logits = onehot(target) − p and
    ∂ log-normalizer / ∂ logits = p. By hand, because of how XLA for CPUs compiles JAX's: it subtracts the normalizer
    again for each of the two products that read this, for one of them column by column, and has the head's gradient
    from a transposed copy of it. Here both products take it as it lies. On TPUs it is no array at all but part of the
    products, as in JAX's; p as a quotient would be one (3.9 GiB more for 64k positions × 32k entries in one chunk).
    """
    Vocab = weight.resolve_axis("vocab")
    bounded = functools.partial(_bounded, vocab_size=how.vocab_size, soft_cap=how.soft_cap)
    products = _products(x, Linear(weight=weight, bias=None, In=("embed",)))
    logits, through_bounds = jax.vjp(bounded, products)
    powers = hax.exp(logits - hax.max(logits, Vocab))
    p = powers * (1.0 / hax.sum(powers, Vocab))
    of_logprob = given[0]
    of_p = given[1] - of_logprob if how.normalizers else -of_logprob
    (of_products,) = through_bounds(
        hax.where(_is_target(target, logits), of_logprob + of_p * p, of_p * p).rearrange(logits.axes)
    )
    return hax.auto_sharded(of_products.astype(x.dtype))
