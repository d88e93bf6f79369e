"""A module as a list of named leaves, without memory.

`abstract(Model.init, config, key=...)` runs the initializer under `eval_shape`; `leaves(module)` lists what it holds as
`Leaf(path, axes, dtype)`. Paths are the attribute names joined by dots, list indices included.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import haliax as hax
import jax
import numpy as np

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
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def axis_size(self, name: str) -> int:
        return dict(self.axes)[name]

    def __str__(self) -> str:
        inner = ", ".join(f"{name} {size}" for name, size in self.axes)
        return f"{self.path} {self.dtype.name}[{inner}]"


def abstract(init: Callable[..., M], *args: Any, **kwargs: Any) -> M:
    """What `init(*args, **kwargs)` would return, with `jax.ShapeDtypeStruct` in place of arrays."""
    return eqx.filter_eval_shape(init, *args, **kwargs)


def _is_named(x: Any) -> bool:
    return isinstance(x, hax.NamedArray)


def _is_arraylike(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct | jax.Array | np.ndarray)


def path_string(keys: tuple[Any, ...]) -> str:
    """A JAX key path as dotted attribute names."""
    parts = []
    for key in keys:
        for attribute in ("name", "key", "idx"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
        else:
            parts.append(str(key))
    return ".".join(parts)


def _named_arrays(module: Any) -> list[tuple[str, Any]]:
    flat = jax.tree_util.tree_flatten_with_path(module, is_leaf=_is_named)[0]
    return [
        (path_string(keys), x)
        for keys, x in flat
        if (_is_named(x) and _is_arraylike(x.array)) or (not _is_named(x) and _is_arraylike(x))
    ]


def leaf_of(path: str, x: Any) -> Leaf:
    """The `Leaf` of a `NamedArray` (abstract or not) or of a plain array."""
    if _is_named(x):
        return Leaf(path, tuple((a.name, a.size) for a in x.axes), np.dtype(x.array.dtype))
    return Leaf(path, tuple((f"_{i}", size) for i, size in enumerate(x.shape)), np.dtype(x.dtype))


def leaves(module: Any) -> tuple[Leaf, ...]:
    """Every array of `module` (abstract or not), in tree order."""
    return tuple(leaf_of(path, x) for path, x in _named_arrays(module))


def map_arrays(fn: Callable[[Leaf, Any], Any], module: M) -> M:
    """Replaces the raw array of every leaf by `fn(leaf, array)`, keeping names and everything else."""

    def visit(keys: tuple[Any, ...], x: Any) -> Any:
        if _is_named(x) and _is_arraylike(x.array):
            return hax.NamedArray(fn(leaf_of(path_string(keys), x), x.array), x.axes)
        if not _is_named(x) and _is_arraylike(x):
            return fn(leaf_of(path_string(keys), x), x)
        return x

    return jax.tree_util.tree_map_with_path(visit, module, is_leaf=_is_named)


def with_arrays(module: M, arrays: Mapping[str, Any]) -> M:
    """`module` with its leaves' arrays taken from `arrays` (path → array); every path must be there."""
    return map_arrays(lambda leaf, _: arrays[leaf.path], module)


def cast(module: M, dtype: Any) -> M:
    """An abstract module with its floating-point leaves in `dtype`."""

    def as_dtype(leaf: Leaf, x: Any) -> Any:
        if not jax.dtypes.issubdtype(leaf.dtype, np.floating):
            return x
        return jax.ShapeDtypeStruct(leaf.shape, np.dtype(dtype))

    return map_arrays(as_dtype, module)
