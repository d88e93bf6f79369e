"""The output head over many positions: log-probabilities of given targets, each of them differentiable.

Whoever has a derivative for each token (pairs of texts, a loss of a script's own) pays a product more than
`models.head_loss`: the logits are recomputed in the backward pass, when the cotangents are known.
"""

import functools
from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.custom_derivatives import SymbolicZero

from levanter.layers.linear import Linear
from levanter.models.lm_head.chunks import Chunked, HeadScoring, Scores, gathered_once, scores, scores_and_gradients


def target_scores(
    activations: NamedArray, head: Linear, targets: NamedArray, *, chunk: int, how: HeadScoring
) -> Scores:
    """Log-probability of `targets` at each activation; behind it the log-normalizer, where it is wanted. Float32.

    Args:
        activations: `[…, position, embed]`.
        head: from `embed` to `vocab`, in the dtype of the activations.
        targets: ids, `[…, position]`; what is found where one is negative means nothing.
        chunk: positions at a time.
        how: what is found.
    """
    chunked = Chunked.of(targets.resolve_axis("position"), chunk)
    with jax.named_scope("lm_head"):
        inputs = chunked.cut(activations), head, chunked.cut(targets)
        chunk_scores = cast(Scores, _in_chunks(*inputs, chunked.Chunks, how))
    return tuple(chunked.whole(x, targets.axes) for x in chunk_scores)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _in_chunks(x: NamedArray, head: Linear, targets: NamedArray, Chunks: Axis, how: HeadScoring) -> Scores:
    """`scores`, with a derivative of its own: JAX's would add up the head's gradient in the dtype of the head."""
    return scores(x, head, targets, Chunks, how)


class _Kept(eqx.Module):
    """What the backward pass needs.

    Attributes:
        x, head, targets: the inputs.
        learned: of which arrays of the head a gradient is asked for.
    """

    x: NamedArray
    head: Linear
    targets: NamedArray
    learned: tuple[bool, ...] = eqx.field(static=True)


def _in_chunks_forward(x, head, targets, Chunks, how):
    # JAX says of each input whether it is differentiated. Where a head is not, the sum of its gradients would be a
    # carry of a loop that nobody reads: XLA for CPUs drops it, but not before each chunk's rows are spread for it.
    learned = tuple(bool(leaf.perturbed) for leaf in jax.tree.leaves(head))
    x, head, targets = jax.tree.map(lambda leaf: leaf.value, (x, head, targets))
    return _in_chunks(x, head, targets, Chunks, how), _Kept(x=x, head=head, targets=targets, learned=learned)


def _in_chunks_backward(Chunks, how, residuals, cotangent):
    cotangent = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, jnp.float32) if isinstance(leaf, SymbolicZero) else leaf,
        cotangent,
        is_leaf=lambda leaf: isinstance(leaf, SymbolicZero),
    )
    outputs = scores_and_gradients(
        residuals.x,
        gathered_once(residuals.head, residuals.learned),
        residuals.targets,
        cotangent,
        lambda _, cotangents: cotangents,
        Chunks=Chunks,
        how=how,
        learned=residuals.learned,
    )
    return outputs.of_x, outputs.of_head, None


_in_chunks.defvjp(_in_chunks_forward, _in_chunks_backward, symbolic_zeros=True)
