"""A `TensorSource` over NumPy arrays in memory that counts what is read from it."""

import threading
from collections.abc import Mapping

import numpy as np

from haliax_ext.slices import runs
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
