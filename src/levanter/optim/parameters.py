"""What optimizers ask of a parameter: its path, the module that owns it, and which of its axes are what.

A *parameter* is a `NamedArray` inside a module. Its *class path* is its owner's class and its name there
(`Linear.weight`), by which kinds of parameters are picked (no decay for norms, embeddings and biases). *Stack axes*
count copies of one module (`layers`, `expert`): every copy is a matrix of its own.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax

from haliax_ext.pytree import path_string

STACK_AXES = ("layers", "expert")


def is_named(x: Any) -> bool:
    """Whether `x` is a `NamedArray`: the leaves of every tree here."""
    return isinstance(x, hax.NamedArray)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a model, without its values.

    Attributes:
        path: attribute names from the model down, joined by dots.
        owner: the module that holds it.
        axes: its axes.
    """

    path: str
    owner: Any
    axes: tuple[hax.Axis, ...]

    @property
    def class_path(self) -> str:
        """The owner's class and the parameter's name in it."""
        return f"{type(self.owner).__name__}.{self.path.rpartition('.')[2]}"

    @property
    def stack(self) -> tuple[str, ...]:
        """The stack axes it has."""
        return tuple(axis.name for axis in self.axes if axis.name in STACK_AXES)

    @property
    def factors(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """The axes of its matrix's rows and columns; None if it is a vector (per copy).

        A projection maps its input axes (columns) to its output axes (rows), as the matrix `[out, in]` of a framework
        without names; other parameters with two axes or more keep the last one as columns.
        """
        names = [axis.name for axis in self.axes if axis.name not in STACK_AXES]
        inputs = getattr(self.owner, "In", None)
        if inputs is not None and set(inputs) < set(names):
            columns = tuple(inputs)
        elif inputs is None and len(names) > 1:
            columns = (names[-1],)
        else:
            return None
        return tuple(name for name in names if name not in columns), columns


def map_parameters(fn: Callable[..., Any], model: Any, *rest: Any) -> Any:
    """Maps `fn(parameter, value, *values of rest)` over the named arrays of `model`.

    Trees in `rest` have the structure of `model` down to its named arrays; what they hold there may be anything.
    """

    def visit(keys: tuple[Any, ...], x: Any, *others: Any) -> Any:
        assert is_named(x), f"{path_string(keys)} is no named array: optimizers work on named parameters"
        return fn(Parameter(path=path_string(keys), owner=_owner(model, keys), axes=x.axes), x, *others)

    return jax.tree_util.tree_map_with_path(visit, model, *rest, is_leaf=is_named)


def _owner(model: Any, keys: Sequence[Any]) -> Any:
    owner = model
    for key in keys[:-1]:
        if isinstance(key, jax.tree_util.GetAttrKey):
            owner = getattr(owner, key.name)
        elif isinstance(key, jax.tree_util.SequenceKey):
            owner = owner[key.idx]
        else:
            owner = owner[key.key]
    return owner


def decay_mask(modules: Sequence[str] | str | None, default: bool | None) -> Callable[[Any], Any] | None:
    """Which parameters weight decay applies to, as a function of the model; None for all.

    Args:
        modules: a regular expression that a path or class path begins with, or a list of texts that one contains.
        default: whether all but biases and the weights of norms and embeddings decay, besides `modules`; None: where
            no modules are given.

    Raises:
        ValueError: the regular expression is none.
    """
    if modules is None and default is False:
        return None
    use_default = default is True or (default is None and modules is None)
    if isinstance(modules, str):
        try:
            pattern = re.compile(modules)
        except re.error as error:
            raise ValueError(f"optimizer.weight_decay_modules {modules!r} is no regular expression: {error}") from error

    def chosen(name: str) -> bool:
        if isinstance(modules, str):
            return pattern.match(name) is not None
        return any(text in name for text in modules or ())

    def decays(parameter: Parameter, _: Any) -> bool:
        if chosen(parameter.path) or chosen(parameter.class_path):
            return True
        owner = type(parameter.owner).__name__
        plain = "Norm" not in owner and "Embedding" not in owner and not parameter.path.endswith("bias")
        return use_default and plain

    return lambda model: map_parameters(decays, model)
