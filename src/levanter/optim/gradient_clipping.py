"""Clipping of the gradient by its global norm: optax's, by a product.

Optax divides the gradient by its norm, and takes the quotient or the gradient. A compiler may do cheap work again for
each reader, but not a division: XLA for CPUs writes the quotient out, and Adam's two averages read it and the gradient
besides, which is a tenth of a step whose vocabulary is large. The quotient of two scalars costs nothing.
"""

import jax
import jax.numpy as jnp
import optax

from haliax_ext.pytree import PyTree
from levanter.optim.norms import global_norm_by_layer


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales everything down to a global norm of `max_norm` where it is larger (Pascanu et al., arXiv:1211.5063).

    The numbers are those of `optax.clip_by_global_norm` but for the last bits; the state is the same.

    Args:
        max_norm: the largest global norm.
    """

    def update(updates: PyTree, state: optax.EmptyState, params: PyTree = None) -> tuple[PyTree, optax.EmptyState]:
        del params
        norm = global_norm_by_layer(updates)
        factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]
