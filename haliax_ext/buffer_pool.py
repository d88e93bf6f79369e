"""Buffers of reading threads: what was read and does not lie in its block as it lies in the file.

A buffer of one read is small enough to stay in a core's cache. Threads that wait for a network are many more than
cores: those share a few buffers, so that memory is bounded by the buffers and not by the threads.
"""

import math
import queue
import threading
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np

ALIGNMENT = 64
"""Bytes to which XLA's CPU devices want memory to be aligned that they adopt instead of copying."""
SMALL = 16
"""A read of so small a part of a buffer has memory of its thread, and waits for no buffer."""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialized memory that begins at a multiple of 64 bytes."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The same, filled with zeros; the system gives them when they are first looked at."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


def aligned(nbytes: int) -> int:
    """The next multiple of 64."""
    return nbytes + -nbytes % ALIGNMENT


class Scratch:
    """Some number of buffers, made when they are first wanted.

    Args:
        nbytes: of each.
        count: of them; a thread more waits for one of the others.
    """

    def __init__(self, nbytes: int, count: int):
        self.nbytes, self.count = nbytes, count
        self._free: queue.LifoQueue[np.ndarray | None] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(None)
        self._local = threading.local()

    @contextmanager
    def taken(self, dtype: np.dtype, shape: tuple[int, ...]) -> Generator[np.ndarray]:
        """A buffer as an uninitialized array, for as long as the context is open."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes <= self.nbytes // SMALL:
            yield self._own(nbytes).view(dtype).reshape(shape)
            return
        held = self._free.get()
        try:
            if held is None or held.nbytes < nbytes:
                held = aligned_empty((max(nbytes, self.nbytes),), np.dtype(np.uint8))
            yield held[:nbytes].view(dtype).reshape(shape)
        finally:
            self._free.put(held)

    def _own(self, nbytes: int) -> np.ndarray:
        held = getattr(self._local, "buffer", None)
        if held is None:
            held = self._local.buffer = aligned_empty((self.nbytes // SMALL,), np.dtype(np.uint8))
        return held[:nbytes]
