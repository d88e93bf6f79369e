"""The output head over many positions: log-probabilities of given targets, each of them differentiable.

An objective whose derivative differs for each token (pairs of texts, a custom loss) costs one product more than
`lm_head.loss`: the logits are recomputed in the backward pass, when the cotangents are known.

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
    """Log-probability of `targets` at each activation; after it, if requested, the log-normalizer. Float32.

    Args:
        activations: `[…, position, embed]`.
        head: from `embed` to `vocab`, in the dtype of the activations.
        targets: ids, `[…, position]`; the scores of negative ones have no meaning.
        chunk: positions at a time.
        how: which scores to compute.
    """
    chunked = Chunked.of(targets.resolve_axis("position"), chunk)
    with jax.named_scope("lm_head"):
        inputs = chunked.cut(activations), head, chunked.cut(targets)
        chunk_scores = cast(Scores, _in_chunks(*inputs, chunked.Chunks, how))
    return tuple(chunked.whole(x, targets.axes) for x in chunk_scores)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _in_chunks(x: NamedArray, head: Linear, targets: NamedArray, Chunks: Axis, how: HeadScoring) -> Scores:
    """`scores` with a custom derivative: JAX's would accumulate the head's gradient in the dtype of the head."""
    return scores(x, head, targets, Chunks, how)


class _Kept(eqx.Module):
    """The residuals of the backward pass. No logits are among them.

    Attributes:
        x, head, targets: the inputs.
        learned: for each array of the head, whether it is differentiated.
    """

    x: NamedArray
    head: Linear
    targets: NamedArray
    learned: tuple[bool, ...] = eqx.field(static=True)


def _in_chunks_forward(x, head, targets, Chunks, how):
    # JAX says of each input whether it is differentiated. For a head that is not, the sum of its gradients would
    # be an unused carry of the loop: XLA for CPUs drops it, but only after each chunk's rows were laid out for it.
    learned = tuple(bool(leaf.perturbed) for leaf in jax.tree.leaves(head))
    x, head, targets = jax.tree.map(lambda leaf: leaf.value, (x, head, targets))
    return _in_chunks(x, head, targets, Chunks, how), _Kept(x=x, head=head, targets=targets, learned=learned)


def _in_chunks_backward(Chunks, how, residuals, cotangent):
    # A score that nobody differentiates arrives as a SymbolicZero; the scan needs an array to slice.
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
        # The cotangents are themselves the loop's extras: nothing is to be computed from the scores.
        lambda _, cotangents: cotangents,
        Chunks=Chunks,
        how=how,
        learned=residuals.learned,
    )
    # Targets are integers: no gradient.
    return outputs.of_x, outputs.of_head, None


_in_chunks.defvjp(_in_chunks_forward, _in_chunks_backward, symbolic_zeros=True)
