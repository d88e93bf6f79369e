"""A tree of named arrays as arguments of `jax.shard_map`: cut by their axes' names, named again on each device.

    parts = DeviceParts.of(module, mapping, ("mlp", "embed"))
    run = jax.shard_map(lambda arrays: f(parts.join(arrays)), in_specs=(parts.specs,), …)
    run(parts.arrays)

`f` sees the same module, made of the device's own part of each array.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeGuard, TypeVar

import haliax as hax
import jax
from jax.sharding import PartitionSpec

from haliax_ext.mapping import AxisMapping

M = TypeVar("M")


@dataclass(frozen=True)
class DeviceParts(Generic[M]):
    """The arrays of a tree, and how devices share them.

    Attributes:
        arrays: the arrays.
        specs: what cuts each.
        names: the axes of each; None for one that has no names.
        structure: the tree without its arrays.
    """

    arrays: tuple[jax.Array, ...]
    specs: tuple[PartitionSpec, ...]
    names: tuple[tuple[str, ...] | None, ...]
    structure: Any

    @staticmethod
    def of(tree: M, mapping: AxisMapping, cut: Collection[str]) -> "DeviceParts[M]":
        """The parts under a mapping.

        Args:
            tree: a module of `NamedArray`s; arrays without names are whole on every device.
            mapping: of axes to mesh axes.
            cut: the axes that are cut where the mapping says so; every other axis stays whole.
        """
        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_named)
        named = [(leaf.array, tuple(a.name for a in leaf.axes)) if _is_named(leaf) else (leaf, None) for leaf in leaves]
        rules = AxisMapping({name: mapping.mesh_axes(name) for name in cut})
        return DeviceParts(
            arrays=tuple(array for array, _ in named),
            specs=tuple(rules.spec(names or ()) for _, names in named),
            names=tuple(names for _, names in named),
            structure=structure,
        )

    def join(self, arrays: Sequence[jax.Array]) -> M:
        """The tree made of a device's part of each array."""
        own = [x if names is None else hax.named(x, names) for x, names in zip(arrays, self.names, strict=True)]
        return jax.tree.unflatten(self.structure, own)


def _is_named(x: object) -> TypeGuard[hax.NamedArray]:
    return isinstance(x, hax.NamedArray)
