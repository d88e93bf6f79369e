"""Finds the projections of a model that get an adapter, and those that share a factor.

A *group* is one matrix of the checkpoint. Leaves of ours that are parts of one source tensor (q, k and v of Phi-3,
GPT-2 and GPT-NeoX; gate and up of Phi-3) form one group: they share one A, and each has its own rows of B. Other tools,
which see one matrix there, so train the same numbers.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from haliax import Axis

from haliax_ext.abstract import Leaf
from haliax_ext.errors import nearest
from haliax_ext.mapping import path_matches
from haliax_ext.pytree import PyTree
from haliax_ext.rules import WeightRule, WeightRules
from levanter.layers.linear import Linear
from levanter.layers.low_rank import RANK
from levanter.layers.quantized import COPIES, ROUTER, projections
from levanter.models.adapters.config import IN, OUT, LoraConfig
from levanter.models.param_groups import EMBEDDING, HEAD, NORM, parameter_group

T = TypeVar("T")

KEY = "adapter"
LM_HEAD = "lm_head"
"""The checkpoints' name of the output head."""
_WEIGHT = ".weight"


class AdapterError(ValueError):
    """An adapter does not fit its model; the message lists every problem."""


@dataclass(frozen=True, kw_only=True)
class TargetMember:
    """One projection of a group.

    Attributes:
        path: of the projection in the model.
        Out: the axes of its rows.
        rule: the source of its weight in a checkpoint; None if checkpoints do not have it.
    """

    path: str
    Out: tuple[Axis, ...]
    rule: WeightRule | None

    @property
    def name(self) -> str:
        """The last name of its path."""
        return self.path.rsplit(".", 1)[-1]


