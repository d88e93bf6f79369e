"""Parameter groups: which parameters an optimizer updates with which settings.

A *group* has a name, a rule that decides which parameters belong to it, and a chain of gradient transformations for
them. `by_group` applies each chain to the parameters of its group only; `optax.masked` hides all others from it, so
that its state has no arrays for them. Every parameter belongs to exactly one group: `check_groups` refuses a model for
which this does not hold, and names all parameters and patterns that are wrong.

    optimizer:
      learning_rate: 3e-4
      groups:
        embedding: {learning_rate: 0.3, beta1: 0.8, weight_decay: 0.001}
        "**.router": {learning_rate_multiple: 0.1}

The keys of `optimizer.groups` are names of parameter groups as in `trainer.trainable` (`models.param_groups`), roles
(`layers.param_roles`) and path patterns. What none of them selects is in the group `rest`, which has the settings of
the optimizer. Muon's matrices and its other parameters are two fixed groups of the same kind.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import optax

from haliax_ext.abstract import Leaf
from haliax_ext.pytree import PyTree
from levanter.config.validators import (
    Count,
    Decay,
    Epsilon,
    Fraction,
    LearningRate,
    NonNegativeFloat,
    Ranged,
)
from levanter.models.param_groups import ADAPTERS, OTHER, PARAMETER_GROUPS, hint, parameter_group, selects
from levanter.optim.parameters import Parameter, map_parameters
from levanter.optim.schedules import LrSchedule, schedule_from_name

KEY = "optimizer.groups"
REST = "rest"
"""The group of the parameters that no key selects."""

ROLES = ("matrix", "bias", "vector", "sink")
"""Roles that are no parameter group: `norm`, `embedding` and `head` are both, and mean the parameter group."""

_WORDS = (*(word for word in PARAMETER_GROUPS if word != OTHER), ADAPTERS, *ROLES)


@dataclass(frozen=True, kw_only=True)
class GroupConfig(Ranged):
    """The settings of one group; null is the optimizer's value. A setting must be one of the optimizer's fields.

    Attributes:
        learning_rate: the peak learning rate.
        learning_rate_multiple: the peak learning rate as a multiple of the optimizer's; not with `learning_rate`.
        weight_decay: of all parameters of the group, including those that the optimizer's mask exempts.
        min_lr_ratio: the final learning rate, as a fraction of the peak.
        warmup: length of the first warmup, a fraction of the cycle or steps.
        decay: length of each decay, a fraction of the cycle or steps.
        lr_schedule: the shape of the decay.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        epsilon: added to the root of the second moment.
        momentum: of optimizers that have one.
        rule: of optimizers that update parameters by several rules (Muon): `muon` or `adam`.
    """

    learning_rate: LearningRate | None = None
    learning_rate_multiple: NonNegativeFloat | None = None
    weight_decay: NonNegativeFloat | None = None
    min_lr_ratio: Fraction | None = None
    warmup: Count | NonNegativeFloat | None = None
    decay: Count | NonNegativeFloat | None = None
    lr_schedule: LrSchedule | str | None = None
    beta1: Decay | None = None
    beta2: Decay | None = None
    epsilon: Epsilon | None = None
    momentum: Decay | None = None
    rule: Literal["muon", "adam"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.learning_rate is not None and self.learning_rate_multiple is not None:
            problems.append("learning_rate, learning_rate_multiple: these are alternatives; give only one of them")
        if self.lr_schedule is not None:
            try:
                schedule_from_name(self.lr_schedule)
            except ValueError as error:
                problems.append(str(error).removeprefix("optimizer."))
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def written(self) -> Mapping[str, Any]:
        """The settings that are not null."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Group:
    """The parameters of one chain of transformations.

    Attributes:
        name: for messages.
        includes: whether a parameter belongs to the group.
        chain: from the gradients of the group to its updates.
        pattern: the key of `optimizer.groups`, which must select a parameter; None if the group may be empty.
    """

    name: str
    includes: Callable[[Parameter], bool]
    chain: Sequence[optax.GradientTransformation]
    pattern: str | None = None


def by_group(groups: Sequence[Group]) -> list[optax.GradientTransformation]:
    """A transformation for each group, to be chained: gradients of other groups pass through it unchanged.

    The transformations raise the ValueError of `check_groups` when they see the first model.
    """

    def masked(group: Group) -> optax.GradientTransformation:
        def mask(model: PyTree) -> PyTree:
            # The groups of a chain see the same model, so the first one checks it for all.
            if group is groups[0]:
                check_groups(groups, model)
            return map_parameters(lambda parameter, _: group.includes(parameter), model)

        return optax.masked(optax.chain(*group.chain), mask)

    return [masked(group) for group in groups]


def keyed_groups(
    chains: Mapping[str, Sequence[optax.GradientTransformation]], rest: Sequence[optax.GradientTransformation]
) -> list[Group]:
    """The groups of the keys of `optimizer.groups`, and `rest`.

    Args:
        chains: the transformations of each key. The groups are sorted by key, so that the order in the YAML changes no
            path of a state, and so no checkpoint.
        rest: the transformations of all other parameters.
    """
    keys = sorted(chains)
    groups = [Group(name=key, includes=_includes(key), chain=chains[key], pattern=key) for key in keys]
    others = Group(name=REST, includes=lambda parameter: not any(selected(k, parameter) for k in keys), chain=rest)
    return [*groups, others]


