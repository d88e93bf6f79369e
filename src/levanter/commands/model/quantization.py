"""`quantize: int8`: a model with int8 projections, and the weight rules of its leaves.

The module is the architecture's with `Int8Matrix` in its projections. Each is quantized from its weight tensor while
that is read, so the Programs that quantize are among those of loading, and a device holds at most a piece of one leaf
in addition to the int8 model. Weights that a checkpoint stores as int8 are read unchanged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from haliax import NamedArray

from haliax_ext.abstract import Leaf, leaves
from haliax_ext.load_transforms import LoadTransformRule
from haliax_ext.planner import ShardingPlan
from haliax_ext.pytree import PyTree, leaves_with_paths
from haliax_ext.rules import WeightRule, WeightRules
from levanter.commands.model.config import TiedHead
from levanter.compat.hf.quantized.compressed_tensors import SCALE
from levanter.layers.linear import Linear
from levanter.layers.quantized import int8_matrix, quantizable, with_int8, with_untied_head
from levanter.runplan import Check


class QuantizationError(ValueError):
    """The model has no int8 representation."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedModel:
    """A model with int8 projections.

    Attributes:
        module: the module, abstract.
        rules: the weight rules of its leaves.
        projections: paths of the int8 projections.
        stored: paths of the projections that the checkpoint stores as int8.
    """

    module: PyTree
    rules: WeightRules
    projections: tuple[str, ...]
    stored: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Derive:
    """Quantizes one weight to integers and scales."""

    path: str
    inputs: tuple[str, ...]

    # Runs on the devices, in a Program of loading.
    def __call__(self, weight: NamedArray) -> Mapping[str, NamedArray]:
        matrix = int8_matrix(weight, self.inputs)
        return {f"{self.path}.q": matrix.q, f"{self.path}.scale": matrix.scale}


def quantize_projections(
    module: PyTree,
    rules: WeightRules,
    *,
    quantize_all: bool,
    tied_head: TiedHead = "copy",
    is_stored: Callable[[str], bool] = lambda _: False,
) -> QuantizedModel | None:
    """A model with int8 projections: read if the checkpoint stores int8, otherwise quantized from the weights.

    Args:
        module: the model, abstract.
        rules: the weight rules of its leaves.
        quantize_all: whether all projections become int8, or only those that are stored as int8.
        tied_head: matrix of a tied output head if all projections become int8.
        is_stored: weight name in the checkpoint → whether it is stored as int8.

    Returns:
        The model; None if no projection is int8.

    Raises:
        QuantizationError: no projection can be int8; or a leaf is stored as int8 in some layers only.
    """
    # An int8 copy of the embedding table becomes the head; the table itself stays in the compute dtype.
    untied = with_untied_head(module) if quantize_all and tied_head == "copy" else module
    # The head gets a weight rule of its own, from the tensor of the table: it is read twice, quantized once.
    if untied is not module:
        head = module.head.weight
        (table,) = (path for path, x in leaves_with_paths(module) if x is head)
        rules = replace(rules, rules=(*rules.rules, replace(rules.by_target()[table], target="lm_head.weight")))
    candidates = quantizable(untied)
    if quantize_all and not candidates:
        raise QuantizationError(
            f"quantize: int8: {type(module).__name__} has no projection that can be int8: it has no module "
            "levanter.layers.linear.Linear with a weight array\n  → quantize: null"
        )
    # Only where every layer of a stacked array is stored as int8 can the array be read as int8.
    stored = _stored(candidates, rules, {leaf.path: leaf for leaf in leaves(untied)}, is_stored)
    chosen = tuple(path for path in candidates if quantize_all or path in stored)
    if not chosen:
        return None
    # Each derived rule reads one weight and yields its integers and scales; the weight itself is not kept.
    derived = [
        LoadTransformRule(
            path=f"{path}.weight",
            targets=(f"{path}.weight.q", f"{path}.weight.scale"),
            like=f"{path}.weight.q",
            derive=_Derive(f"{path}.weight", candidates[path].In),
        )
        for path in chosen
        # Stored integers need no transform.
        if path not in stored
    ]
    stored_weights = {f"{path}.weight": path for path in stored}
    read_rules = [
        read_rule
        for rule in rules.rules
        for read_rule in (
            _stored_int8_rules(rule, stored_weights[rule.target]) if rule.target in stored_weights else (rule,)
        )
    ]
    return QuantizedModel(
        module=with_int8(untied, chosen.__contains__),
        rules=replace(rules, rules=tuple(read_rules), derived=(*rules.derived, *derived)),
        projections=chosen,
        stored=tuple(stored),
    )


