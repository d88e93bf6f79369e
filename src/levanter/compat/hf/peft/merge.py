"""Merges a LoRA adapter into its base weights, W + s · B A, on the host, a block of rows at a time.

The sum is computed in float32 and rounded once, to the dtype of the file. The loss is measured: a product smaller than
half a step of the weight's dtype changes nothing.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.rules import WeightRules
from haliax_ext.saving import OutTensor
from haliax_ext.sources import Index, TensorSource
from levanter.compat.hf.errors import CorruptFileError
from levanter.compat.hf.peft.names import BASE, PREFIX, A, B, is_transposed, module_names
from levanter.compat.hf.peft.read import PeftAdapter
from levanter.models.adapters.lora_targets import TargetGroup

ROUNDING_WARNING = 0.05
"""The part of an adapter that may be lost in rounding before it is worth a warning."""
BLOCK_BYTES = 16 << 20
"""How many bytes of float32 sums are made at a time; about seven times as much is in memory for that."""
_WEIGHT = ".weight"


@dataclass(kw_only=True)
class Rounding:
    """What is lost of the adapters of one group of modules.

    Attributes:
        group: what a checkpoint calls the modules, with `{layers}` for their number.
        lost: the sum of squares of what rounding changed.
        added: the sum of squares of what the adapter adds.
        unchanged: weights that are the same as before.
        weights: all of them.
    """

    group: str
    lost: float = 0.0
    added: float = 0.0
    unchanged: int = 0
    weights: int = 0

    @property
    def share(self) -> float:
        """What rounding changed in proportion to what the adapter adds, as norms."""
        return math.sqrt(self.lost / self.added) if self.added else 0.0

    def __str__(self) -> str:
        unchanged = self.unchanged / self.weights if self.weights else 0.0
        return f"{self.group}: {self.share:.2%} lost in rounding, {unchanged:.1%} of the weights did not move"


@dataclass(frozen=True, kw_only=True)
class MergedTensors:
    """The tensors of a base with an adapter merged in, some rows at a time: read, added and rounded when asked for.

    What is written has the names and the shapes of what is read, so no tensor is ever in memory as a whole.

    Attributes:
        source: the base's tensors.
        rules: of its weights.
        adapter: what is merged.
        targets: of the adapter.
        copies: of the tensors of which the adapter has whole copies, what they are called with `{layers}` for numbers.
        block_bytes: of the float32 sums that are made at a time.
        rounding: what has been lost so far, by group.
    """

    source: TensorSource
    rules: WeightRules
    adapter: PeftAdapter
    targets: Sequence[TargetGroup]
    copies: Mapping[str, str] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES
    rounding: dict[str, Rounding] = field(default_factory=dict)

    def rows(self, tensor: OutTensor) -> Iterator[np.ndarray]:
        """A tensor as it is written, a run of its rows after another.

        Args:
            tensor: one that the base has.

        Raises:
            CorruptFileError: the adapter's numbers are not finite, or a sum is not.
        """
        stored_name = self._stored_name(tensor.name, self.source)
        info = self.source.tensors[stored_name]
        assert info.shape == tensor.shape, f"{tensor.name}: {info.shape} is merged as {tensor.shape}"
        merge = self._row_merger(tensor.name)
        for region in _blocks(tensor.shape, self.block_bytes // 4):
            values = self.source.read(stored_name, region)
            if merge is None:
                yield values.astype(tensor.dtype, copy=False)
            else:
                before = values.astype(np.float32)
                yield self._round(before, merge(before, region), tensor)

    def _row_merger(self, name: str) -> Callable[[np.ndarray, Index], np.ndarray] | None:
        """What some rows of a tensor become, float32, from what they are; None where they stay."""
        module = name.removesuffix(_WEIGHT)
        target = self._modules.get(module) if name.endswith(_WEIGHT) else None
        copied = name in self.copies
        if target is None and not copied:
            return None
        product = None if target is None else self._product(module, target)

        def merge(before: np.ndarray, region: Index) -> np.ndarray:
            base = self._read_finite(f"{PREFIX}{name}", region) if copied else before
            return base if product is None else product(region) + base

        return merge

    def _round(self, before: np.ndarray, exact: np.ndarray, tensor: OutTensor) -> np.ndarray:
        # `difference` first holds what rounding changed, then what the adapter adds: one float32 buffer for both.
        written = exact.astype(tensor.dtype)
        difference = written.astype(np.float32)
        unchanged = int(np.count_nonzero(difference == before))
        difference -= exact
        lost = _squares(difference)
        if not math.isfinite(lost):
            # An infinity has no distance to itself.
            module = tensor.name.removesuffix(_WEIGHT)
            raise CorruptFileError(
                self.adapter.where, f"{module}: the merged weights are not finite in {written.dtype}"
            )
        kind = self._group(tensor.name)
        rounding = self.rounding.setdefault(kind, Rounding(group=kind))
        rounding.unchanged += unchanged
        rounding.weights += written.size
        rounding.lost += lost
        np.subtract(exact, before, out=difference)
        rounding.added += _squares(difference)
        return written

    def _product(self, module: str, group: TargetGroup) -> Callable[[Index], np.ndarray]:
        """s · B A, as far as a region of the module's matrix has it."""
        a, b = (self._read_finite(f"{PREFIX}{module}{which}") for which in (A, B))
        # Scaled once here, not for every block of rows.
        b *= np.float32(self.adapter.config.scale(group.rank, group.alpha))
        if is_transposed(group):
            return lambda region: a.T[region[0]] @ b.T[:, region[1]]
        return lambda region: b[region[0]] @ a[:, region[1]]

    def _read_finite(self, name: str, region: Index | None = None) -> np.ndarray:
        """A tensor of the adapter, or a part of one, float32."""
        stored_name = self._stored_name(name, self.adapter.source)
        shape = self.adapter.source.tensors[stored_name].shape
        values = self.adapter.source.read(stored_name, region or tuple(slice(0, size) for size in shape)).astype(
            np.float32
        )
        if not np.isfinite(values).all():
            count = int((~np.isfinite(values)).sum())
            raise CorruptFileError(self.adapter.where, f"{stored_name}: {count:,} numbers are not finite")
        return values

    def _stored_name(self, name: str, source: TensorSource) -> str:
        """What a source calls a tensor."""
        prefix = PREFIX if name.startswith(PREFIX) else ""
        others = [f"{prefix}{other}" for other in self.rules.spellings(name.removeprefix(PREFIX))]
        with_base_layer = (f"{other.removesuffix(_WEIGHT)}{BASE}" for other in others)
        return next(other for other in (*others, *with_base_layer) if other in source.tensors)

    def _group(self, name: str) -> str:
        group = self._modules.get(name.removesuffix(_WEIGHT))
        if group is None:
            return self.copies[name].removesuffix(_WEIGHT)
        assert group.source is not None
        return group.source

    @cached_property
    def _modules(self) -> Mapping[str, TargetGroup]:
        return {module: group for group in self.targets for module in module_names(group)}


