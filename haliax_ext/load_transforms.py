"""Several leaves of one tensor: integers and their scales, computed while the tensor streams in.

The source has a matrix; the model has its integers and a scale for each output channel. A `LoadTransformRule` names
the leaf that is read and not kept, the leaves that are kept, and the function between them. The read leaf arrives on
the devices like any other, sharded like the largest result, in pieces along an axis that all results have (of a sharded
axis, a part of each shard). Each piece is transformed, its results are written in place, and it is freed. The function
is traced under the plan's shardings, so a statistic over a sharded axis covers the entire axis: the compiler adds the
collective.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.initializers import haliax_axes
from haliax_ext.leaf_layout import Span
from haliax_ext.mapping import AxisMapping
from haliax_ext.placement import LeafPlan
from haliax_ext.program import Input, Placement, Program
from haliax_ext.pytree import eval_shape
from haliax_ext.reshard import Reshard, reshard_slabs

WORKING_BYTES = 4
"""Bytes that a function may hold on a device for each element of a piece, beside piece and results: float32."""


@dataclass(frozen=True, kw_only=True)
class LoadTransformRule:
    """Leaves that are computed from one that is read.

    Attributes:
        path: of the leaf that is read: the target of a `WeightRule`, and no leaf of the model.
        targets: paths of the leaves that are kept.
        like: the one with the axes and sharding of the read leaf.
        derive: the read leaf, floating in the source's own dtype → the kept ones by path. Along an axis that all of
            them have, what it gives for a part must be that part of what it gives for the whole.
    """

    path: str
    targets: tuple[str, ...]
    like: str
    derive: Callable[[hax.NamedArray], Mapping[str, hax.NamedArray]]

    def read_leaf(self, leaves: Mapping[str, Leaf], dtype: np.dtype | None = None) -> Leaf:
        """The leaf that is read, where `leaves` has the results; in float32 unless a dtype is given."""
        return Leaf(self.path, leaves[self.like].axes, np.dtype(np.float32 if dtype is None else dtype))

    def check(self, leaves: Mapping[str, Leaf]) -> list[str]:
        """What is wrong with this rule for a model's leaves, as sentences; empty if nothing."""
        if absent := [path for path in self.targets if path not in leaves]:
            return [f"{self.path} produces {path}, which is not a leaf of this model" for path in absent]
        if self.like not in self.targets:
            return [f"{self.path} is to be sharded like {self.like}, which is not one of {list(self.targets)}"]
        arrays = eval_shape(self.derive, abstract_leaf(self.read_leaf(leaves)))
        if set(arrays) != set(self.targets):
            return [f"{self.path} produces {sorted(arrays)}, not {sorted(self.targets)}"]
        produced = [
            Leaf(path, tuple((a.name, a.size) for a in x.axes), np.dtype(x.dtype)) for path, x in arrays.items()
        ]
        return [
            f"{self.path} produces {leaf}, but the model has {leaves[leaf.path]}"
            for leaf in produced
            if leaf != leaves[leaf.path]
        ]


@dataclass(frozen=True, kw_only=True)
class LoadTransform:
    """The transform of a leaf that is read and not kept.

    Attributes:
        rule: the function.
        results: the leaves that are kept, where they belong.
    """

    rule: LoadTransformRule
    results: tuple[LeafPlan, ...]

    def along(self, leaf: Leaf) -> tuple[int, ...]:
        """Positions of the axes of the read leaf that pieces may be cut along: those that all results have."""
        return tuple(n for n, name in enumerate(leaf.names) if all(name in r.leaf.names for r in self.results))

    def working_bytes(self, reshard: Reshard, ways: int) -> int:
        """Bytes on a device that transforming one piece takes, beside the piece itself.

        Args:
            reshard: of the read leaf.
            ways: how many shards it has.
        """
        leaf = reshard.leaf
        # What part of the leaf is in a piece: results are allocated for a piece in that proportion.
        # A piece of a sharded axis takes `piece` elements of each shard, hence the product.
        share = 1.0 if reshard.cut is None else reshard.piece * reshard.shards / leaf.shape[reshard.cut]
        results = sum(r.leaf.dtype.itemsize * math.prod(r.shard_shape) for r in self.results)
        return math.ceil(share * (WORKING_BYTES * math.prod(leaf.shape) / ways + results))


