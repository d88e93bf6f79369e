"""Pytrees whose arrays may have names, seen as (path, array) pairs.

Paths are attribute names, dictionary keys and list indices joined by dots (`layers.0.weight`). A `NamedArray` counts
as one leaf here: its own `array` field is not part of a path. What JAX and equinox leave untyped about pytrees is
typed here, once.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard, TypeVar, cast

import equinox as eqx
import haliax as hax
import jax
import numpy as np

T = TypeVar("T")

PyTree: TypeAlias = Any
"""Any nesting that JAX flattens (modules, states, dictionaries, tuples) of arrays, abstract arrays and plain values.

The type checker can express no more; the name says that a tree is meant and not a single value.
"""
Array: TypeAlias = jax.Array | np.ndarray | jax.ShapeDtypeStruct
"""An array, with elements or without."""
KeyPath: TypeAlias = tuple[Any, ...]
"""The place of a leaf in JAX's terms: keys of attributes, dictionaries and sequences."""


def is_named(x: object) -> TypeGuard[hax.NamedArray]:
    """Whether `x` is a `NamedArray`, concrete or abstract."""
    return isinstance(x, hax.NamedArray)


def is_arraylike(x: object) -> TypeGuard[Array]:
    """Whether `x` is an array of JAX or NumPy, or an abstract one."""
    return isinstance(x, jax.ShapeDtypeStruct | jax.Array | np.ndarray)


def is_array(x: object) -> bool:
    """Whether `x` is an array of JAX, concrete or abstract; NumPy's are constants to a trace."""
    return isinstance(x, jax.ShapeDtypeStruct) or eqx.is_array(x)


def path_string(keys: KeyPath) -> str:
    """A JAX key path as dotted attribute names."""
    names: list[str] = []
    for key in keys:
        # JAX's keys: attributes have a `name`, dictionary entries a `key`, list elements an `idx`.
        for attribute in ("name", "key", "idx"):
            if hasattr(key, attribute):
                names.append(str(getattr(key, attribute)))
                break
        else:
            names.append(str(key))
    return ".".join(names)


def leaves_with_paths(tree: PyTree) -> list[tuple[str, Any]]:
    """Every leaf of `tree` with its path, in tree order; a `NamedArray` is one leaf."""
    flat = cast("list[tuple[KeyPath, Any]]", jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)[0])
    return [(path_string(keys), x) for keys, x in flat]


def map_with_paths(fn: Callable[[str, Any], Any], tree: T) -> T:
    """`tree` with each leaf `x` replaced by `fn(path, x)`; a `NamedArray` is one leaf."""

    def visit(keys: KeyPath, x: object) -> object:
        return fn(path_string(keys), x)

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=is_named)


def eval_shape(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """What `fn(*args, **kwargs)` would return, with `jax.ShapeDtypeStruct` in place of arrays; nothing is computed."""
    return cast("Callable[..., T]", eqx.filter_eval_shape)(fn, *args, **kwargs)


def split_arrays(tree: T) -> tuple[T, T]:
    """`tree` twice: its arrays with None in place of all else, and all else with None in place of arrays."""
    return cast("Callable[..., tuple[T, T]]", eqx.partition)(tree, is_array)


def joined(arrays: T, rest: T) -> T:
    """The inverse of `split_arrays`."""
    return cast("Callable[..., T]", eqx.combine)(arrays, rest)