def _stored_int8_rules(rule: WeightRule, path: str) -> tuple[WeightRule, WeightRule]:
    """The rules of the stored integers and scales of a weight; the rows of a stored matrix are its output channels."""
    # A stored matrix is [output, input]; scales have the output axes only.
    out, _ = rule.axes
    return (
        replace(rule, target=f"{path}.weight.q"),
        replace(rule, target=f"{path}.weight.scale", source=rule.source + SCALE, axes=(out, ())),
    )


def _stored(
    candidates: Mapping[str, Linear],
    rules: WeightRules,
    leaves_by_path: Mapping[str, Leaf],
    is_stored: Callable[[str], bool],
) -> list[str]:
    """Paths of the projections that the checkpoint stores as int8."""
    table, stored = rules.by_target(), list[str]()
    problems: list[str] = []
    for path, linear in candidates.items():
        rule = table.get(f"{path}.weight")
        if rule is None:
            # Weights without a rule are not read from files.
            continue
        names = rule.source_names(leaves_by_path[rule.target])
        # A tensor may have several spellings (prefixes of wrapped models).
        is_int8 = [any(map(is_stored, rules.spellings(name))) for name in names]
        if not any(is_int8):
            continue
        if not all(is_int8):
            (without, *others) = (name for name, int8 in zip(names, is_int8, strict=True) if not int8)
            more = f" and {len(others)} more" if others else ""
            problems.append(
                f"{rule.target} is one array of {len(names)} tensors, of which {without}{more} are not stored as int8"
            )
        # Scales per row fit only if rows are the output channels; another order would mix channels.
        elif len(rule.axes) != 2 or set(rule.axes[1]) != set(linear.In):
            problems.append(f"{rule.target} is stored as int8, but rows of {names[0]} are not its output channels")
        else:
            stored.append(path)
    if problems:
        raise QuantizationError(
            "\n".join(problems) + "\n  → if layers differ, set model.scan_layers: false to read each separately"
        )
    return stored


def quantization_check(model: QuantizedModel, sharding: ShardingPlan) -> Check:
    """Reports the int8 projections and the exact bytes of integers, scales and all other leaves."""
    parts_of = ((path, part) for path in model.projections for part in ("q", "scale"))
    # An adapter wraps the matrix, so that the integers of the base are one path element deeper.
    kinds_by_path = {f"{path}.weight{base}.{part}": part for path, part in parts_of for base in ("", ".base")}
    kinds = {"q": "integers", "scale": "scales", "": "other leaves"}
    total_bytes, device_bytes = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
    tables: list[str] = []
    for planned in sharding.leaves:
        leaf = planned.leaf
        kind = kinds_by_path.get(leaf.path, "")
        # Leaves that are neither integers nor scales of a projection count as other.
        total_bytes[kind] += leaf.nbytes
        device_bytes[kind] += planned.bytes_per_device
        # The embedding table is usually the largest leaf that stays unquantized.
        if "vocab" in leaf.names and not kind:
            tables.append(f"{leaf.nbytes:,} in {leaf.path} ({leaf.dtype.name})")
    totals = ", ".join(f"{total_bytes[kind]:,} of {name}" for kind, name in kinds.items())
    per_device = ", ".join(f"{device_bytes[kind]:,}" for kind in kinds)
    of_table = f", of which {'; '.join(tables)}" if tables else ""
    how = f" ({len(model.stored)} stored as int8)" if model.stored else ""
    message = f"{len(model.projections)} projections{how}; bytes: {totals}{of_table}; on each device {per_device}"
    return Check(name="int8", status="note", message=message)
