"""Multiplication by the learning rate: optax's, by a division.

A step reads its update twice: for its norm, and to add it to the parameters. A compiler repeats a product for each
reader, but not a division: by a product XLA for CPUs writes out both what is multiplied and the product of it, or,
where the learning rate is one constant for a table and a head that are alike, an array of their size that holds nothing
but that constant. By a division it writes the update out and nothing else.
"""

import jax
import jax.numpy as jnp
import optax

from haliax_ext.pytree import PyTree
from levanter.optim.schedules import Schedule


def scale_by_learning_rate(schedule: Schedule) -> optax.GradientTransformation:
    """Divides updates by −1 / learning rate.

    The numbers are those of `optax.scale_by_learning_rate` but for the last bits; the state is the same. Where the
    learning rate is 0, so are the updates.

    Args:
        schedule: from the number of the update to the learning rate.
    """
    multiplied = optax.scale_by_learning_rate(schedule)  # pyright: ignore[reportArgumentType]

    def update(
        updates: PyTree, state: optax.ScaleByScheduleState, params: PyTree = None
    ) -> tuple[PyTree, optax.ScaleByScheduleState]:
        del params
        count = jnp.asarray(state.count)
        rate = jnp.asarray(schedule(count), jnp.float32)
        # No count is negative, which the compiler does not know: by a constant it would multiply.
        divisor = jnp.where(count < 0, 1.0, -1.0 / rate)
        after = optax.ScaleByScheduleState(count=optax.safe_increment(count))
        return jax.tree.map(lambda g: g / divisor.astype(g.dtype), updates), after

    return optax.GradientTransformation(multiplied.init, update)  # pyright: ignore[reportArgumentType]
