"""`ExpectedSource`: the tensors that a checkpoint has if it matches a table of rules exactly.

Loading can thus be planned before the checkpoint is available: names, shapes and dtype follow from the rules in
reverse. The source has an index only and cannot be read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.rules import WeightRules
from haliax_ext.sources import ByteRange, Index, TensorInfo


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpectedSource:
    """A `TensorSource` of which only the index exists.

    Attributes:
        tensors: every tensor that the rules name.
    """

    tensors: Mapping[str, TensorInfo]

    @classmethod
    def of(cls, rules: WeightRules, leaves: Iterable[Leaf], *, dtype: np.dtype) -> "ExpectedSource":
        """The source that a checkpoint of these leaves would be.

        Args:
            rules: the model family's table.
            leaves: of the model; axes that a rule calls padded are taken at their full length.
            dtype: in which the weights are stored, integers apart.
        """
        table = rules.by_target()
        tensors: dict[str, TensorInfo] = {}
        for leaf in rules.read_leaves(leaves):
            rule = table[leaf.path]
            shape = rule.source_shape(leaf)
            # One dtype is assumed for all weights; integers and booleans keep their own.
            stored = leaf.dtype if leaf.dtype.kind in "iub" else dtype
            nbytes = int(np.prod(shape, dtype=np.int64)) * stored.itemsize
            for name in rule.source_names(leaf):
                tensors[name] = TensorInfo(name, shape, stored, nbytes)
        return cls(tensors=tensors)

    def byte_ranges(self, name: str, index: Index) -> Sequence[ByteRange]:
        """None: there are no files yet."""
        del name, index
        return ()

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        """Never called: a plan whose checkpoint is missing does not run."""
        del index, out
        raise AssertionError(f"{name} is expected but does not exist: call RunPlan.check() before reading")
