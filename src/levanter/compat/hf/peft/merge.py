"""An adapter merged into the files of its base: W + s · B A, tensor by tensor, on the host.

The sum is made in float32 and rounded once, to the dtype that is written. How much of the adapter is lost by that is
counted: a product that is smaller than half a step of the weight's dtype changes nothing at all.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.rules import SourcePiece, WeightRules
from haliax_ext.saving import Readable
from haliax_ext.slices import Box, box_shape, to_slices
from haliax_ext.sources import Index, TensorSource
from levanter.compat.hf.errors import CorruptFileError
from levanter.compat.hf.peft.names import PREFIX, A, B, is_transposed, modules_of
from levanter.compat.hf.peft.read import PeftAdapter
from levanter.models.adapters.targets import TargetGroup

WORTH_SAYING = 0.05
"""The part of an adapter that may be lost in rounding before it is worth a warning."""
_WEIGHT = ".weight"


@dataclass(kw_only=True)
class Rounding:
    """What is lost of the adapters of one group of modules.

    Attributes:
        group: what a checkpoint calls the modules, with `{layers}` for their number.
        lost: the sum of squares of what rounding changed.
        added: the sum of squares of what the adapter adds.
        still: weights that are the same as before.
        weights: all of them.
    """

    group: str
    lost: float = 0.0
    added: float = 0.0
    still: int = 0
    weights: int = 0

    @property
    def share(self) -> float:
        """What rounding changed in proportion to what the adapter adds, as norms."""
        return math.sqrt(self.lost / self.added) if self.added else 0.0

    def __str__(self) -> str:
        still = self.still / self.weights if self.weights else 0.0
        return f"{self.group}: {self.share:.2%} lost in rounding, {still:.1%} of the weights did not move"


@dataclass(frozen=True)
class MergedLeaves(Mapping[str, Readable]):
    """The leaves of a base with an adapter merged in; each piece of one is read, added and rounded when asked for.

    Attributes:
        source: the base's tensors.
        rules: of its weights.
        own: its leaves.
        adapter: what is merged.
        targets: of the adapter.
        dtype: of what is written; None for that of each tensor.
        rounding: what has been lost so far, by group.
    """

    source: TensorSource
    rules: WeightRules
    own: Sequence[Leaf]
    adapter: PeftAdapter
    targets: Sequence[TargetGroup]
    dtype: np.dtype | None = None
    rounding: dict[str, Rounding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pieces: dict[tuple[str, Box], tuple[str, SourcePiece]] = {}
        for name, (_, found) in self.rules.sources(self.own).items():
            pieces |= {(piece.target, piece.box): (name, piece) for piece in found}
        object.__setattr__(self, "_pieces", pieces)
        modules = {module: group for group in self.targets for module in modules_of(group)}
        object.__setattr__(self, "_modules", modules)

    def __getitem__(self, path: str) -> Readable:
        return _Leaf(self, path)

    def __iter__(self) -> Iterator[str]:
        return (leaf.path for leaf in self.own)

    def __len__(self) -> int:
        return len(self.own)

    def block(self, path: str, box: Box) -> np.ndarray:
        """A piece of a leaf that is one tensor's, or a part of one, merged.

        Raises:
            CorruptFileError: the adapter's numbers are not finite, or the sum is not.
        """
        name, piece = self._pieces[path, box]  # type: ignore[attr-defined]
        held = next(other for other in self.rules.spellings(name) if other in self.source.tensors)
        region = to_slices(piece.region)
        values = self.source.read(held, region)
        group = self._modules.get(name.removesuffix(_WEIGHT)) if name.endswith(_WEIGHT) else None  # type: ignore
        if group is not None:
            values = self._merged(values, name.removesuffix(_WEIGHT), group, region)
        found = np.zeros(box_shape(box), values.dtype)
        digits = [tuple((0, size) for size in sizes) for sizes in piece.layout.group_sizes]
        copy = piece.layout.copy(piece.stack, digits, piece.box)
        assert copy is not None
        copy.scatter(np.ascontiguousarray(values), found)
        return found

    def _merged(self, values: np.ndarray, module: str, group: TargetGroup, region: Index) -> np.ndarray:
        added = self._product(module, group, region)
        exact = values.astype(np.float32) + added
        written = exact.astype(values.dtype if self.dtype is None else self.dtype)
        if not np.isfinite(written.astype(np.float32)).all():
            raise CorruptFileError(
                self.adapter.where, f"{module}: the merged weights are not finite in {written.dtype}"
            )
        assert group.source is not None
        lost = self.rounding.setdefault(group.source, Rounding(group=group.source))
        lost.lost += float(np.sum(np.square(written.astype(np.float32) - exact, dtype=np.float64)))
        lost.added += float(np.sum(np.square(added, dtype=np.float64)))
        lost.still += int((written.astype(np.float32) == values.astype(np.float32)).sum())
        lost.weights += written.size
        return written

    def _product(self, module: str, group: TargetGroup, region: Index) -> np.ndarray:
        """s · B A, as far as a region of the module's matrix has it."""
        a, b = (self._factor(f"{PREFIX}{module}{which}") for which in (A, B))
        rows, columns = region[::-1] if is_transposed(group) else region
        scale = np.float32(self.adapter.config.scale(group.rank, group.alpha))
        found = scale * (b[rows] @ a[:, columns])
        return found.T if is_transposed(group) else found

    def _factor(self, name: str) -> np.ndarray:
        tensors = self.adapter.source.tensors
        held = next(other for other in self._spellings(name) if other in tensors)
        info = tensors[held]
        values = self.adapter.source.read(held, tuple(slice(0, size) for size in info.shape)).astype(np.float32)
        if not np.isfinite(values).all():
            raise CorruptFileError(
                self.adapter.where, f"{held}: {(~np.isfinite(values)).sum():,} numbers are not finite"
            )
        return values

    def _spellings(self, name: str) -> Iterator[str]:
        return (f"{PREFIX}{other}" for other in self.rules.spellings(name.removeprefix(PREFIX)))


@dataclass(frozen=True)
class _Leaf:
    leaves: MergedLeaves
    path: str

    def __getitem__(self, index: Index, /) -> np.ndarray:
        return self.leaves.block(self.path, tuple((piece.start, piece.stop) for piece in index))


def stored_leaves(
    own: Sequence[Leaf], rules: WeightRules, source: TensorSource | None, stored: np.dtype
) -> tuple[Leaf, ...]:
    """Leaves with the dtypes of the tensors that they come from.

    Args:
        own: a model's.
        rules: of its weights.
        source: the tensors; None where they are not available.
        stored: the dtype of what is not there.
    """
    found = []
    for leaf in own:
        rule = rules.by_target().get(leaf.path)
        names = () if rule is None or source is None else rules.spellings(rule.source_names(leaf)[0])
        held = next((name for name in names if source is not None and name in source.tensors), None)
        found.append(replace(leaf, dtype=stored if held is None or source is None else source.tensors[held].dtype))
    return tuple(found)


def rounding_lines(found: Sequence[Rounding]) -> list[str]:
    """What was lost, a line for each kind of module; a warning where it is much."""
    lines = [f"merged {each}" for each in found]
    if any(each.share > WORTH_SAYING for each in found):
        lines.append(
            f"warning: of some adapters more than {WORTH_SAYING:.0%} is lost in rounding; --dtype float32 keeps all of "
            "it, and so does serving the adapter beside its base"
        )
    return lines
