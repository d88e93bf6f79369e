"""The properties of parameters that optimizers use: path, role, owner, and the axes of rows, columns and stacks.

A *parameter* is a `NamedArray` inside a module. Its *roles* are those that modules on its path declare
(`layers.param_roles`); without a declared role, its axes decide: matrix or vector. Its *class path* is the class that
declares it and the name of the field (`Linear.weight`), by which users can select parameters. *Stack axes* (`layers`,
`expert`) count copies of a module: every copy is a separate matrix.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import haliax as hax
import jax

from haliax_ext.pytree import KeyPath, PyTree, is_named, path_string
from levanter.layers.param_roles import Role, declared_role

STACK_AXES = ("layers", "expert")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a model, without its values.

    Attributes:
        path: attribute names from the model down, joined by dots.
        axes: its axes.
        owner: the innermost module that declares a role for it; if none does, the module that contains it.
        name: the owner's field that is, or contains, the parameter.
        roles: the declared roles, outermost first.
    """

    path: str
    axes: tuple[hax.Axis, ...]
    owner: object
    name: str
    roles: tuple[Role, ...]

    @property
    def class_path(self) -> str:
        """The owner's class and the name of its field."""
        return f"{type(self.owner).__name__}.{self.name}"

    @property
    def role(self) -> Role | Literal["vector"]:
        """Its innermost role, or one by the number of its axes."""
        # Outer roles (`head`) describe the use of a whole module, the innermost one the kind of the array.
        if self.roles:
            return self.roles[-1]
        return "matrix" if len(self.axes) - len(self.stack) > 1 else "vector"

    @property
    def stack(self) -> tuple[str, ...]:
        """The stack axes it has."""
        return tuple(axis.name for axis in self.axes if axis.name in STACK_AXES)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The axes that its projection contracts; empty if it does not belong to a projection."""
        # `In` is a tuple of names in this project's `Linear`, and an axis or axes in Haliax's.
        names = hax.axis_name(getattr(self.owner, "In", ()))
        return (names,) if isinstance(names, str) else tuple(names)

    @property
    def factors(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """The axes of its matrix's rows and columns; None if it is a vector (per copy).

        A projection maps its input axes (columns) to its output axes (rows), as the matrix `[out, in]` of a framework
        without names; other parameters with two axes or more keep the last one as columns.
        """
        names = [axis.name for axis in self.axes if axis.name not in STACK_AXES]
        if self.role == "bias" or len(names) < 2:
            return None
        # Several axes of heads and head size are one axis of the matrix, as in frameworks without named axes.
        columns = tuple(name for name in self.inputs if name in names) or (names[-1],)
        rows = tuple(name for name in names if name not in columns)
        return (rows, columns) if rows else None


def map_parameters(fn: Callable[..., Any], model: PyTree, *rest: PyTree) -> PyTree:
    """Maps `fn(parameter, value, *values of rest)` over the named arrays of `model`.

    Trees in `rest` have the structure of `model` down to its named arrays, with any values in their place.

    >>> model = {"weight": hax.zeros(hax.make_axes(mlp=4, embed=2)), "bias": hax.zeros(hax.Axis("mlp", 4))}
    >>> map_parameters(lambda parameter, _: (parameter.path, parameter.role), model)
    {'bias': ('bias', 'vector'), 'weight': ('weight', 'matrix')}
    """

    def visit(keys: KeyPath, x: object, *others: Any) -> Any:
        assert is_named(x), f"{path_string(keys)} is not a named array: optimizers work on named parameters"
        return fn(_parameter(model, keys, x.axes), x, *others)

    return jax.tree_util.tree_map_with_path(visit, model, *rest, is_leaf=is_named)


def _parameter(model: PyTree, keys: KeyPath, axes: tuple[hax.Axis, ...]) -> Parameter:
    # Walks from the model to the parameter; `holder` is the object that `key` is looked up in.
    holder, owner, roles = model, None, []
    for n, key in enumerate(keys):
        name = path_string((key,))
        declared = declared_role(holder, name)
        if declared is not None:
            roles.append(declared)
        # The last declaration wins; without any, the owner is the parent of the array.
        if declared is not None or (not roles and n == len(keys) - 1):
            owner = (holder, name)
        if isinstance(key, jax.tree_util.GetAttrKey):
            holder = getattr(holder, key.name)
        elif isinstance(key, jax.tree_util.SequenceKey):
            holder = holder[key.idx]
        else:
            holder = holder[key.key]
    assert owner is not None, "a parameter must be inside a module"
    return Parameter(path=path_string(keys), axes=axes, owner=owner[0], name=owner[1], roles=tuple(roles))


NOT_DECAYED = ("bias", "norm", "embedding", "vector")
"""Roles that are exempt from weight decay by default."""


def decay_mask(modules: Sequence[str] | str | None, default: bool | None) -> Callable[[PyTree], PyTree] | None:
    """The parameters with weight decay, as a function of the model; None for all.

    Args:
        modules: a regular expression that matches the start of a path or class path, or a list of texts that one of
            them contains.
        default: whether all roles except `NOT_DECAYED` decay as well; None for: only if `modules` is None.

    Raises:
        ValueError: the regular expression is invalid.

    >>> model = {"weight": hax.zeros(hax.make_axes(mlp=4, embed=2)), "bias": hax.zeros(hax.Axis("mlp", 4))}
    >>> decay_mask(None, True)(model)
    {'bias': False, 'weight': True}
    """
    if modules is None and default is False:
        return None
    # As in upstream: naming modules replaces the default rule, unless both are set.
    use_default = default is True or (default is None and modules is None)
    if isinstance(modules, str):
        try:
            pattern = re.compile(modules)
        except re.error as error:
            raise ValueError(
                f"optimizer.weight_decay_modules {modules!r} is not a regular expression: {error}"
            ) from error

    def chosen(name: str) -> bool:
        if isinstance(modules, str):
            return pattern.match(name) is not None
        return any(text in name for text in modules or ())

    def decays(parameter: Parameter, _: hax.NamedArray) -> bool:
        if chosen(parameter.path) or chosen(parameter.class_path):
            return True
        return use_default and parameter.role not in NOT_DECAYED

    return lambda model: map_parameters(decays, model)
