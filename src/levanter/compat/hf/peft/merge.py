"""Merges a LoRA adapter into its base weights, W + s · B A, on the host, in blocks of rows.

The sum is computed in float32 and rounded once, to the dtype of the file. The loss is measured, since an update smaller
than half a step of the weight's dtype is rounded away.
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
"""The share of an adapter that may be lost in rounding without a warning."""
BLOCK_BYTES = 16 << 20
"""Bytes of float32 sums computed at a time; the temporaries take about seven times as much."""
_WEIGHT = ".weight"


@dataclass(kw_only=True)
class Rounding:
    """The rounding loss of one group of modules.

    Attributes:
        group: the checkpoint's name of the modules, with `{layers}` for the layer's number.
        lost: the sum of squares of the rounding errors.
        added: the sum of squares of the adapter's updates.
        unchanged: number of weights that did not change.
        weights: number of all weights.
    """

    group: str
    lost: float = 0.0
    added: float = 0.0
    unchanged: int = 0
    weights: int = 0

    @property
    def share(self) -> float:
        """The norm of the rounding errors relative to the norm of the adapter's updates."""
        return math.sqrt(self.lost / self.added) if self.added else 0.0

    def __str__(self) -> str:
        unchanged = self.unchanged / self.weights if self.weights else 0.0
        return f"{self.group}: {self.share:.2%} lost in rounding, {unchanged:.1%} of the weights did not move"


