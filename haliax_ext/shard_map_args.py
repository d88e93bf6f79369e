"""A tree of named arrays as arguments of `jax.shard_map`: sharded by axis names, and named again on each device.

    parts = ShardMapArgs.of(module, mapping, ("mlp", "embed"))
    run = jax.shard_map(lambda arrays: f(parts.join(arrays)), in_specs=(parts.specs,), …)
    run(parts.arrays)

`f` sees the same module, made of the device's own part of each array.
"""

# pyright: reportMissingTypeStubs=false
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import jax
from haliax import Axis, NamedArray
from jax.sharding import PartitionSpec

from haliax_ext.mapping import AxisMapping
from haliax_ext.pytree import is_named, leaves_with_paths, map_with_paths

M = TypeVar("M")


@dataclass(frozen=True)
class ShardMapArgs(Generic[M]):
    """The arrays of a tree, and how devices share them.

    Attributes:
        tree: the tree.
        arrays: its arrays, in tree order.
        specs: what shards each.
    """

    tree: M
    arrays: tuple[jax.Array, ...]
    specs: tuple[PartitionSpec, ...]

    @staticmethod
    def of(tree: M, mapping: AxisMapping, cut: Collection[str]) -> "ShardMapArgs[M]":
        """The parts under a mapping.

        Args:
            tree: a module of `NamedArray`s; arrays without names are replicated.
            mapping: of axes to mesh axes.
            cut: the axes that the mapping shards; every other axis is replicated.
        """
        # Only the axes in `cut` are sharded; the function works with whole ones otherwise.
        rules = AxisMapping({name: mapping.mesh_axes(name) for name in cut})
        leaves = [x for _, x in leaves_with_paths(tree)]
        return ShardMapArgs(
            tree=tree,
            arrays=tuple(x.array if is_named(x) else x for x in leaves),
            specs=tuple(rules.spec([a.name for a in x.axes] if is_named(x) else ()) for x in leaves),
        )

    def join(self, arrays: Sequence[jax.Array]) -> M:
        """The tree made of a device's part of each array."""
        shards = iter(arrays)

        def join_leaf(_: str, x: object) -> object:
            part = next(shards)
            if not is_named(x):
                return part
            # A device's part has other sizes than the whole array, so the axes are named anew.
            return NamedArray(part, tuple(Axis(a.name, n) for a, n in zip(x.axes, part.shape, strict=True)))

        return map_with_paths(join_leaf, self.tree)
