"""Arrays on devices → tensors of a checkpoint, one at a time: the inverse of `loading`, by the same rules.

`tensors_of` goes through the source tensors that a table of `WeightRules` names and assembles each from the shards that
hold it. Only one tensor is in host memory at a time. Where this process holds all shards, they are copied as they
lie; where other processes hold some, every process runs the same small program that brings one tensor's part to all.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import ArrayLike

from haliax_ext.abstract import Leaf
from haliax_ext.mapping import AxisMapping
from haliax_ext.program import Input, Jit, Program
from haliax_ext.rules import SourcePiece, WeightRules
from haliax_ext.slices import Box, box_shape, intersect, to_slices


class Readable(Protocol):
    """An array of which slices can be had: NumPy's, or one that lies in a file."""

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
    """Which tensors a model is written as; reads no array.

    Args:
        leaves: the model's.
        rules: the table.
        dtype: of the floating tensors; None keeps each leaf's own.
        true_sizes: of axes that are padded in the leaves.

    Raises:
        WeightRuleError: the table does not go with the model.
    """
    leaves = tuple(leaves)
    own = {leaf.path: leaf.dtype for leaf in leaves}
    found: list[OutTensor] = []
    for name, (shape, pieces) in rules.sources(leaves, true_sizes=true_sizes).items():
        (held,) = {own[piece.target] for piece in pieces}
        floating = held.kind not in "iub"
        found.append(
            OutTensor(name=name, shape=shape, dtype=np.dtype(dtype) if dtype and floating else held, pieces=pieces)
        )
    return tuple(found)


def tensors_of(
    plan: Iterable[OutTensor], arrays: Mapping[str, jax.Array | Readable], *, jit: Jit = Program.jit
) -> Iterator[tuple[OutTensor, np.ndarray]]:
    """Each tensor with its elements; with several processes, every one of them must go through all.

    Args:
        plan: from `plan_saving`.
        arrays: by leaf path; on devices, in memory, or in files that are read slice by slice.
        jit: makes the programs callable that bring parts to all processes.
    """
    for tensor in plan:
        whole = np.empty(tensor.shape, tensor.dtype)
        for piece in tensor.pieces:
            piece.write(elements(arrays[piece.target], piece.box, jit=jit), whole)
        yield tensor, whole


def elements(array: jax.Array | Readable, box: Box, *, jit: Jit = Program.jit) -> np.ndarray:
    """The elements of a box of a sharded array, on the host of every process."""
    if not isinstance(array, jax.Array):
        return np.asarray(array[to_slices(box)])
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0)[to_slices(box)])
    if not array.is_fully_addressable:
        return _brought_to_all(array, box, jit)
    out = np.empty(box_shape(box), array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id != 0:
            continue
        held = tuple(
            (s.start or 0, n if s.stop is None else s.stop) for s, n in zip(shard.index, array.shape, strict=True)
        )
        common = intersect(held, box)
        if common is not None:
            inside = tuple((a - h, b - h) for (a, b), (h, _) in zip(common, held, strict=True))
            there = tuple((a - w, b - w) for (a, b), (w, _) in zip(common, box, strict=True))
            out[to_slices(there)] = np.asarray(shard.data[to_slices(inside)])
    return out


def _brought_to_all(array: jax.Array, box: Box, jit: Jit) -> np.ndarray:
    assert isinstance(array.sharding, NamedSharding) and isinstance(array.sharding.mesh, Mesh)
    program = _gather_program(array.shape, array.dtype, array.sharding, box_shape(box))
    starts = np.asarray([start for start, _ in box], np.int32)
    return np.asarray(jit(program, array.sharding.mesh)(array, starts).addressable_data(0))


@functools.lru_cache(maxsize=256)
def _gather_program(shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding, size: tuple[int, ...]) -> Program:
    """The Program that brings a box of an array of this sharding to every device."""
    del sharding  # One compiled program for each.

    def gather(array: jax.Array, starts: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(array, starts, size)

    return Program(
        name=f"save.gather.{'x'.join(map(str, size))}",
        function=gather,
        inputs=(
            Input(name="array", value=jax.ShapeDtypeStruct(shape, dtype), placement=None),
            Input(name="starts", value=jax.ShapeDtypeStruct((len(shape),), np.int32), placement=AxisMapping()),
        ),
        out_placement=AxisMapping(),
    )