@dataclass(frozen=True, kw_only=True)
class MergedTensors:
    """The tensors of a base with an adapter merged in; blocks of rows are read, merged and rounded on request.

    Written tensors have the names and shapes of the read ones, so no tensor is ever in memory as a whole.

    Attributes:
        source: the base's tensors.
        rules: the weight rules of the model.
        adapter: the adapter to merge.
        targets: the adapter's targets.
        copies: tensors that the adapter replaces by full copies → their name with `{layers}` for the number.
        block_bytes: bytes of float32 sums computed at a time.
        rounding: the loss so far, by group.
    """

    source: TensorSource
    rules: WeightRules
    adapter: PeftAdapter
    targets: Sequence[TargetGroup]
    copies: Mapping[str, str] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES
    rounding: dict[str, Rounding] = field(default_factory=dict)

    def rows(self, tensor: OutTensor) -> Iterator[np.ndarray]:
        """The rows of a merged tensor, block by block.

        Args:
            tensor: a tensor of the base.

        Raises:
            CorruptFileError: the adapter's numbers or a sum are not finite.
        """
        stored_name = self._stored_name(tensor.name, self.source)
        info = self.source.tensors[stored_name]
        assert info.shape == tensor.shape, f"{tensor.name}: {info.shape} is merged as {tensor.shape}"
        merge = self._row_merger(tensor.name)
        # block_bytes counts float32: 4 bytes an element.
        for region in _blocks(tensor.shape, self.block_bytes // 4):
            values = self.source.read(stored_name, region)
            if merge is None:
                yield values.astype(tensor.dtype, copy=False)
            else:
                before = values.astype(np.float32)
                yield self._round(before, merge(before, region), tensor)

    def _row_merger(self, name: str) -> Callable[[np.ndarray, Index], np.ndarray] | None:
        """A function from rows of a tensor, float32, to their merged values; None if the adapter does not change it."""
        module = name.removesuffix(_WEIGHT)
        target = self._modules.get(module) if name.endswith(_WEIGHT) else None
        copied = name in self.copies
        if target is None and not copied:
            return None
        product = None if target is None else self._product(module, target)

        def merge(before: np.ndarray, region: Index) -> np.ndarray:
            base = self._read_finite(f"{PREFIX}{name}", region) if copied else before
            # A module may have both a full copy and factors: the copy replaces the base, then the product is added.
            return base if product is None else product(region) + base

        return merge

    def _round(self, before: np.ndarray, exact: np.ndarray, tensor: OutTensor) -> np.ndarray:
        # `difference` first holds what rounding changed, then what the adapter adds: one float32 buffer for both.
        rounded = exact.astype(tensor.dtype)
        difference = rounded.astype(np.float32)
        unchanged = int(np.count_nonzero(difference == before))
        difference -= exact
        lost = _squares(difference)
        if not math.isfinite(lost):
            # inf − inf is NaN: a sum that overflows in the file's dtype is found here.
            module = tensor.name.removesuffix(_WEIGHT)
            raise CorruptFileError(
                self.adapter.where, f"{module}: the merged weights are not finite in {rounded.dtype}"
            )
        kind = self._group(tensor.name)
        rounding = self.rounding.setdefault(kind, Rounding(group=kind))
        rounding.unchanged += unchanged
        rounding.weights += rounded.size
        rounding.lost += lost
        np.subtract(exact, before, out=difference)
        rounding.added += _squares(difference)
        return rounded

    def _product(self, module: str, group: TargetGroup) -> Callable[[Index], np.ndarray]:
        """A function from a region of the module's matrix to that part of s · B A."""
        a, b = (self._read_finite(f"{PREFIX}{module}{which}") for which in (A, B))
        # Scaled once here, not for every block of rows.
        b *= np.float32(self.adapter.config.scale(group.rank, group.alpha))
        # GPT-2 stores [in, out], so the product is (B A)ᵀ = Aᵀ Bᵀ; A is [r, in] and B [out, r] in both cases.
        if is_transposed(group):
            return lambda region: a.T[region[0]] @ b.T[:, region[1]]
        return lambda region: b[region[0]] @ a[:, region[1]]

    def _read_finite(self, name: str, region: Index | None = None) -> np.ndarray:
        """A tensor of the adapter, or a region of it, as float32; refuses infinities and NaNs."""
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
        """The name of a tensor in a source."""
        prefix = PREFIX if name.startswith(PREFIX) else ""
        others = [f"{prefix}{other}" for other in self.rules.spellings(name.removeprefix(PREFIX))]
        # peft renames the weights of wrapped modules to `<module>.base_layer.weight` in its own copies.
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
    """The tensors of some leaves: name → its template, with axes' names in place of numbers.

    Args:
        model_leaves: a model's leaves.
        rules: the weight rules of the model.
        whole: the paths of the chosen leaves.
    """
    table = rules.by_target()
    chosen = [leaf for leaf in model_leaves if leaf.path in whole]
    return {name: table[leaf.path].source for leaf in chosen for name in table[leaf.path].source_names(leaf)}


def _blocks(shape: tuple[int, ...], elements: int) -> Iterator[Index]:
    """Splits an array into runs of rows of about `elements` elements each."""
    if not shape:
        yield ()
        return
    rest = tuple(map(slice, (0,) * (len(shape) - 1), shape[1:]))
    count = max(1, elements // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], count):
        yield (slice(start, min(start + count, shape[0])), *rest)


def _squares(x: np.ndarray) -> float:
    """The sum of squares of a block, in float32, or in float64 if that overflows."""
    total = float(np.vdot(x, x))
    return total if math.isfinite(total) else float(np.sum(np.square(x, dtype=np.float64)))


def stored_leaves(
    model_leaves: Sequence[Leaf], rules: WeightRules, source: TensorSource | None, default_dtype: np.dtype
) -> tuple[Leaf, ...]:
    """Leaves with the dtypes of their source tensors.

    Args:
        model_leaves: a model's leaves.
        rules: the weight rules of the model.
        source: the tensors; None if they are not available.
        default_dtype: the dtype of leaves without a tensor.
    """
    converted = []
    for leaf in model_leaves:
        rule = rules.by_target().get(leaf.path)
        # All places of a stacked leaf have one dtype; the first source stands for them.
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
    """A line about the rounding loss for each kind of module, and a warning if a loss is large."""
    lines = [f"merged {rounding}" for rounding in roundings]
    if any(rounding.share > ROUNDING_WARNING for rounding in roundings):
        lines.append(
            f"warning: rounding loses more than {ROUNDING_WARNING:.0%} of some adapters; --dtype float32 loses "
            "nothing, and neither does serving the adapter separately from its base"
        )
    return lines
