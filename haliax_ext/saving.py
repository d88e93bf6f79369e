"""Arrays on devices → tensors of a checkpoint, one at a time: the inverse of `loading`, by the same rules.

`tensors_of` goes through the source tensors that a table of `WeightRules` names and assembles each from the shards that
hold it. Only one tensor is in host memory at a time. The devices cut it out: where this process holds all shards, each
gives what it has of it; where other processes hold some, every process runs the same small Program that brings one
tensor's part to all. `saving_programs` knows these Programs beforehand.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike

from haliax_ext.abstract import Leaf
from haliax_ext.exchange import Cuts
from haliax_ext.mapping import AxisMapping
from haliax_ext.planner import ShardingPlan
from haliax_ext.program import Input, Jit, Program
from haliax_ext.rules import SourcePiece, WeightRules
from haliax_ext.slices import Box, box_shape, intersect, to_slices

MeshSizes = tuple[tuple[str, int], ...]
"""Mesh axes, major first, with their sizes."""


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
    """The elements of a box of an array, on the host of every process; what lies on devices is cut there."""
    if not isinstance(array, jax.Array):
        return np.asarray(array[to_slices(box)])
    mesh, cuts = _lies(array)
    size, sizes = box_shape(box), tuple((name, n) for name, n in mesh.shape.items())
    brought = not (array.is_fully_addressable or array.is_fully_replicated)
    program = _box_program(array.shape, np.dtype(array.dtype), _without_ones(cuts, sizes), sizes, size, brought=brought)
    starts = jax.make_array_from_callback(
        (len(box),), NamedSharding(mesh, PartitionSpec()), lambda _: np.asarray([start for start, _ in box], np.int32)
    )
    found = jit(program, mesh)(array, starts)
    if brought:
        return np.asarray(found.addressable_data(0))
    shard = array.sharding.shard_shape(array.shape)
    part = tuple(map(min, size, shard))
    out = np.empty(size, array.dtype)
    written: set[Box] = set()
    for each in found.addressable_shards:
        first = tuple((s.start or 0) // n * held for s, n, held in zip(each.index, part, shard, strict=True))
        begin = [
            at + min(max(start - at, 0), held - n)
            for at, (start, _), held, n in zip(first, box, shard, part, strict=True)
        ]
        there = tuple((at, at + n) for at, n in zip(begin, part, strict=True))
        common = intersect(there, box)
        if common is None or common in written:
            continue
        written.add(common)
        inside = tuple((a - at, b - at) for (a, b), at in zip(common, begin, strict=True))
        wanted = tuple((a - start, b - start) for (a, b), (start, _) in zip(common, box, strict=True))
        out[to_slices(wanted)] = np.asarray(each.data)[to_slices(inside)]
    return out


def saving_programs(plan: Iterable[OutTensor], sharding: ShardingPlan, *, hosts: int) -> tuple[Program, ...]:
    """The Programs that `tensors_of` runs for arrays that lie as planned: one for each shape, cut and size of a piece.

    Args:
        plan: from `plan_saving`.
        sharding: where the leaves lie.
        hosts: how many processes hold them.
    """
    sizes = tuple(sharding.mesh.axes)
    found: dict[str, Program] = {}
    for tensor in plan:
        for piece in tensor.pieces:
            leaf = sharding.by_path[piece.target].leaf
            cuts = _without_ones(_cuts(sharding.spec(leaf.path), len(leaf.axes)), sizes)
            program = _box_program(
                leaf.shape, leaf.dtype, cuts, sizes, box_shape(piece.box), brought=hosts > 1 and any(cuts)
            )
            found[program.name] = program
    return tuple(found.values())


def _lies(array: jax.Array) -> tuple[Mesh, Cuts]:
    """The mesh that an array lies on, and how it cuts it; one of a single device is a mesh of that."""
    if isinstance(array.sharding, NamedSharding):
        assert isinstance(array.sharding.mesh, Mesh)
        return array.sharding.mesh, _cuts(array.sharding.spec, array.ndim)
    found = array.devices()
    assert len(found) == 1, f"an array on several devices must have a NamedSharding, not {array.sharding}"
    devices = np.asarray(list(found))
    return Mesh(devices, ("device",)), ((),) * array.ndim


def _cuts(spec: PartitionSpec, rank: int) -> Cuts:
    entries = (*spec, *(None for _ in range(rank - len(spec))))
    return tuple(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries)


def _without_ones(cuts: Cuts, sizes: MeshSizes) -> Cuts:
    """A mesh axis of size 1 cuts nothing."""
    large = {name for name, n in sizes if n > 1}
    return tuple(tuple(axis for axis in axes if axis in large) for axes in cuts)


@functools.lru_cache(maxsize=1024)
def _box_program(
    shape: tuple[int, ...], dtype: np.dtype, cuts: Cuts, sizes: MeshSizes, size: tuple[int, ...], *, brought: bool
) -> Program:
    """The Program that takes a box out of an array: its array, and where the box begins.

    Either the whole box is brought to every device, or each device gives a part of its shard, as large as the box or
    the shard: what of the box it holds is in it, and no device waits for another.

    Args:
        shape: of the array.
        dtype: of the array.
        cuts: the mesh axes that cut it.
        sizes: of the mesh axes.
        size: of the box.
        brought: whether to every device.
    """
    ways = tuple(math.prod(n for name, n in sizes if name in axes) for axes in cuts)
    shard = tuple(n // way for n, way in zip(shape, ways, strict=True))
    part = tuple(map(min, size, shard))
    spec = PartitionSpec(*(axes or None for axes in cuts))

    def gather(array: jax.Array, starts: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(array, starts, size)

    def local(x: jax.Array, starts: jax.Array) -> jax.Array:
        begin: list[jax.Array] = []
        for n, axes in enumerate(cuts):
            first = jax.lax.axis_index(axes) * np.int32(shard[n]) if axes else np.int32(0)
            begin.append(jax.lax.clamp(np.int32(0), starts[n] - first, np.int32(shard[n] - part[n])))
        return jax.lax.dynamic_slice(x, begin, part)

    def cut(array: jax.Array, starts: jax.Array) -> jax.Array:
        return jax.shard_map(local, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)(array, starts)

    lies = AxisMapping({f"_{n}": axes for n, axes in enumerate(cuts) if axes})
    where = "".join(f".{n}-{'-'.join(axes)}" for n, axes in enumerate(cuts) if axes)
    kind = "gather" if brought else "cut"
    return Program(
        name=f"save.{kind}.{'x'.join(map(str, size))}.of.{'x'.join(map(str, shape))}.{dtype.name}{where}",
        function=gather if brought else cut,
        inputs=(
            Input(name="array", value=jax.ShapeDtypeStruct(shape, dtype), placement=lies),
            Input(name="starts", value=jax.ShapeDtypeStruct((len(shape),), np.int32), placement=AxisMapping()),
        ),
        out_placement=AxisMapping() if brought else lies,
    )
