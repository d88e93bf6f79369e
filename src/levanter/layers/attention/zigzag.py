"""In which order positions lie on the devices that they are cut over: their own, or zigzag.

Under a causal mask the last of n devices has 2n − 1 times the work of the first, if each has one run of consecutive
positions. In *zigzag order* a sequence is cut into 2n runs, and device i has the runs i and 2n − 1 − i: all have the
same work (Llama 3, arXiv:2407.21783, section 3.3.2). Nothing that is learned, stored or read knows of it: integers of
a batch are laid out so at the head of a Program, positions stay true, and scores go back to where they belong.
"""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from haliax_ext.errors import IndivisibleError


def zigzag(x: NamedArray, parts: int, name: str = "position") -> NamedArray:
    """`x` with an axis in zigzag order over `parts` parts; itself for one part. Slices and concatenations only.

    Args:
        x: an array with the axis, in its own order.
        parts: devices that the axis is cut over.
        name: of the axis.

    Raises:
        IndivisibleError: the axis is not 2 · `parts` runs of equal length.
    """
    if parts == 1:
        return x
    Along, before, after = _around(x, name, parts)
    runs = x.array.reshape(*before, 2 * parts, Along.size // (2 * parts), *after)
    early, late = jnp.split(runs, 2, axis=len(before))
    both = jnp.stack((early, jnp.flip(late, axis=len(before))), axis=len(before) + 1)
    return hax.named(both.reshape(x.array.shape), x.axes)


def natural(x: NamedArray, parts: int, name: str = "position") -> NamedArray:
    """`x` with an axis that is in zigzag order in its own order again: the inverse of `zigzag`."""
    if parts == 1:
        return x
    _, before, _ = _around(x, name, parts)
    return hax.named(natural_array(x.array, parts, len(before)), x.axes)


def natural_array(x: jax.Array, parts: int, axis: int) -> jax.Array:
    """`natural` of an array without names, which has 2 · `parts` runs of equal length along the axis."""
    before, length, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    runs = x.reshape(*before, parts, 2, length // (2 * parts), *after)
    early, late = (jnp.squeeze(half, axis=axis + 1) for half in jnp.split(runs, 2, axis=axis + 1))
    return jnp.concatenate((early, jnp.flip(late, axis=axis)), axis=axis).reshape(x.shape)


def positions(Pos: Axis, parts: int) -> NamedArray:
    """The position of each entry of an axis that is in zigzag order; int32."""
    return zigzag(hax.arange(Pos), parts, Pos.name)


def _around(x: NamedArray, name: str, parts: int) -> tuple[Axis, tuple[int, ...], tuple[int, ...]]:
    """The axis, and the sizes of those before and behind it."""
    Along = x.resolve_axis(name)
    if Along.size % (2 * parts):
        lower = Along.size // (2 * parts) * 2 * parts
        raise IndivisibleError(
            f"zigzag order: {name} {Along.size} is not {2 * parts} runs of equal length",
            suggestion=f"make it {lower or 2 * parts} or {lower + 2 * parts} positions, or use position_order: natural",
        )
    place = x.axes.index(Along)
    shape = x.array.shape
    return Along, shape[:place], shape[place + 1 :]
