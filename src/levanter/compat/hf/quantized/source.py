"""`DequantizingSource`: tensors that are computed from what a checkpoint stores, a slice from slices.

A `QuantizedTensor` is computed from `StoredPart`s. An element of a part belongs to a block of elements of the tensor:
to one element (an FP8 value), to two in a row (a byte with two 4-bit values), to 128 x 128 (a scale). So a slice
`[start, stop)` of an axis needs the elements `[floor(start / block), ceil(stop / block))` of each part, and these bytes
alone are read. A format supplies the block sizes and a decode function; the slicing is here.

Scales are read once: consecutive reads of a tensor end inside blocks, and both sides of such a border need the same
scale. A part of at most `CACHED_BYTES` that a format declares `cached` is read whole by the first slice that needs it.
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np

from haliax_ext.sources import ByteRange, Index, TensorInfo
from levanter.compat.hf.errors import CheckpointError, raise_if
from levanter.compat.hf.header import ShardHeader, TensorEntry
from levanter.compat.hf.readers import RemoteFiles
from levanter.compat.hf.safetensors import SafetensorsSource

FIELD = "quantization_config"
"""The key of config.json that describes the stored format."""
DECODED_ELEMENTS = 1 << 18
"""Elements decoded at a time: their float32 temporaries (1 MiB) stay in a core's cache."""
CACHED_BYTES = 256 << 10
"""Size of the largest part that is read whole and cached: reading it costs about as much as seeking in it."""
CACHED_PARTS = 64
"""The number of components that are cached at a time, so that the cache has at most 16 MiB."""

Decode = Callable[[Sequence[np.ndarray], Index, np.ndarray], None]
"""Computes a slice: `decode(components, index, out)`.

`index` is the slice of the whole tensor. `components` has for each one the elements whose blocks the slice touches, so
that the first of an axis is number `index[axis].start // block[axis]`. `out` is filled; of a tensor that is decoded
`in_place`, it is `components[0]`.
"""


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """A tensor in the files that a quantized tensor is computed from.

    Attributes:
        name: its name in the files.
        shape: the shape that it must have there.
        dtypes: the dtypes that it may have there.
        block: for each axis of the quantized tensor, how many of its elements share one element of the part.
        view: the dtype as which the stored bytes are read; None for that of the file. The array then has an element for
            each block of the tensor, whatever the axes of the file: 16 bytes of `[rows, blocks, 16]` along the last two
            axes may be one axis.
        cached: whether several slices need the same elements, as of scales. Such a part is read once, if it is small.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[np.dtype, ...]
    block: tuple[int, ...]
    view: np.dtype | None = None
    cached: bool = False

    def index(self, index: Index) -> Index:
        """The elements of the part whose blocks a slice of the quantized tensor touches."""
        # Rounded outwards: the first and the last block may reach beyond the slice.
        return tuple(
            slice(piece.start // block, -(-piece.stop // block)) for piece, block in zip(index, self.block, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """A tensor that is computed from stored ones.

    Attributes:
        name: the name that the loader asks for.
        shape: its shape.
        dtype: the dtype that it is decoded to.
        components: what it is computed from.
        decode: computes a slice of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    components: tuple[StoredPart, ...]
    decode: Decode

    @cached_property
    def in_place(self) -> bool:
        """Whether its only part has its dtype and shape: the part is read into the result, and decoded there."""
        first, *others = self.components
        dtype = first.dtypes[0] if first.view is None else first.view
        return not others and dtype == self.dtype and all(size == 1 for size in first.block)


def block_counts(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """The number of blocks along each axis; the last one may be incomplete.

    >>> block_counts((576, 7168), (128, 128))
    (5, 56)
    """
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))


def spread_blocks(values: np.ndarray, block: Sequence[int], index: Index) -> np.ndarray:
    """Repeats one value per block (a scale) for each element of a slice.

    >>> spread_blocks(np.asarray([5, 6]), (4,), (slice(2, 7),)).tolist()
    [5, 5, 6, 6, 6]

    Args:
        values: those of the blocks that the slice touches.
        block: elements of a block along each axis.
        index: the slice of the whole tensor.

    Returns:
        An array that broadcasts to the slice.
    """
    for axis, (length, piece) in enumerate(zip(block, index, strict=True)):
        # A slice inside one block needs no copies: NumPy broadcasts the single value.
        if length > 1 and values.shape[axis] > 1:
            # The slice may begin inside its first block, so positions are counted from the beginning of the tensor.
            numbers = np.arange(piece.start, piece.stop) // length - piece.start // length
            values = np.take(values, numbers, axis=axis)
    return values