def copied_tensors(model_leaves: Sequence[Leaf], rules: WeightRules, whole: Collection[str]) -> Mapping[str, str]:
    """The tensors of leaves, each with what it is called with the axes' names in the place of numbers.

    Args:
        model_leaves: a model's leaves.
        rules: of its weights.
        whole: the paths of those that are wanted.
    """
    table = rules.by_target()
    chosen = [leaf for leaf in model_leaves if leaf.path in whole]
    return {name: table[leaf.path].source for leaf in chosen for name in table[leaf.path].source_names(leaf)}


def _blocks(shape: tuple[int, ...], elements: int) -> Iterator[Index]:
    """Runs of rows of an array, of about so many elements each."""
    if not shape:
        yield ()
        return
    rest = tuple(map(slice, (0,) * (len(shape) - 1), shape[1:]))
    count = max(1, elements // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], count):
        yield (slice(start, min(start + count, shape[0])), *rest)


def _squares(x: np.ndarray) -> float:
    """The sum of squares; of a block, in which float32 is mostly enough to add up in."""
    total = float(np.vdot(x, x))
    return total if math.isfinite(total) else float(np.sum(np.square(x, dtype=np.float64)))


def stored_leaves(
    model_leaves: Sequence[Leaf], rules: WeightRules, source: TensorSource | None, default_dtype: np.dtype
) -> tuple[Leaf, ...]:
    """Leaves with the dtypes of the tensors that they come from.

    Args:
        model_leaves: a model's.
        rules: of its weights.
        source: the tensors; None where they are not available.
        default_dtype: the dtype of what is not there.
    """
    converted = []
    for leaf in model_leaves:
        rule = rules.by_target().get(leaf.path)
        names = () if rule is None or source is None else rules.spellings(rule.source_names(leaf)[0])
        stored_name = next((name for name in names if source is not None and name in source.tensors), None)
        converted.append(
            replace(
                leaf,
                dtype=default_dtype if stored_name is None or source is None else source.tensors[stored_name].dtype,
            )
        )
    return tuple(converted)


def rounding_lines(roundings: Sequence[Rounding]) -> list[str]:
    """What was lost, a line for each kind of module; a warning where it is much."""
    lines = [f"merged {rounding}" for rounding in roundings]
    if any(rounding.share > ROUNDING_WARNING for rounding in roundings):
        lines.append(
            f"warning: rounding loses more than {ROUNDING_WARNING:.0%} of some adapters; --dtype float32 loses "
            "nothing, and neither does serving the adapter separately from its base"
        )
    return lines
