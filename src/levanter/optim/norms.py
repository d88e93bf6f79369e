"""The norm of everything in a tree.

Two ways to the same number. `global_norm` adds up the squares of each array at once, and is what every figure of a pod
was compiled with. `global_norm_by_layer` adds up each layer of a stack first, as the norms that a step shows of its
layers do: XLA for CPUs writes squares out that are summed in two ways, and the parameters of all layers with them.
"""

from collections.abc import Iterator

import haliax as hax
import jax
import jax.numpy as jnp

from haliax_ext.pytree import PyTree

LAYERS = "layers"


def global_norm(tree: PyTree) -> jax.Array:
    """The root of the sum of squares of everything in `tree`, float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))


def global_norm_by_layer(tree: PyTree) -> jax.Array:
    """`global_norm` but for the order of its sums, and so its last bits."""
    return jnp.sqrt(sum(_sums_of_squares(tree)))


def _sums_of_squares(tree: PyTree) -> Iterator[jax.Array]:
    for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, hax.NamedArray)):
        names = [axis.name for axis in x.axes] if isinstance(x, hax.NamedArray) else []
        array = x.array if isinstance(x, hax.NamedArray) else x
        squares = jnp.square(array.astype(jnp.float32))
        if LAYERS in names:
            each = jnp.sum(squares, axis=tuple(n for n, name in enumerate(names) if name != LAYERS))
            # Changes nothing, but of two sums one behind the other the compiler makes one.
            squares = jnp.maximum(each, 0.0)
        yield jnp.sum(squares)