def abstract_leaf(leaf: Leaf) -> hax.NamedArray:
    """A leaf as an abstract named array."""
    array: Any = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return hax.NamedArray(array, haliax_axes(leaf))


def derive_program(name: str, reshard: Reshard, derived: LoadTransform, placement: Placement) -> Program:
    """The Program that transforms a leaf that arrives at once: its slabs in, the results by path out."""

    def run(slab: hax.NamedArray) -> Mapping[str, hax.NamedArray]:
        return _derive_results(derived, reshard_slabs(reshard, (0, 0), slab))

    # The slabs arrive as hosts read them; resharding and transformation are one Program.
    slabs = Input(name=reshard.leaf.path, value=reshard.slab_value((0, 0)), placement=reshard.read_mapping)
    return Program(name=name, function=run, inputs=(slabs,), out_placement=placement)


def begin_derived_program(name: str, results: Sequence[LeafPlan], placement: Placement) -> Program:
    """The Program that allocates results that arrive in pieces."""

    def run() -> Mapping[str, hax.NamedArray]:
        return {plan.leaf.path: hax.zeros(haliax_axes(plan.leaf), dtype=plan.leaf.dtype) for plan in results}

    return Program(name=name, function=run, inputs=(), out_placement=placement)


def derive_piece_program(
    name: str, reshard: Reshard, derived: LoadTransform, piece: Span, placement: Placement
) -> Program:
    """The Program that transforms one piece and writes its part of the results, in place.

    Its inputs: the results so far, the piece's slabs, and where the piece begins.
    """
    assert reshard.cut is not None
    along = reshard.leaf.names[reshard.cut]

    def run(
        so_far: Mapping[str, hax.NamedArray], slab: hax.NamedArray, start: jax.Array
    ) -> Mapping[str, hax.NamedArray]:
        updated: dict[str, hax.NamedArray] = {}
        # The Program is compiled for the length of a piece; where it begins is an argument, so pieces share it.
        for path, part in _derive_results(derived, reshard_slabs(reshard, piece, slab)).items():
            # The piece is sharded as the leaf is, so its results are already where their elements of the whole belong.
            whole = so_far[path]
            axis = [a.name for a in whole.axes].index(along)
            updated[path] = hax.NamedArray(reshard.put(whole.array, part.array, axis, start), whole.axes)
        return updated

    return Program(
        name=name,
        function=run,
        inputs=(
            Input(
                name="results", value={r.leaf.path: abstract_leaf(r.leaf) for r in derived.results}, placement=placement
            ),
            Input(name="slab", value=reshard.slab_value(piece), placement=reshard.read_mapping),
            Input(name="start", value=jax.ShapeDtypeStruct((), np.int32), placement=AxisMapping()),
        ),
        out_placement=placement,
        # Donated, so that results are updated in place and exist once on a device.
        donate=("results",),
    )


def _derive_results(derived: LoadTransform, x: hax.NamedArray) -> dict[str, hax.NamedArray]:
    """The function's results by path, in the order of the plan, each with the axes of its leaf."""
    arrays = derived.rule.derive(x)
    # The function may return axes in another order, which is corrected, but not another dtype.
    for result in derived.results:
        array = arrays[result.leaf.path]
        assert array.dtype == result.leaf.dtype, f"{result.leaf.path}: {array.dtype} for {result.leaf}"
    return {r.leaf.path: arrays[r.leaf.path].rearrange(r.leaf.names) for r in derived.results}