@dataclass(eq=False)
class _CachedPart:
    """A part that is read whole by the first thread that needs it; the others wait."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    values: np.ndarray | None = None


class DequantizingSource:
    """The tensors of a checkpoint, the quantized ones decoded: a `TensorSource` and an `AdjacentSource`."""

    def __init__(self, source: SafetensorsSource, quantized: Iterable[QuantizedTensor], *, hidden: Iterable[str] = ()):
        """Checks that the files have the components, and hides these.

        Args:
            source: the files.
            quantized: the tensors to compute; other tensors are read as they are stored.
            hidden: stored tensors besides the components that are not offered.

        Raises:
            CheckpointError: a part is missing or has another shape or dtype; lists all of them.
        """
        self._quantized = {tensor.name: tensor for tensor in quantized}
        components = {part.name: (tensor, part) for tensor in self._quantized.values() for part in tensor.components}
        # A part is viewed by the blocks of its tensor, so no other tensor may have it.
        assert len(components) == sum(len(tensor.components) for tensor in self._quantized.values())
        stored = source.tensors
        # Before anything is read, and all at once: a checkpoint of hundreds of files fails in seconds.
        problems = [
            problem
            for tensor in self._quantized.values()
            for problem in _part_problems(tensor, stored, components.keys())
        ]
        raise_if(CheckpointError, ", ".join(source.readers), problems)
        # The same bytes of the files under other dtypes and shapes: a slice of int8 values of an int32 array, say.
        self._stored = SafetensorsSource(source.readers, [_viewed(header, components) for header in source.headers])
        dropped = {*hidden, *components}
        tensors: dict[str, TensorInfo] = {}
        for name, info in stored.items():
            # A quantized tensor takes the position of its first part.
            if name in components and components[name][0].components[0].name == name:
                tensor = components[name][0]
                nbytes = sum(stored[part.name].nbytes for part in tensor.components)
                tensors[tensor.name] = TensorInfo(tensor.name, tensor.shape, tensor.dtype, nbytes)
            elif name not in dropped:
                tensors[name] = info
        self._tensors = MappingProxyType(tensors)
        self._cache: dict[str, _CachedPart] = {}
        self._lock = threading.Lock()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, by file and position in the file; `nbytes` of a quantized one counts all its components."""
        return self._tensors

    @property
    def quantized(self) -> frozenset[str]:
        """Names of the tensors that are computed."""
        return frozenset(self._quantized)

    @property
    def bytes_read(self) -> int:
        """Bytes read from the files so far, gaps included."""
        return self._stored.bytes_read

    @property
    def remote(self) -> RemoteFiles | None:
        """The files, where they are on another machine; None where they are here."""
        return self._stored.remote

    def byte_ranges(self, name: str, index: Index) -> Sequence[ByteRange]:
        """The stored bytes that a slice needs; reading it skips those of components that are cached."""
        tensor = self._quantized.get(name)
        if tensor is None:
            return self._stored.byte_ranges(name, index)
        # For an empty slice nothing is read, not even a cached part: rounding outwards would add a block.
        if 0 in _shape(index):
            return ()
        ranges = [self._stored.byte_ranges(part.name, self._part_index(part, index)) for part in tensor.components]
        return ranges[0] if len(ranges) == 1 else _coalesced(itertools.chain.from_iterable(ranges))

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        """The slice in the tensor's dtype, decoded, written into `out` (same shape and dtype) if given."""
        tensor = self._quantized.get(name)
        if tensor is None:
            return self._stored.read(name, index, out)
        if tensor.in_place:
            # No buffer besides the result: int8 weights go from the file straight into the memory of their shard.
            out = self._stored.read(tensor.components[0].name, index, out)
            tensor.decode([out], index, out)
            return out
        shape = _shape(index)
        if out is None:
            out = np.empty(shape, tensor.dtype)
        assert out.shape == shape and out.dtype == tensor.dtype, (out.shape, shape, out.dtype, tensor.dtype)
        if out.size:
            _decode(tensor, [self._read(part, index) for part in tensor.components], index, out)
        return out

    def read_adjacent(self, slices: Sequence[tuple[str, Index, np.ndarray]]) -> None:
        """Fills arrays with slices that follow one another in a file, by one request where it is on another machine."""
        adjacent: list[tuple[str, Index, np.ndarray]] = []
        decoded: list[tuple[QuantizedTensor, Index, np.ndarray]] = []
        for name, index, out in slices:
            tensor = self._quantized.get(name)
            if tensor is None:
                adjacent.append((name, index, out))
            elif tensor.in_place:
                adjacent.append((tensor.components[0].name, index, out))
                decoded.append((tensor, index, out))
            else:
                # Values and scales that touch in the file are one range and still several arrays: they end the run.
                self._read_run(adjacent)
                adjacent = []
                self.read(name, index, out)
        self._read_run(adjacent)
        for tensor, index, out in decoded:
            tensor.decode([out], index, out)

    def _read_run(self, slices: Sequence[tuple[str, Index, np.ndarray]]) -> None:
        if slices:
            self._stored.read_adjacent(slices)

    def _read(self, part: StoredPart, index: Index) -> np.ndarray:
        """The elements of a part that a slice of its tensor needs."""
        if not self._is_cached(part):
            return self._stored.read(part.name, part.index(index))
        # This lock guards only the dictionary. The read below holds the lock of its part, so that other components
        # are read at the same time.
        with self._lock:
            # Popped and inserted again: the dictionary is in the order of last use, and its first entry is evicted.
            entry = self._cache.pop(part.name, None) or _CachedPart()
            self._cache[part.name] = entry
            if len(self._cache) > CACHED_PARTS:
                del self._cache[next(iter(self._cache))]
        # The first thread reads the part; the others wait here and then find its values. An entry that is evicted
        # meanwhile stays valid for the threads that hold it.
        with entry.lock:
            if entry.values is None:
                entry.values = self._stored.read(part.name, self._part_index(part, index))
        return entry.values[part.index(index)]

    def _is_cached(self, part: StoredPart) -> bool:
        return part.cached and self._stored.tensors[part.name].nbytes <= CACHED_BYTES

    def _part_index(self, part: StoredPart, index: Index) -> Index:
        """The elements of a part that are read for a slice."""
        if not self._is_cached(part):
            return part.index(index)
        # Whole. Its view and not its shape in the file counts: `read` takes slices of the view.
        return tuple(slice(0, size) for size in self._stored.tensors[part.name].shape)


