"""`quantize: int8`: a model whose projections are read as integers, and where they come from.

The module is that of the architecture with `Int8Matrix` in its projections; each of those is derived from the tensor
that holds its weights, while that is read. So the integers' Programs are among those of loading, and what a device
holds beyond the int8 model is a piece of one leaf. Weights that a checkpoint stores as int8 are read as they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from haliax import NamedArray

from haliax_ext.abstract import Leaf, leaves
from haliax_ext.load_transforms import LoadTransformRule
from haliax_ext.planner import ShardingPlan
from haliax_ext.pytree import PyTree, leaves_with_paths
from haliax_ext.rules import WeightRule, WeightRules
from levanter.commands.model.representation import TiedHead
from levanter.compat.hf.compressed_tensors import SCALE
from levanter.layers.linear import Linear
from levanter.layers.quantized import int8_matrix, quantizable, with_int8, with_untied_head
from levanter.runplan import Check


class QuantizationError(ValueError):
    """A model cannot be held as int8."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedModel:
    """A model with int8 projections.

    Attributes:
        module: without memory.
        rules: where its leaves come from.
        projections: paths of the projections that are int8.
        stored: those of them that are stored so, and read as they are.
    """

    module: PyTree
    rules: WeightRules
    projections: tuple[str, ...]
    stored: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Derive:
    """The integers and scales of one weight."""

    path: str
    inputs: tuple[str, ...]

    def __call__(self, weight: NamedArray) -> Mapping[str, NamedArray]:
        found = int8_matrix(weight, self.inputs)
        return {f"{self.path}.q": found.q, f"{self.path}.scale": found.scale}


def quantized(
    module: PyTree,
    rules: WeightRules,
    *,
    asked: bool,
    tied_head: TiedHead = "copy",
    is_stored: Callable[[str], bool] = lambda _: False,
) -> QuantizedModel | None:
    """A model with its projections as int8: read where they are stored so, otherwise derived from their weights.

    Args:
        module: the model, abstract.
        rules: where its leaves come from.
        asked: whether all projections are to be int8, or only those that are stored so.
        tied_head: what the head multiplies by where it is the embedding table and all are to be int8.
        is_stored: of a weight's name in the checkpoint, whether it is stored as int8.

    Returns:
        The model; None if no projection is int8.

    Raises:
        QuantizationError: all are to be int8, and none can be; or a leaf is stored as int8 in some layers only.
    """
    headed = with_untied_head(module) if asked and tied_head == "copy" else module
    if headed is not module:
        head = module.head.weight
        (table,) = (path for path, x in leaves_with_paths(module) if x is head)
        rules = replace(rules, rules=(*rules.rules, replace(rules.by_target()[table], target="lm_head.weight")))
    there = quantizable(headed)
    if asked and not there:
        raise QuantizationError(
            f"quantize: int8: {type(module).__name__} has no projection that can be int8: none of its modules is a "
            "levanter.layers.linear.Linear with an array of weights\n  → quantize: null"
        )
    stored = _stored(there, rules, {leaf.path: leaf for leaf in leaves(headed)}, is_stored)
    chosen = tuple(path for path in there if asked or path in stored)
    if not chosen:
        return None
    derived = [
        LoadTransformRule(
            path=f"{path}.weight",
            targets=(f"{path}.weight.q", f"{path}.weight.scale"),
            like=f"{path}.weight.q",
            derive=_Derive(f"{path}.weight", there[path].In),
        )
        for path in chosen
        if path not in stored
    ]
    parts = {f"{path}.weight": path for path in stored}
    read = [
        each
        for rule in rules.rules
        for each in (_of_parts(rule, parts[rule.target]) if rule.target in parts else (rule,))
    ]
    return QuantizedModel(
        module=with_int8(headed, chosen.__contains__),
        rules=replace(rules, rules=tuple(read), derived=(*rules.derived, *derived)),
        projections=chosen,
        stored=tuple(stored),
    )


def _of_parts(rule: WeightRule, path: str) -> tuple[WeightRule, WeightRule]:
    """Where integers and scales lie whose weight the rule is about: rows of a matrix are its output channels."""
    out, _ = rule.axes
    return (
        replace(rule, target=f"{path}.weight.q"),
        replace(rule, target=f"{path}.weight.scale", source=rule.source + SCALE, axes=(out, ())),
    )


def _stored(
    there: Mapping[str, Linear], rules: WeightRules, own: Mapping[str, Leaf], is_stored: Callable[[str], bool]
) -> list[str]:
    """The projections that are stored as int8."""
    table, found = rules.by_target(), list[str]()
    problems: list[str] = []
    for path, linear in there.items():
        rule = table.get(f"{path}.weight")
        if rule is None:
            continue
        names = rule.source_names(own[rule.target])
        held = [any(map(is_stored, rules.spellings(name))) for name in names]
        if not any(held):
            continue
        if not all(held):
            (without, *others) = (name for name, int8 in zip(names, held, strict=True) if not int8)
            more = f" and {len(others)} more" if others else ""
            problems.append(
                f"{rule.target} is one array of {len(names)} tensors, of which {without}{more} are not stored as int8"
            )
        elif len(rule.axes) != 2 or set(rule.axes[1]) != set(linear.In):
            problems.append(f"{rule.target} is stored as int8, but rows of {names[0]} are not its output channels")
        else:
            found.append(path)
    if problems:
        raise QuantizationError(
            "\n".join(problems) + "\n  → where layers differ, model.scan_layers: false reads each by itself"
        )
    return found


def quantization_check(model: QuantizedModel, sharding: ShardingPlan) -> Check:
    """What is int8, and the bytes of integers, scales and all that is neither, exactly."""
    parts_of = ((path, part) for path in model.projections for part in ("q", "scale"))
    # Where an adapter is bound, the integers are one floor below.
    own = {f"{path}.weight{base}.{part}": part for path, part in parts_of for base in ("", ".base")}
    kinds = {"q": "integers", "scale": "scales", "": "the rest"}
    every, here = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
    tables: list[str] = []
    for each in sharding.leaves:
        leaf = each.leaf
        kind = own.get(leaf.path, "")
        every[kind] += leaf.nbytes
        here[kind] += each.bytes_per_device
        if "vocab" in leaf.names and not kind:
            tables.append(f"{leaf.nbytes:,} in {leaf.path} ({leaf.dtype.name})")
    parts = ", ".join(f"{every[kind]:,} of {name}" for kind, name in kinds.items())
    each = ", ".join(f"{here[kind]:,}" for kind in kinds)
    of_table = f", of which {'; '.join(tables)}" if tables else ""
    how = f" ({len(model.stored)} read as they are stored)" if model.stored else ""
    message = f"{len(model.projections)} projections{how}; bytes: {parts}{of_table}; on each device {each}"
    return Check(name="int8", status="note", message=message)
