"""A module as a list of named leaves, without memory.

`abstract(Model.init, config, key=...)` runs the initializer under `eval_shape`; `leaves(module)` lists what it holds as
`Leaf(path, axes, dtype)`. Paths are the attribute names joined by dots, list indices included.
"""

# pyright: reportMissingTypeStubs=false
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from haliax_ext.pytree import Array, PyTree, eval_shape, is_arraylike, is_named, leaves_with_paths, map_with_paths

M = TypeVar("M")


@dataclass(frozen=True)
class Leaf:
    """One array of a module: where it is, its named axes (name, size) and its dtype.

    An axis of an array that has no names is called `_0`, `_1`, …: no mapping can name it.
    """

    path: str
    axes: tuple[tuple[str, int], ...]
    dtype: np.dtype

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its axes, in order."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its axes, in order."""
        return tuple(size for _, size in self.axes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, over all devices."""
        return math.prod(self.shape) * self.dtype.itemsize

    def axis_size(self, name: str) -> int:
        """The size of the axis called `name`; a `KeyError` where the leaf has none."""
        return dict(self.axes)[name]

    def __str__(self) -> str:
        inner = ", ".join(f"{name} {size}" for name, size in self.axes)
        return f"{self.path} {self.dtype.name}[{inner}]"


def abstract(init: Callable[..., M], *args: Any, **kwargs: Any) -> M:
    """What `init(*args, **kwargs)` would return, with `jax.ShapeDtypeStruct` in place of arrays."""
    return eval_shape(init, *args, **kwargs)


def array_leaf(path: str, x: hax.NamedArray | Array) -> Leaf:
    """The `Leaf` of a `NamedArray` (abstract or not) or of a plain array."""
    if isinstance(x, hax.NamedArray):
        return Leaf(path, tuple((axis.name, axis.size) for axis in x.axes), np.dtype(x.array.dtype))
    return Leaf(path, tuple((f"_{i}", size) for i, size in enumerate(x.shape)), np.dtype(x.dtype))


def leaves(module: PyTree) -> tuple[Leaf, ...]:
    """Every array of `module` (abstract or not), in tree order."""
    return tuple(array_leaf(path, x) for path, x in leaves_with_paths(module) if _has_array(x))


def _has_array(x: object) -> bool:
    return is_arraylike(x.array if is_named(x) else x)


def map_arrays(fn: Callable[[Leaf, Any], Any], module: M) -> M:
    """Replaces the raw array of every leaf by `fn(leaf, array)`, keeping names and everything else."""

    def visit(path: str, x: object) -> object:
        if is_named(x):
            return hax.NamedArray(fn(array_leaf(path, x), x.array), x.axes) if is_arraylike(x.array) else x
        return fn(array_leaf(path, x), x) if is_arraylike(x) else x

    return map_with_paths(visit, module)


def with_arrays(module: M, arrays: Mapping[str, Any]) -> M:
    """`module` with its leaves' arrays taken from `arrays` (path → array); every path must be there."""
    return map_arrays(lambda leaf, _: arrays[leaf.path], module)


def cast(module: M, dtype: DTypeLike) -> M:
    """An abstract module with its floating-point leaves in `dtype`."""

    def as_dtype(leaf: Leaf, x: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, np.floating):
            return x
        return jax.ShapeDtypeStruct(leaf.shape, np.dtype(dtype))

    return map_arrays(as_dtype, module)
