"""Weight rules for the tensor names of `peft`, derived from the rules of the base weights."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

from haliax_ext.rules import WeightRule, WeightRules
from levanter.layers.low_rank import RANK
from levanter.models.adapters.lora_targets import TargetGroup
from levanter.models.adapters.tree import PAIRS
from levanter.models.adapters.whole import copy_path

PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
BASE = ".base_layer.weight"
"""What the copy of a matrix that has factors too is called; peft writes that of a head unasked."""


class UnsupportedTargetError(ValueError):
    """A LoRA target has no tensor name in the format of `peft`."""


def module_names(group: TargetGroup) -> tuple[str, ...]:
    """What a checkpoint calls the modules of a group: one for each layer, or expert."""
    assert group.source is not None
    rule = WeightRule(target="", source=group.source, axes=())
    sizes = {axis.name: axis.size for axis in group.copies}
    return tuple(rule.source_name(index) for index in itertools.product(*(range(sizes[n]) for n in rule.stacked)))


def modules_by_layer(group: TargetGroup) -> tuple[tuple[str, ...], ...]:
    """The modules of a group, layer by layer."""
    layers = next((axis.size for axis in group.copies if axis.name == "layers"), 1)
    modules = module_names(group)
    per_layer = len(modules) // layers
    return tuple(modules[n * per_layer : (n + 1) * per_layer] for n in range(layers))


def is_transposed(group: TargetGroup) -> bool:
    """Whether a checkpoint stores the group's matrix `[in, out]`."""
    rule = group.members[0].rule
    assert rule is not None
    return set(rule.axes[0]) == {axis.name for axis in group.In}


def peft_rules(groups: Sequence[TargetGroup], rules: WeightRules, whole: Sequence[str] = ()) -> WeightRules:
    """Where each factor, and each whole copy, lies in a file of `peft`.

    Args:
        groups: the targets.
        rules: of the weights.
        whole: paths of the parameters that are copied.

    Raises:
        UnsupportedTargetError: a target is in no checkpoint; lists all.
    """
    if unmapped := [group.path for group in groups if group.source is None]:
        raise UnsupportedTargetError(f"no module of a checkpoint is {', '.join(unmapped)}: adapters of it have no name")
    table: list[WeightRule] = []
    for group in groups:
        where = f"{PAIRS}.{group.path}"
        for member in group.members:
            assert member.rule is not None
            # peft stores A as [rank, in] and B as [out, rank], whatever the order of the base matrix (GPT-2 has [in,
            # out]).
            In, Out = member.rule.axes[::-1] if not is_transposed(group) else member.rule.axes
            if member is group.members[0]:
                table.append(
                    WeightRule(target=f"{where}.a.weight", source=f"{PREFIX}{group.source}{A}", axes=((RANK,), In))
                )
            part = member.rule.part
            table.append(
                WeightRule(
                    target=f"{where}.b.{member.name}.weight",
                    source=f"{PREFIX}{group.source}{B}",
                    axes=(Out, (RANK,)),
                    part=None if part is None else replace(part, axis=0),
                    padded=tuple(name for name in member.rule.padded if name in Out),
                )
            )
    named = rules.by_target()
    adapted = {f"{member.path}.weight" for group in groups for member in group.members}
    for path in whole:
        source = f"{PREFIX}{named[path].source}"
        if path in adapted:
            source = f"{source.removesuffix('.weight')}{BASE}"
        table.append(replace(named[path], target=copy_path(path), source=source))
    aliases = tuple((f"{PREFIX}{name}", f"{PREFIX}{other}") for name, other in rules.aliases if "*" in name)
    # Both names of the one table are in files of tied models.
    ignored = tuple(f"{PREFIX}{name}" for name in rules.ignored) if whole else ()
    return WeightRules(rules=tuple(table), aliases=aliases, ignored=ignored)


def short_names(chosen: Sequence[str], all_modules: Sequence[str]) -> tuple[str, ...]:
    """Names that mean some modules and no others: the last name where all modules of that name are meant.

    Args:
        chosen: the modules that are meant.
        all_modules: all that there are.
    """
    meant = set(chosen)
    others = {name.rsplit(".", 1)[-1] for name in all_modules if name not in meant}
    last = {name: name.rsplit(".", 1)[-1] for name in chosen}
    return tuple(sorted({name if last[name] in others else last[name] for name in chosen}))


def saved_names(chosen: Sequence[str], all_modules: Sequence[str]) -> tuple[str, ...]:
    """Names for `modules_to_save`, which mean every module whose name ends with one of them.

    Args:
        chosen: the modules that are meant.
        all_modules: all that there are.
    """
    saved = []
    for name in chosen:
        components = name.split(".")
        # peft compares with `endswith`, without regard to dots: take the shortest tail that no other module ends with.
        tails = [".".join(components[-n:]) for n in range(1, len(components) + 1)]
        others = [other for other in all_modules if other not in chosen]
        saved.append(next((tail for tail in tails if not any(other.endswith(tail) for other in others)), name))
    return tuple(sorted(set(saved)))


def as_pattern(name: str) -> str:
    """A name as a key of `rank_pattern`, which is a regular expression."""
    return re.escape(name)