def _includes(key: str) -> Callable[[Parameter], bool]:
    return lambda parameter: selected(key, parameter)


def selected(key: str, parameter: Parameter) -> bool:
    """Whether a key of `optimizer.groups` selects a parameter.

    >>> import haliax as hax
    >>> model = {"mlp": {"weight": hax.zeros(hax.make_axes(mlp=4, embed=2)), "bias": hax.zeros(hax.Axis("mlp", 4))}}
    >>> map_parameters(lambda parameter, _: [selected(key, parameter) for key in ("mlp", "vector", "**.weight")], model)
    {'mlp': {'bias': [True, True, False], 'weight': [True, False, True]}}
    """
    if key in ROLES:
        return parameter.role == key
    leaf = _leaf(parameter)
    # Adapters are no group of a model's own parameters, so `selects` would take the word for a path.
    return parameter_group(leaf) == ADAPTERS if key == ADAPTERS else selects(key, leaf)


def _leaf(parameter: Parameter) -> Leaf:
    # Groups depend on path and axes; a parameter has no dtype.
    axes = tuple((axis.name, axis.size) for axis in parameter.axes)
    return Leaf(path=parameter.path, axes=axes, dtype=np.dtype(np.float32))


def check_groups(groups: Sequence[Group], model: PyTree) -> None:
    """Checks that every parameter belongs to exactly one group, and that every pattern selects a parameter.

    Raises:
        ValueError: it does not hold; one line for each pattern and each parameter.
    """
    parameters = _parameters(model)
    names = {parameter.path: [group.name for group in groups if group.includes(parameter)] for parameter in parameters}
    used = {name for members in names.values() for name in members}
    leaves = [_leaf(parameter) for parameter in parameters]
    problems = [
        f"{KEY}[{group.pattern!r}] matches no parameter that is trained; {_hint(group.pattern, leaves)}"
        for group in groups
        if group.pattern is not None and group.name not in used
    ]
    for path, members in names.items():
        # `rest` and Muon's second group are complements, so no parameter is in none.
        assert members, f"{path} belongs to no group"
        if len(members) > 1:
            keys = " and ".join(repr(name) for name in members)
            problems.append(f"{KEY}: {path} is matched by {keys}; a parameter belongs to exactly one group")
    if problems:
        raise ValueError("\n".join(problems))


def _hint(pattern: str, leaves: Sequence[Leaf]) -> str:
    if pattern in ROLES or pattern == ADAPTERS:
        return f"no parameter of this model has the role {pattern}"
    clause = hint(pattern, leaves, _WORDS)
    # A single word is a role or the name of an outermost module.
    word = pattern.isidentifier() and pattern not in PARAMETER_GROUPS
    return f"{clause} (roles: {', '.join(_WORDS)})" if word else clause


def _parameters(model: PyTree) -> list[Parameter]:
    collected: list[Parameter] = []
    map_parameters(lambda parameter, _: collected.append(parameter), model)
    return collected


def describe_groups(settings: Mapping[str, GroupConfig], model: PyTree) -> tuple[str, ...]:
    """A line for each group: its name, its parameters and its settings.

    Args:
        settings: the value of `optimizer.groups`.
        model: the trained parameters, arrays or abstract.

    Raises:
        ValueError: see `check_groups`.
    """
    groups = keyed_groups(dict.fromkeys(settings, ()), ())
    check_groups(groups, model)
    lines = []
    for group in groups:
        members = [parameter for parameter in _parameters(model) if group.includes(parameter)]
        size = sum(math.prod(axis.size for axis in parameter.axes) for parameter in members)
        written = settings[group.name].written if group.pattern is not None else {}
        values = ", ".join(f"{name} {_shown(value)}" for name, value in written.items()) or "the optimizer's settings"
        lines.append(f"{group.name}: {_counted(len(members))}, {size:,} parameters: {values}")
    return tuple(lines)


def _shown(value: object) -> str:
    return LrSchedule.get_choice_name(type(value)) if isinstance(value, LrSchedule) else str(value)


def _counted(arrays: int) -> str:
    return "1 array" if arrays == 1 else f"{arrays} arrays"


def group_problems(
    settings: Mapping[str, GroupConfig], build: Callable[[GroupConfig], object], fields: Iterable[str]
) -> Iterable[str]:
    """What is wrong with the settings of groups, without a model.

    Args:
        settings: the value of `optimizer.groups`.
        build: makes an optimizer with the settings of a group; raises a ValueError if they do not fit together.
        fields: the names of the optimizer's fields.
    """
    known = {*fields, "learning_rate_multiple"}
    if not settings:
        yield "groups: is empty; leave it out to update all parameters with the same settings"
    for key, group in settings.items():
        if key == REST:
            yield f"groups[{key!r}]: the name of what no key selects; set the optimizer's keys instead"
        foreign = [name for name in group.written if name not in known]
        if foreign:
            usable = [field.name for field in dataclasses.fields(GroupConfig) if field.name in known]
            yield (
                f"groups[{key!r}]: {', '.join(foreign)} is no setting of this optimizer; a group may set "
                f"{', '.join(usable)}"
            )
            continue
        try:
            build(group)
        except ValueError as error:
            yield from (f"groups[{key!r}]: {line}" for line in str(error).splitlines())
