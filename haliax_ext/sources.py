"""`TensorSource`: named tensors that can be read by slices, wherever they live.

A source is what a loader reads from: safetensors files, a GGUF file, another checkpoint format. It answers from
metadata alone what it holds and which bytes a slice costs; only `read` touches tensor data. Sources are thread-safe.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

Index = tuple[slice, ...]


@dataclass(frozen=True)
class TensorInfo:
    """The metadata of a tensor, known without reading it.

    Attributes:
        name: its name in the source.
        shape: its shape.
        dtype: the dtype that `read` returns (`ml_dtypes` types included).
        nbytes: bytes it occupies in storage (less than `size * itemsize` for quantized tensors).
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    nbytes: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ByteRange:
    """Bytes `[start, stop)` of a file of the source."""

    file: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The length of the range."""
        return self.stop - self.start


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors readable by slices.

    Slices given to `byte_ranges` and `read` are normalized: one per axis, `start` and `stop` set and inside the
    shape, step 1.
    """

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, in deterministic order."""
        ...

    def byte_ranges(self, name: str, index: Index) -> Sequence[ByteRange]:
        """The storage bytes that reading `index` of `name` touches, sorted and coalesced."""
        ...

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        """The slice as a NumPy array of the tensor's dtype, written into `out` (same shape and dtype) if given."""
        ...


@runtime_checkable
class AdjacentSource(Protocol):
    """A source that reads slices whose bytes follow one another in a file as one range."""

    def read_adjacent(self, slices: Sequence[tuple[str, Index, np.ndarray]]) -> None:
        """Fills arrays with slices of tensors; each is one range of bytes, and begins where the one before it ends.

        Args:
            slices: name, index, and the contiguous array (same shape and dtype) to fill.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class RemoteReads:
    """The sizes of reads from a source on another machine.

    Attributes:
        reads_at_once: reads that wait for the network side by side.
        read_bytes: bytes of one read, at most.
        hedge_bytes: memory that reading takes beyond what it is given, at most.
    """

    reads_at_once: int
    read_bytes: int
    hedge_bytes: int


class RemoteAccess(Protocol):
    """The interface of a source on another machine to a loader."""

    @property
    def reads_at_once(self) -> int:
        """Reads that wait for the network side by side."""
        ...

    @property
    def read_bytes(self) -> int:
        """Bytes of one read."""
        ...

    @property
    def hedge_bytes(self) -> int:
        """Memory that reading takes beyond what it is given, at most."""
        ...

    def interrupt(self) -> None:
        """Fails every read that is under way or comes later, until `resume`; called from another thread."""
        ...

    def resume(self) -> None:
        """Allows reads again after an `interrupt`."""
        ...

    def settle(self) -> None:
        """Checks, once everything was read, that the checkpoint has not changed meanwhile."""
        ...

    def __str__(self) -> str: ...


@runtime_checkable
class RemoteSource(Protocol):
    """A source that may be on another machine."""

    @property
    def remote(self) -> RemoteAccess | None:
        """How it is reached; None where it is here."""
        ...


def remote_access(source: TensorSource) -> RemoteAccess | None:
    """How a source is reached over a network; None for one that is here."""
    return source.remote if isinstance(source, RemoteSource) else None