@dataclass(frozen=True, kw_only=True)
class TargetGroup:
    """Projections that share their factor A.

    Attributes:
        path: its path in the model: that of its only projection, or the parent's path and the checkpoint's name.
        source: the checkpoint's name of the module, with `{layers}` for the layer's number; None if it has none.
        copies: the axes that count copies of the matrices.
        In: the contracted axes.
        members: the projections; in a group from `find_targets`, only those that get an adapter.
        rank: r; 0 before `find_targets` sets it.
        alpha: see `LoraConfig`.
    """

    path: str
    source: str | None
    copies: tuple[Axis, ...]
    In: tuple[Axis, ...]
    members: tuple[TargetMember, ...]
    rank: int = 0
    alpha: float = 0.0

    @property
    def is_head(self) -> bool:
        """Whether it is the output head."""
        return _group_named(self.path) == HEAD

    @property
    def is_router(self) -> bool:
        """Whether it chooses among experts."""
        return self.members[0].name == ROUTER

    @property
    def largest_rank(self) -> int:
        """The highest useful rank: that of a product of factors cannot exceed the smaller side of the matrix."""
        return min(self.sides)

    @property
    def sides(self) -> tuple[int, int]:
        """The numbers of columns and rows of its matrix."""
        return _size(self.In), sum(_size(member.Out) for member in self.members)

    @property
    def axis_names(self) -> frozenset[str]:
        """The axes of its factors."""
        axes = (*self.copies, *self.In, *(axis for member in self.members for axis in member.Out))
        return frozenset((RANK, *(axis.name for axis in axes)))

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the whole group."""
        return tuple(name for name in (self.path, self.source) if name is not None)


def _size(axes: Iterable[Axis]) -> int:
    size = 1
    for axis in axes:
        size *= axis.size
    return size


def target_groups(model: PyTree, rules: WeightRules | None) -> tuple[TargetGroup, ...]:
    """All projections of a model, grouped by the checkpoint's matrices.

    Args:
        model: it may be abstract.
        rules: the sources of its weights in a checkpoint; None without a checkpoint: each projection is a group.
    """
    table = {} if rules is None else rules.by_target()
    members_by_tensor: dict[tuple[str, str], list[tuple[TargetMember, Linear]]] = {}
    for path, linear in projections(model).items():
        rule = table.get(f"{path}{_WEIGHT}")
        copies = _copies(linear)
        Out = tuple(axis for axis in linear.Out if axis not in copies)
        parent, _, name = path.rpartition(".")
        # The parent is part of the key: stacked places of a period
        # may share a source template but are separate modules.
        key = (parent, name if rule is None else rule.source)
        members_by_tensor.setdefault(key, []).append((TargetMember(path=path, Out=Out, rule=rule), linear))
    groups = []
    for (parent, _), members in members_by_tensor.items():
        (first, linear), rule = members[0], members[0][0].rule
        source = None if rule is None else rule.source.removesuffix(_WEIGHT)
        path = first.path
        # A fused tensor (qkv_proj): the group takes the checkpoint's
        # name below our parent, since no module of ours has it.
        if len(members) > 1:
            assert source is not None
            path = ".".join(part for part in (parent, source.rsplit(".", 1)[-1]) if part)
        axes = {axis.name: axis for axis in linear.operand.axes}
        groups.append(
            TargetGroup(
                path=path,
                source=source,
                copies=_copies(linear),
                In=tuple(axes[name] for name in linear.In),
                members=tuple(member for member, _ in members),
            )
        )
    return tuple(groups)


def _copies(linear: Linear) -> tuple[Axis, ...]:
    """The axes that count copies of a matrix. Experts count as such unless they are the output of a router."""
    # A router's only output axis is `expert`: there it is the matrix's own output, so only `layers` counts copies.
    others = [axis for axis in linear.Out if axis.name not in COPIES]
    counted = COPIES if others else COPIES[:1]
    return tuple(axis for axis in linear.Out if axis.name in counted)


def find_targets(groups: Sequence[TargetGroup], config: LoraConfig) -> tuple[TargetGroup, ...]:
    """The groups that get an adapter, each with its rank and only those members that get one.

    Raises:
        AdapterError: a name matches nothing, a rank does not fit, or there is no target; lists all.
    """
    problems: list[str] = []
    for key in ("target_modules", "exclude_modules"):
        problems += _pattern_problems(f"{KEY}.{key}", getattr(config, key), groups)
    for key in ("rank_pattern", "alpha_pattern"):
        problems += _pattern_problems(f"{KEY}.{key}", list(getattr(config, key)), groups)
    if problems and any(isinstance(named, str) for named in (config.target_modules, config.exclude_modules)):
        # An invalid regular expression cannot be matched below; it would only add misleading problems.
        raise AdapterError("\n".join(problems))
    targets = []
    for group in groups:
        members = tuple(member for member in group.members if _is_target(member, group, config))
        if not members:
            continue
        rank = _by_pattern(config.rank_pattern, group, config.r)
        alpha = _by_pattern(config.alpha_pattern, group, config.alpha)
        # The rank is checked against the members that remain: adapting only q of a fused qkv has fewer rows.
        target = replace(group, members=members, rank=rank, alpha=alpha)
        if rank > target.largest_rank:
            problems.append(
                f"{KEY}.r: rank {rank} of {group.path} is above {target.largest_rank}, the smaller side of its matrix; "
                f"use at most that, or give it a rank of its own with {KEY}.rank_pattern"
            )
        targets.append(target)
    if not targets and not problems:
        problems.append(f"{KEY}: no projection is left that would get an adapter; exclude_modules excludes all of them")
    if problems:
        raise AdapterError("\n".join(problems))
    return tuple(targets)


def _is_target(member: TargetMember, group: TargetGroup, config: LoraConfig) -> bool:
    # The head and routers are adapted only if a list or pattern names them; axes select them never.
    selectable = isinstance(config.target_modules, Sequence) or not (group.is_head or group.is_router)
    selected = selectable and (config.target_modules is None or _matches(config.target_modules, member, group))
    excluded = config.exclude_modules is not None and _matches(config.exclude_modules, member, group)
    return selected and not excluded


Named = Sequence[str] | str | Mapping[str, Any]
"""Selects projections by names, by a regular expression, or by their axes."""


def _matches(patterns: Named, member: TargetMember, group: TargetGroup) -> bool:
    names = (member.path, *group.names)
    if isinstance(patterns, Mapping):
        sides = {IN: {axis.name for axis in group.In}, OUT: {axis.name for axis in member.Out}}
        return all(sides[side].issuperset(_listed(axes)) for side, axes in patterns.items())
    if isinstance(patterns, str):
        pattern = re.compile(patterns)
        # fullmatch over the whole path, as peft does with a string in target_modules.
        return any(pattern.fullmatch(name) is not None for name in names)
    # A list entry matches the end of a path at a dot, as peft's lists do.
    return any(_names(pattern, name) for pattern in patterns for name in names)


def _listed(axes: Sequence[str] | str) -> Sequence[str]:
    return (axes,) if isinstance(axes, str) else axes


def _names(pattern: str, name: str) -> bool:
    """Whether one entry of a list names a module, or one that it is in: by names of its path in order, or a pattern."""
    return path_matches(pattern, name) or path_matches(f"**.{pattern}", name)


def _by_pattern(patterns: Mapping[str, T], group: TargetGroup, default: T) -> T:
    # The first pattern that matches wins, in the order of the config.
    for pattern, value in patterns.items():
        if any(_names(pattern, name) for name in (*group.names, *(member.path for member in group.members))):
            return value
    return default


def _pattern_problems(key: str, patterns: Named | None, groups: Sequence[TargetGroup]) -> list[str]:
    """The problems of patterns: those that match nothing, and invalid regular expressions."""
    if patterns is None:
        return []
    if isinstance(patterns, Mapping):
        if any(_matches(patterns, member, group) for group in groups for member in group.members):
            return []
        sides = {
            IN: {axis.name for group in groups for axis in group.In},
            OUT: {axis.name for group in groups for member in group.members for axis in member.Out},
        }
        options = "; ".join(f"`{side}` may be {', '.join(sorted(names))}" for side, names in sides.items())
        return [f"{key}: no projection has the axes {dict(patterns)}; {options}"]
    if isinstance(patterns, str):
        try:
            re.compile(patterns)
        except re.error as error:
            return [f"{key}: {patterns!r} is not a regular expression: {error}"]
        if any(_matches(patterns, member, group) for group in groups for member in group.members):
            return []
        hint = f"did you mean the list [{patterns}]?" if patterns.isidentifier() else _projections_hint(groups)
        return [f"{key}: no projection's whole path matches {patterns!r}; {hint}"]
    if not patterns and key.endswith("target_modules"):
        return [f"{key} is empty, so nothing would be trained; leave it out for every projection but the head"]
    return [
        f"{key}: {pattern!r} {_mismatch_reason(pattern, groups)}"
        for pattern in patterns
        if not any(_names(pattern, name) for group in groups for name in _all_names(group))
        # Upstream's default, which documents may spell out; a tied model has no head to exclude.
        and (pattern, key) != (LM_HEAD, f"{KEY}.exclude_modules")
    ]


def _mismatch_reason(pattern: str, groups: Sequence[TargetGroup]) -> str:
    kind = _group_named(pattern)
    if pattern.endswith("bias"):
        return f"is a bias, which gets no adapter; {_projections_hint(groups)}"
    if kind in (NORM, EMBEDDING) or (kind == HEAD and not any(group.is_head for group in groups)):
        return no_projection(pattern, tied=kind == HEAD)
    known = sorted({name.rsplit(".", 1)[-1] for group in groups for name in _all_names(group)})
    close = nearest(pattern, known)
    return "names no projection" + (
        f"; did you mean {' or '.join(close)}?" if close else f"; {_projections_hint(groups)}"
    )


def _group_named(name: str) -> str:
    return parameter_group(Leaf(f"{name}{_WEIGHT}", (), None))  # pyright: ignore[reportArgumentType]


def no_projection(name: str, *, tied: bool) -> str:
    """The reason why a module gets no adapter, and the setting that trains it instead.

    Args:
        name: the name of a norm, a table or the output head.
        tied: whether it is the head of a model whose head is its table.
    """
    if tied:
        return (
            "is the output head, which is the embedding table in this model (tied weights): with an adapter one "
            f"matrix would have two meanings; {KEY}.modules_to_save: [embed_tokens] trains it whole"
        )
    return f"is no projection, and gets no adapter; {KEY}.modules_to_save: [{name}] trains it whole"


def _all_names(group: TargetGroup) -> tuple[str, ...]:
    return (*group.names, *(member.path for member in group.members))


def _projections_hint(groups: Sequence[TargetGroup]) -> str:
    names = sorted({member.name for group in groups for member in group.members})
    return f"the projections are {', '.join(names)}"
