"""Zigzag order of positions, which balances causal attention over the devices that share a sequence.

Under a causal mask the last of n devices has 2n − 1 times the work of the first, if each holds one run of consecutive
positions. In *zigzag order* a sequence is split into 2n runs and device i holds runs i and 2n − 1 − i, so all have the
same work (Llama 3, arXiv:2407.21783, section 3.3.2). Weights, checkpoints and data are unaffected: a Program permutes
the integers of a batch at its start, passes true positions along, and permutes scores back.
"""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from haliax_ext.errors import IndivisibleError


def zigzag(x: NamedArray, num_shards: int, name: str = "position") -> NamedArray:
    """Permutes an axis from natural to zigzag order; the identity for one shard. Uses slices and concatenations only.

    Args:
        x: an array with the axis in natural order.
        num_shards: number of devices that the axis is sharded over.
        name: name of the axis.

    Raises:
        IndivisibleError: the axis size is not a multiple of 2 · `num_shards`.

    >>> import haliax as hax
    >>> zigzag(hax.arange(hax.Axis("position", 8)), num_shards=2).array.tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if num_shards == 1:
        return x
    Along, before, after = _axis_sizes(x, name, num_shards)
    # `[…, 2n, run length, …]`, where run i holds consecutive positions.
    runs = x.array.reshape(*before, 2 * num_shards, Along.size // (2 * num_shards), *after)
    # Pair run i with run 2n − 1 − i: the second half of the runs, reversed.
    early, late = jnp.split(runs, 2, axis=len(before))
    both = jnp.stack((early, jnp.flip(late, axis=len(before))), axis=len(before) + 1)
    # `[…, n, 2, run length, …]`: device i has the pair (run i, run 2n − 1 − i), and its shard is contiguous.
    return hax.named(both.reshape(x.array.shape), x.axes)


def natural(x: NamedArray, num_shards: int, name: str = "position") -> NamedArray:
    """Permutes an axis from zigzag to natural order: the inverse of `zigzag`."""
    if num_shards == 1:
        return x
    _, before, _ = _axis_sizes(x, name, num_shards)
    return hax.named(natural_array(x.array, num_shards, len(before)), x.axes)


def natural_array(x: jax.Array, num_shards: int, axis: int) -> jax.Array:
    """`natural` for an array without axis names, with 2 · `num_shards` runs of equal length along the axis."""
    before, length, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    # `[…, device, early or late run, run length, …]`; late runs are in descending order over the devices.
    runs = x.reshape(*before, num_shards, 2, length // (2 * num_shards), *after)
    early, late = (jnp.squeeze(half, axis=axis + 1) for half in jnp.split(runs, 2, axis=axis + 1))
    return jnp.concatenate((early, jnp.flip(late, axis=axis)), axis=axis).reshape(x.shape)


def positions(Pos: Axis, num_shards: int) -> NamedArray:
    """The position of each entry of an axis in zigzag order; int32."""
    return zigzag(hax.arange(Pos), num_shards, Pos.name)


def _axis_sizes(x: NamedArray, name: str, num_shards: int) -> tuple[Axis, tuple[int, ...], tuple[int, ...]]:
    """The axis, and the sizes of the axes before and after it."""
    Along = x.resolve_axis(name)
    if Along.size % (2 * num_shards):
        runs = 2 * num_shards
        lower = Along.size // runs * runs
        raise IndivisibleError(
            f"zigzag order: {name} {Along.size} is not {runs} runs of equal length",
            suggestion=f"make it {lower or runs} or {lower + runs} positions, or use position_order: natural",
        )
    place = x.axes.index(Along)
    shape = x.array.shape
    return Along, shape[:place], shape[place + 1 :]
