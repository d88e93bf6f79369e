"""Sums that stay separate for each shard until the total is needed.

A sum over an axis that is sharded over the mesh is first a partial sum on each device, then a collective. Inside a loop
the compiler may put the collective into every step. `ShardAxis.open` turns the shards into an axis, mapped to the same
mesh axes, so that the loop adds up partial sums and one reduction over that axis follows it.
"""

# pyright: reportMissingTypeStubs=false
import contextlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass

from haliax import Axis, NamedArray

from haliax_ext.mapping import compute_mapping, compute_mapping_in_scope, ways_in_scope


@dataclass(frozen=True)
class ShardAxis:
    """Axes that the mapping in scope shards, each as (its shards, what a shard holds).

    Attributes:
        pairs: of each axis, itself and the axis of its shards.
    """

    pairs: tuple[tuple[Axis, Axis], ...]

    @staticmethod
    def of(axes: Iterable[Axis]) -> "ShardAxis":
        """Those of `axes` that are sharded, under the compute mapping and the mesh in scope."""
        pairs: list[tuple[Axis, Axis]] = []
        for axis in axes:
            ways = ways_in_scope(axis.name)
            # An axis whose shards would not be even stays as it is: the compiler then places the reduction.
            if ways > 1 and axis.size % ways == 0:
                pairs.append((axis, Axis(f"{axis.name}_shards", ways)))
        return ShardAxis(tuple(pairs))

    @property
    def shards(self) -> tuple[Axis, ...]:
        """The axes of shards, in the order of `pairs`."""
        return tuple(shards for _, shards in self.pairs)

    def open(self, x: NamedArray) -> NamedArray:
        """`x` with each of the axes cut in two, major first."""
        for axis, shards in self.pairs:
            x = x.unflatten_axis(axis, (shards, Axis(axis.name, axis.size // shards.size)))
        return x

    def close(self, x: NamedArray) -> NamedArray:
        """The inverse of `open`."""
        for axis, shards in self.pairs:
            x = x.flatten_axes((shards, Axis(axis.name, axis.size // shards.size)), axis)
        return x

    @contextlib.contextmanager
    def mapped(self) -> Generator[None]:
        """The compute mapping with the shards in the place of the axes."""
        mapping = compute_mapping_in_scope()
        # The axis of shards takes over the mesh axes; what remains of the axis is local to a device.
        rules = {shards.name: mapping.mesh_axes(axis.name) for axis, shards in self.pairs}
        with compute_mapping(mapping.merged({**{axis.name: None for axis, _ in self.pairs}, **rules})):
            yield
