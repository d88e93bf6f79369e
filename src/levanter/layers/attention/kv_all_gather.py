"""Keys and values that lie on the devices where their queries do, gathered by each device for a kernel.

Gathered there, and not by the compiler outside of it, what flows back is summed and cut at once (a reduce-scatter),
where a compiler sums whole gradients on all devices and cuts them afterwards.
"""

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from haliax import Axis

from levanter.layers.attention.kernel_specs import AxisShards

Attend = Callable[..., jax.Array]
"""Attention on one device: `attend(*kernel, arrays, rows=…)`; keys and values are `[…, key_position, head_size]`."""


def gathers_keys(cut: AxisShards, Pos: Axis, KeyPos: Axis) -> bool:
    """Whether queries are cut, and keys, the same tokens, can be cut as they are."""
    parts = cut.ways(Pos)
    return parts > 1 and cut.ways(KeyPos) == 1 and Pos.size == KeyPos.size and KeyPos.size % parts == 0


def gathering(axes: tuple[str, ...], zigzag: int, length: int) -> Callable[[Attend], Attend]:
    """What makes of attention to all keys one of which a device has the part that its queries have.

    Args:
        axes: mesh axes that cut keys and values.
        zigzag: over how many parts they lie in zigzag order; they are put in their own. 1 for their own.
        length: what they are padded to.
    """

    def gathered(x: jax.Array, groups: list[list[int]] | None = None) -> jax.Array:
        # Along an axis of its own, the outermost: along another one a TPU's compiler sums before it cuts, after all.
        each = jax.lax.all_gather(x, axes, axis_index_groups=groups)
        along = x.ndim - 2
        return jnp.moveaxis(each, 0, along).reshape(*x.shape[:along], -1, x.shape[-1])

    def all_of(x: jax.Array) -> jax.Array:
        along = x.ndim - 2
        if zigzag > 1:
            # Early runs lie in order, late ones in the opposite one.
            early, late = jnp.split(x, 2, axis=along)
            backwards = [list(reversed(range(zigzag)))]
            whole = jnp.concatenate((gathered(early), gathered(late, backwards)), axis=along)
        else:
            whole = gathered(x)
        return jnp.pad(whole, [(0, length - whole.shape[along] if axis == along else 0) for axis in range(x.ndim)])

    def with_keys(attend: Attend) -> Attend:
        def attend_to_all(*given: object, rows: int) -> jax.Array:
            *kernel, last = given
            arrays = cast(dict[str, jax.Array], last)
            return attend(*kernel, arrays | {name: all_of(arrays[name]) for name in ("k", "v")}, rows=rows)

        return attend_to_all

    return with_keys
