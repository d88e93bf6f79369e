"""Weight rules for peft's tensor names, derived from the rules of the base weights."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

from haliax_ext.rules import WeightRule, WeightRules
from levanter.layers.low_rank import RANK
from levanter.models.adapters.lora import PAIRS
from levanter.models.adapters.lora_targets import TargetGroup
from levanter.models.adapters.whole import copy_path

PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
BASE = ".base_layer.weight"
"""The suffix of a full copy of a matrix that also has factors; peft writes one of an adapted head by itself."""


class UnsupportedTargetError(ValueError):
    """A LoRA target has no tensor name in the format of `peft`."""


def module_names(group: TargetGroup) -> tuple[str, ...]:
    """The checkpoint's names of a group's modules: one for each layer, and for each expert."""
    assert group.source is not None
    rule = WeightRule(target="", source=group.source, axes=())
    sizes = {axis.name: axis.size for axis in group.copies}
    # Layers are the major index, then experts: the order in which stacked leaves are filled.
    return tuple(rule.source_name(index) for index in itertools.product(*(range(sizes[n]) for n in rule.stacked)))


def modules_by_layer(group: TargetGroup) -> tuple[tuple[str, ...], ...]:
    """The modules of a group, one tuple for each layer."""
    # A group outside the layers (the head) counts as one layer.
    layers = next((axis.size for axis in group.copies if axis.name == "layers"), 1)
    modules = module_names(group)
    per_layer = len(modules) // layers
    return tuple(modules[n * per_layer : (n + 1) * per_layer] for n in range(layers))


def is_transposed(group: TargetGroup) -> bool:
    """Whether a checkpoint stores the group's matrix `[in, out]`."""
    rule = group.members[0].rule
    assert rule is not None
    # The base's first source axis tells: it is [out, in] unless the contracted axes come first.
    return set(rule.axes[0]) == {axis.name for axis in group.In}


def peft_rules(groups: Sequence[TargetGroup], rules: WeightRules, whole: Sequence[str] = ()) -> WeightRules:
    """The weight rules of an adapter: the tensor of each factor and of each full copy in peft's files.

    Args:
        groups: the targets.
        rules: of the model's weights.
        whole: paths of the parameters with full copies.

    Raises:
        UnsupportedTargetError: a target has no name in checkpoints; lists all.
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
            # Members of a fused matrix share one A, so it is listed once.
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
                    # B is [out, rank] even where the base is [in, out], so a member's rows are a part of axis 0.
                    part=None if part is None else replace(part, axis=0),
                    padded=tuple(name for name in member.rule.padded if name in Out),
                )
            )
    named = rules.by_target()
    adapted = {f"{member.path}.weight" for group in groups for member in group.members}
    for path in whole:
        source = f"{PREFIX}{named[path].source}"
        # An adapted module is wrapped by peft, so its full copy is that of `base_layer`.
        if path in adapted:
            source = f"{source.removesuffix('.weight')}{BASE}"
        table.append(replace(named[path], target=copy_path(path), source=source))
    # Only prefixes (with `*`) apply to modules; the others name single tensors of the base.
    aliases = tuple((f"{PREFIX}{name}", f"{PREFIX}{other}") for name, other in rules.aliases if "*" in name)
    # Files of tied models hold the table under both names, of the embedding and of the head; the second is ignored.
    ignored = tuple(f"{PREFIX}{name}" for name in rules.ignored) if whole else ()
    return WeightRules(rules=tuple(table), aliases=aliases, ignored=ignored)


def short_names(chosen: Sequence[str], all_modules: Sequence[str]) -> tuple[str, ...]:
    """Names that select exactly the chosen modules: the last name, if all modules with that name are chosen.

    Args:
        chosen: the modules to select.
        all_modules: all modules of the model.
    """
    chosen_set = set(chosen)
    others = {name.rsplit(".", 1)[-1] for name in all_modules if name not in chosen_set}
    last = {name: name.rsplit(".", 1)[-1] for name in chosen}
    # A full path also ends in a shorter name, so the short form is used only if it selects nothing else.
    return tuple(sorted({name if last[name] in others else last[name] for name in chosen}))


def saved_names(chosen: Sequence[str], all_modules: Sequence[str]) -> tuple[str, ...]:
    """Names for `modules_to_save`, where peft selects every module whose name ends with one of them.

    Args:
        chosen: the modules to select.
        all_modules: all modules of the model.
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
    """A name, escaped as a key of `rank_pattern`, which peft reads as a regular expression."""
    return re.escape(name)
