"""Global norm, gradient clipping and learning-rate scaling, written for XLA's fusion on CPUs.

Each computes the same numbers as its optax counterpart, except for the last bits. The compiled statistics of TPU pods
were recorded with optax's versions, so `OptimizerConfig.build` uses these on CPUs only.

- `global_norm_by_layer` sums each layer of a stack first, like the per-layer norms that a step logs. Otherwise XLA for
  CPUs materializes squares that are summed in two ways, and with them the parameters of all layers.
- `clip_by_global_norm` multiplies by a scalar, while optax divides the gradient by its norm and selects. XLA recomputes
  cheap operations for each reader, but not divisions: it materializes the quotient, and Adam's two averages then read
  both the quotient and the gradient, which takes a tenth of a step with a large vocabulary.
- `scale_by_learning_rate` divides by −1 / learning rate, while optax multiplies. A step reads its update twice, for its
  norm and for the parameters. With a product XLA materializes the factor and the product, or, if the learning rate is
  a constant and a table and a head have equal shapes, an array of that shape that contains only the constant.
"""

from collections.abc import Iterator

import haliax as hax
import jax
import jax.numpy as jnp
import optax

from haliax_ext.pytree import PyTree
from levanter.optim.schedules import Schedule

LAYERS = "layers"


def global_norm(tree: PyTree) -> jax.Array:
    """The root of the sum of squares of all arrays in `tree`, float32.

    >>> float(global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0])}))
    5.0
    """
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))


def global_norm_by_layer(tree: PyTree) -> jax.Array:
    """`global_norm` with another order of summation, so the last bits differ."""
    return jnp.sqrt(sum(_sums_of_squares(tree)))


def _sums_of_squares(tree: PyTree) -> Iterator[jax.Array]:
    for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, hax.NamedArray)):
        # Arrays without named axes cannot be told apart by layer and are summed as a whole.
        names = [axis.name for axis in x.axes] if isinstance(x, hax.NamedArray) else []
        array = x.array if isinstance(x, hax.NamedArray) else x
        squares = jnp.square(array.astype(jnp.float32))
        if LAYERS in names:
            by_layer = jnp.sum(squares, axis=tuple(n for n, name in enumerate(names) if name != LAYERS))
            # The identity, since sums of squares are not negative. Without it the compiler merges the two sums.
            squares = jnp.maximum(by_layer, 0.0)
        yield jnp.sum(squares)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales gradients down to a global norm of `max_norm` if theirs is larger (Pascanu et al., arXiv:1211.5063).

    The same numbers as `optax.clip_by_global_norm` except for the last bits, and the same state.

    Args:
        max_norm: the largest global norm.

    >>> clip = clip_by_global_norm(1.0)
    >>> clipped, _ = clip.update(jnp.array([3.0, 4.0]), clip.init(None))
    >>> [round(x, 2) for x in clipped.tolist()]
    [0.6, 0.8]
    """

    def update(updates: PyTree, state: optax.EmptyState, params: PyTree = None) -> tuple[PyTree, optax.EmptyState]:
        del params
        norm = global_norm_by_layer(updates)
        # A NaN norm compares as false and makes all updates NaN, as in optax.
        factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]


def scale_by_learning_rate(schedule: Schedule) -> optax.GradientTransformation:
    """Divides updates by −1 / learning rate.

    The same numbers as `optax.scale_by_learning_rate` except for the last bits, and the same state. With a learning
    rate of 0 the divisor is infinite and the updates are 0.

    Args:
        schedule: number of the update → learning rate.

    >>> scale = scale_by_learning_rate(lambda step: jnp.float32(0.25))
    >>> updates, _ = scale.update(jnp.array([4.0]), scale.init(jnp.array([0.0])))
    >>> float(updates[0])
    -1.0
    """
    multiplied = optax.scale_by_learning_rate(schedule)  # pyright: ignore[reportArgumentType]

    def update(
        updates: PyTree, state: optax.ScaleByScheduleState, params: PyTree = None
    ) -> tuple[PyTree, optax.ScaleByScheduleState]:
        del params
        count = jnp.asarray(state.count)
        rate = jnp.asarray(schedule(count), jnp.float32)
        # Counts are not negative, but the compiler does not know that. A constant divisor it would turn into a factor.
        divisor = jnp.where(count < 0, 1.0, -1.0 / rate)
        after = optax.ScaleByScheduleState(count=optax.safe_increment(count))
        return jax.tree.map(lambda g: g / divisor.astype(g.dtype), updates), after

    return optax.GradientTransformation(multiplied.init, update)  # pyright: ignore[reportArgumentType]


def updated(
    optimizer: optax.GradientTransformation, gradients: PyTree, state: PyTree, params: PyTree, **extra: PyTree
) -> tuple[PyTree, PyTree]:
    """The updates of an optimizer and its next state; `extra` reaches only an optimizer that takes it."""
    return optax.with_extra_args_support(optimizer).update(gradients, state, params, **extra)
