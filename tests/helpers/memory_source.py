"""A `TensorSource` over NumPy arrays in memory that counts what is read from it."""

import itertools
import threading
from collections.abc import Mapping

import numpy as np

from haliax_ext.leaf_layout import runs
from haliax_ext.sources import ByteRange, Index, TensorInfo


class MemorySource:
    """Named arrays that behave like one file, tensor after tensor; counts the bytes of every read."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.arrays = dict(arrays)
        self.bytes_read = 0
        self.reads: list[tuple[str, Index]] = []
        self._lock = threading.Lock()
        self._offsets, at = {}, 0
        for name, array in self.arrays.items():
            self._offsets[name] = at
            at += array.nbytes

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(name=name, shape=a.shape, dtype=a.dtype, nbytes=a.nbytes)
            for name, a in self.arrays.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())

    def byte_ranges(self, name: str, index: Index) -> list[ByteRange]:
        array = self.arrays[name]
        starts, length = runs(tuple((s.start, s.stop) for s in index), array.shape)
        size, base = array.itemsize, self._offsets[name]
        return [ByteRange("memory", base + s * size, base + (s + length) * size) for s in starts.tolist()]

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        assert len(index) == self.arrays[name].ndim
        assert all(
            s.step is None and 0 <= s.start <= s.stop <= n for s, n in zip(index, self.arrays[name].shape, strict=True)
        )
        piece = self.arrays[name][index]
        with self._lock:
            self.bytes_read += piece.nbytes
            self.reads.append((name, index))
        if out is None:
            return piece.copy()
        assert out.shape == piece.shape and out.dtype == piece.dtype
        out[...] = piece
        return out


class Far:
    """What a source on another machine says of itself."""

    reads_at_once, read_bytes, hedge_bytes = 8, 4 << 20, 0

    def interrupt(self) -> None: ...

    def resume(self) -> None: ...

    def settle(self) -> None: ...

    def __str__(self) -> str:
        return "far away"


class FarSource(MemorySource):
    """The same as if it were on another machine; `requests` are the byte ranges that were asked for."""

    remote = Far()

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        super().__init__(arrays)
        self.requests: list[tuple[int, int]] = []

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        with self._lock:
            self.requests += [(each.start, each.stop) for each in self.byte_ranges(name, index)]
        return super().read(name, index, out)

    def read_adjacent(self, slices) -> None:
        ranges = [each for name, index, _ in slices for each in self.byte_ranges(name, index)]
        assert len(ranges) == len(slices) and all(a.stop == b.start for a, b in itertools.pairwise(ranges)), ranges
        with self._lock:
            self.requests.append((ranges[0].start, ranges[-1].stop))
        for name, index, out in slices:
            super().read(name, index, out)
