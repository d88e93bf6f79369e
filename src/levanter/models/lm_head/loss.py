"""Weighted sums of a head's scores. Their gradient is computed in the same loop as the scores.

A train step minimizes a sum over tokens with weights that are known before the forward pass:

    −Σ weight · log p[target]  +  z_weight · Σ weight · log-normalizer²

So the cotangent of each token's scores is known as soon as they are, and the loop over chunks computes a chunk's logits
and multiplies their gradient by the head and by the activations at once: three products, and no logits are kept or
recomputed. The gradients are scaled later by the cotangent of the sum, a scalar, which is 1 in a train step. Where
nothing is differentiated, no gradient is computed.
"""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.custom_derivatives import SymbolicZero

from levanter.layers.linear import Linear
from levanter.models.lm_head.chunks import Chunked, HeadScoring, Scores, gathered_once, scores, scores_and_gradients


class LossSums(eqx.Module):
    """The weighted sums, float32 scalars.

    Attributes:
        minimized: `loss + z_weight · squared_normalizers`; the only one that can be differentiated, in activations and
            head.
        loss: −Σ weight · log p[target].
        squared_normalizers: Σ weight · log-normalizer²; None where its weight is 0.
    """

    minimized: jax.Array
    loss: jax.Array
    squared_normalizers: jax.Array | None


def weighted_loss(
    activations: NamedArray,
    head: Linear,
    targets: NamedArray,
    weights: NamedArray,
    *,
    chunk: int,
    vocab_size: int | None = None,
    soft_cap: float | None = None,
    z_weight: float = 0.0,
) -> LossSums:
    """The weighted sums of `targets`' scores at the activations.

    Args:
        activations: `[…, position, embed]`.
        head: from `embed` to `vocab`, in the dtype of the activations.
        targets: ids, `[…, position]`.
        weights: float32, of each target, over its axes; where one is 0, the target is ignored.
        chunk: positions at a time.
        vocab_size: entries of `vocab` that count; None for all.
        soft_cap: bound of the logits; see `head_logits`.
        z_weight: of the squared log-normalizers in what is minimized; 0 for none.
    """
    chunked = Chunked.of(targets.resolve_axis("position"), chunk)
    how = HeadScoring(vocab_size=vocab_size, soft_cap=soft_cap, normalizers=z_weight != 0)
    weights = weights.rearrange(targets.axes)
    with jax.named_scope("lm_head"):
        cut = chunked.cut(activations), head, chunked.cut(targets), chunked.cut(weights)
        return _sums(*cut, chunked.Chunks, how, z_weight)


# Arguments 4 to 6 (axis, settings, weight) are static: they select the traced loop.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _sums(
    x: NamedArray,
    head: Linear,
    targets: NamedArray,
    weights: NamedArray,
    Chunks: Axis,
    how: HeadScoring,
    z_weight: float,
) -> LossSums:
    """The sums alone: the primal function, which runs where nothing is differentiated."""
    return _summed(scores(x, head, targets, Chunks, how), weights, z_weight)


class _Gradients(eqx.Module):
    """The gradients of `minimized`, for a cotangent of 1.

    Attributes:
        of_x: of the activations; None where it is not needed.
        of_head: of the head; None where it is not needed, and None for its arrays that are not differentiated.
    """

    of_x: NamedArray | None
    of_head: Linear | None


def _sums_forward(x, head, targets, weights, Chunks, how, z_weight):
    # With `symbolic_zeros`, JAX passes each input as (value,
    # perturbed); `perturbed` says whether it is differentiated.
    needs_x_gradient, learned = x.array.perturbed, tuple(bool(leaf.perturbed) for leaf in jax.tree.leaves(head))
    assert not weights.array.perturbed, "the sums are not differentiated by their weights"
    x, head, targets, weights = jax.tree.map(lambda leaf: leaf.value, (x, head, targets, weights))
    # A head that is not learned is gathered here, before the loop, and not for each chunk.
    head = gathered_once(head, learned)
    cotangents = functools.partial(_cotangents, z_weight=z_weight)
    outputs = scores_and_gradients(x, head, targets, (weights,), cotangents, Chunks=Chunks, how=how, learned=learned)
    gradients = _Gradients(of_x=outputs.of_x if needs_x_gradient else None, of_head=outputs.of_head)
    return _summed(outputs.scores, weights, z_weight), gradients


def _sums_backward(*fixed_kept_and_cotangent):
    *_, gradients, cotangent = fixed_kept_and_cotangent
    # `loss` and `squared_normalizers` are for logging. No gradients were computed for them, so a cotangent other than
    # zero would be silently dropped.
    reported = (cotangent.loss, cotangent.squared_normalizers)
    assert all(x is None or isinstance(x, SymbolicZero) for x in reported), (
        "of these sums only `minimized` can be differentiated; token_scores gives scores of which any function can"
    )
    factor = cotangent.minimized
    # No cotangent at all: the result was not used in what is differentiated.
    if isinstance(factor, SymbolicZero):
        factor = jnp.float32(0)
    # By linearity: the stored gradients are for a cotangent of 1. The product is float32 and rounded once.
    scaled = jax.tree.map(lambda a: (a.astype(jnp.float32) * factor).astype(a.dtype), gradients)
    # Targets are integers and weights are asserted constant: neither has a gradient.
    return scaled.of_x, scaled.of_head, None, None


_sums.defvjp(_sums_forward, _sums_backward, symbolic_zeros=True)


def _summed(scores: Scores, weights: NamedArray, z_weight: float) -> LossSums:
    def counted(values: NamedArray) -> jax.Array:
        # `where` before the product: 0 · inf or 0 · NaN at an ignored position would make the sum NaN.
        return hax.sum(hax.where(weights != 0, values, 0.0) * weights).scalar()

    loss = -counted(scores[0])
    if z_weight == 0:
        return LossSums(minimized=loss, loss=loss, squared_normalizers=None)
    squared = counted(scores[1] * scores[1])
    return LossSums(minimized=loss + z_weight * squared, loss=loss, squared_normalizers=squared)


def _cotangents(scores: Scores, extras: Scores, *, z_weight: float) -> Scores:
    """The cotangents of a chunk's scores where `minimized` has cotangent 1; `extras` holds the weights."""
    (weights,) = extras
    # Of −w · log p: −w. Of z_weight · w · n², with n the log-normalizer: 2 · z_weight · w · n.
    return (-weights,) if z_weight == 0 else (-weights, 2 * z_weight * weights * scores[1])