def _shape(index: Index) -> tuple[int, ...]:
    return tuple(piece.stop - piece.start for piece in index)


def _decode(tensor: QuantizedTensor, components: Sequence[np.ndarray], index: Index, out: np.ndarray) -> None:
    """Decodes a slice, some elements at a time."""
    for piece in _pieces(index):
        local = _relative(piece, index)
        # A piece may begin inside a block that the previous one began: both get the element of that block.
        slices = [
            values[_relative(part.index(piece), part.index(index))]
            for part, values in zip(tensor.components, components, strict=True)
        ]
        tensor.decode(slices, piece, out[local])


def _pieces(index: Index) -> Iterator[Index]:
    """Cuts a slice into slices of about `DECODED_ELEMENTS`, in row-major order."""
    shape = _shape(index)
    axes: list[list[slice]] = []
    for axis, piece in enumerate(index):
        # As many indices of this axis as fit; inner axes stay whole unless a single index is too large already.
        step = max(DECODED_ELEMENTS // max(math.prod(shape[axis + 1 :]), 1), 1)
        axes.append([slice(at, min(at + step, piece.stop)) for at in range(piece.start, piece.stop, step)])
    return itertools.product(*axes)


def _relative(inner: Index, outer: Index) -> Index:
    """A slice of a tensor as a slice of a slice of it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inner, outer, strict=True))


def _coalesced(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """Ranges in the order of the files, those that touch as one."""
    merged: list[ByteRange] = []
    for item in sorted(ranges, key=lambda item: (item.file, item.start)):
        if merged and merged[-1].file == item.file and merged[-1].stop >= item.start:
            merged[-1] = ByteRange(item.file, merged[-1].start, max(merged[-1].stop, item.stop))
        else:
            merged.append(item)
    return merged


def _viewed(header: ShardHeader, components: Mapping[str, tuple[QuantizedTensor, StoredPart]]) -> ShardHeader:
    """A file's header with the shapes and dtypes that components are read in."""
    entries: list[TensorEntry] = []
    for entry in header.tensors:
        if entry.name in components:
            tensor, part = components[entry.name]
            dtype, shape = part.view or entry.dtype, block_counts(tensor.shape, part.block)
            # A view must have exactly the stored bytes.
            assert math.prod(shape) * dtype.itemsize == entry.stop - entry.start, (entry, shape, dtype)
            entry = TensorEntry(entry.name, dtype, shape, entry.start, entry.stop)
        entries.append(entry)
    return ShardHeader(header.file, tuple(entries), header.metadata)


def _part_problems(
    tensor: QuantizedTensor, stored: Mapping[str, TensorInfo], components: Iterable[str]
) -> Iterator[str]:
    """Deviations of the files from the components that a tensor is computed from."""
    if tensor.name in stored and tensor.name not in components:
        names = ", ".join(repr(part.name) for part in tensor.components)
        yield f"tensor {tensor.name!r} is stored, and so is {names}, which it is computed from"
    for part in tensor.components:
        info = stored.get(part.name)
        if info is None:
            dtypes = " or ".join(dtype.name for dtype in part.dtypes)
            yield (
                f"tensor {part.name!r} is missing: {tensor.name!r} {list(tensor.shape)} is computed from it, expected "
                f"{dtypes}{list(part.shape)}"
            )
            continue
        if info.dtype not in part.dtypes:
            dtypes = " or ".join(dtype.name for dtype in part.dtypes)
            yield f"tensor {part.name!r} has dtype {info.dtype.name}, expected {dtypes}"
        if info.shape != part.shape:
            blocks = " x ".join(map(str, part.block))
            yield (
                f"tensor {part.name!r} has shape {list(info.shape)}, expected {list(part.shape)}: {tensor.name!r} "
                f"{list(tensor.shape)} in blocks of {blocks}"
            )
