"""Turns arrays on devices into tensors of a checkpoint, one at a time: the inverse of `loading`, by the same rules.

`gather_tensors` assembles each source tensor that a table of `WeightRules` names from the shards that hold it. Only one
tensor is in host memory at a time, on the process that writes. It is copied from the devices piece by piece
(`device_to_host`), which bounds their memory. `saving_programs` lists the Programs that do so, for the plan.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np
from numpy.typing import ArrayLike

from haliax_ext.abstract import Leaf
from haliax_ext.device_to_host import contribute, gather_to_host, plan_host_gather, sharded_axes
from haliax_ext.leaf_layout import to_slices
from haliax_ext.planner import ShardingPlan
from haliax_ext.program import Jit, Program
from haliax_ext.reshard import TRANSIENT_LIMIT
from haliax_ext.rules import SourcePiece, WeightRules


class Readable(Protocol):
    """An array that can be read by slices: NumPy's, or one in a file."""

    def __getitem__(self, index: tuple[slice, ...], /) -> ArrayLike:
        """The elements of a slice."""
        ...


@dataclass(frozen=True, kw_only=True)
class OutTensor:
    """A tensor to write.

    Attributes:
        name: as the rules call it.
        shape: its shape.
        dtype: as it is written.
        pieces: the parts of leaves it is made of.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[SourcePiece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor as it is written."""
        return math.prod(self.shape) * self.dtype.itemsize


def plan_saving(
    leaves: Iterable[Leaf],
    rules: WeightRules,
    *,
    dtype: np.dtype | None = None,
    true_sizes: Mapping[str, int] | None = None,
) -> tuple[OutTensor, ...]:
    """The tensors that a model is written as; reads no array.

    Args:
        leaves: the model's.
        rules: the table.
        dtype: of the floating tensors; None keeps each leaf's own.
        true_sizes: of axes that are padded in the leaves.

    Raises:
        WeightRuleError: the table does not fit the model.
    """
    leaves = tuple(leaves)
    dtypes = {leaf.path: leaf.dtype for leaf in leaves}
    tensors: list[OutTensor] = []
    for name, (shape, pieces) in rules.sources(leaves, true_sizes=true_sizes).items():
        # The pieces of a fused tensor have one dtype; anything else is a wrong table of rules.
        (stored,) = {dtypes[piece.target] for piece in pieces}
        # Integers and booleans keep their dtype: `dtype` is for weights.
        floating = stored.kind not in "iub"
        tensors.append(
            OutTensor(name=name, shape=shape, dtype=np.dtype(dtype) if dtype and floating else stored, pieces=pieces)
        )
    return tuple(tensors)


def gather_tensors(
    plan: Iterable[OutTensor],
    arrays: Mapping[str, jax.Array | Readable],
    *,
    jit: Jit = Program.jit,
    limit: int = TRANSIENT_LIMIT,
) -> Iterator[tuple[OutTensor, np.ndarray]]:
    """Each tensor with its elements. Every process must iterate over all of them, or over `contribute_tensors`.

    Args:
        plan: from `plan_saving`.
        arrays: by leaf path; on devices, in memory, or in files that are read slice by slice.
        jit: makes the Programs callable that copy pieces from devices.
        limit: bytes on a device that a piece may take, beside the arrays.
    """
    for tensor in plan:
        # Rows of a fused tensor that no leaf has stay 0.
        whole = np.zeros(tensor.shape, tensor.dtype)
        for piece in tensor.pieces:
            array = arrays[piece.target]
            if isinstance(array, jax.Array):
                for box, values in gather_to_host(array, piece.box, jit=jit, limit=limit):
                    piece.write(values, whole, box)
            else:
                piece.write(np.asarray(array[to_slices(piece.box)]), whole)
        yield tensor, whole


def contribute_tensors(
    plan: Iterable[OutTensor],
    arrays: Mapping[str, jax.Array | Readable],
    *,
    jit: Jit = Program.jit,
    limit: int = TRANSIENT_LIMIT,
) -> Iterator[OutTensor]:
    """Takes part in the collectives of `gather_tensors` on a process that writes nothing.

    Args:
        plan, arrays, jit, limit: as `gather_tensors` takes them.
    """
    for tensor in plan:
        for piece in tensor.pieces:
            array = arrays[piece.target]
            if isinstance(array, jax.Array):
                contribute(array, piece.box, jit=jit, limit=limit)
        yield tensor


def saving_programs(
    plan: Iterable[OutTensor], sharding: ShardingPlan, *, hosts: int, limit: int = TRANSIENT_LIMIT
) -> tuple[Program, ...]:
    """The Programs that `gather_tensors` runs for arrays sharded as planned: one for each shape, sharding and piece.

    Args:
        plan: from `plan_saving`.
        sharding: the leaves' shardings.
        hosts: how many processes hold them.
        limit: bytes on a device that a piece may take, beside the arrays.
    """
    sizes = tuple(sharding.mesh.axes)
    programs: dict[str, Program] = {}
    for tensor in plan:
        for piece in tensor.pieces:
            leaf = sharding.by_path[piece.target].leaf
            cuts = sharded_axes(sharding.spec(leaf.path), len(leaf.axes))
            ways = sharding.mesh.ways(tuple(axis for axes in cuts for axis in axes))
            gather, _, _ = plan_host_gather(
                piece.box,
                shape=leaf.shape,
                dtype=leaf.dtype,
                cuts=cuts,
                sizes=sizes,
                # The same condition as `gather_to_host` applies to the arrays themselves: another one would compile
                # other Programs.
                gathered=hosts > 1 and ways > 1,
                limit=limit,
            )
            programs |= {program.name: program for program in gather.programs}
    return tuple(programs.values())
