"""Reads spans of chunked arrays through an LRU cache of chunks.

A shuffled batch is thousands of short spans from all over the store. A read of each span costs more than its bytes do;
so whole chunks are read once and cached in one array of slots, from which NumPy gathers all spans of a batch at once.
The least recently used slot is evicted first.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

LEAST_SLOTS = 16
LONG_SPAN = 512
"""Mean span length from which copying spans one by one is faster than gathering their values by index."""


def span_indices(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: the indices of all elements of the spans, span after span."""
    counts = np.asarray(counts, np.int64)
    ends = np.cumsum(counts)
    # One `arange` over all spans, shifted within each span from its place in the output to its place in the array.
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(np.asarray(begins, np.int64) - (ends - counts), counts)


class Chunks:
    """Arrays end to end, read by spans. Several threads may share one; a lock serializes them.

    Args:
        arrays: TensorStore arrays with one axis, of the same dtype and chunk size.
        dtype: the dtype of the arrays.
        cache_bytes: the size of the cache of decoded chunks.
        damaged: makes the error for a part of an array that cannot be read, from (array, start, stop, reason).
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        *,
        dtype: np.dtype | type,
        cache_bytes: int,
        damaged: Callable[[int, int, int, Exception], Exception],
    ):
        self._arrays, self._dtype, self._damaged = tuple(arrays), np.dtype(dtype), damaged
        sizes = np.array([array.shape[0] for array in arrays], np.int64)
        self._chunk = int(max((array.chunk_layout.read_chunk.shape[0] for array in arrays), default=1))
        chunks = -(-sizes // self._chunk)
        # Positions count through all arrays, from `_starts[i]` on in array i, and so do chunk numbers. A chunk never
        # spans two arrays.
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._first_chunks = np.concatenate([[0], np.cumsum(chunks)])
        # At least `LEAST_SLOTS`, whatever the cache size: one call needs several chunks at once.
        self._slots = max(min(cache_bytes // (self._chunk * self._dtype.itemsize), int(chunks.sum())), LEAST_SLOTS)
        self._lock, self._clock = threading.Lock(), 0

    @cached_property
    def _chunk_slots(self) -> np.ndarray:
        """int32: the slot of each chunk, −1 for none."""
        return np.full(self._first_chunks[-1], -1, np.int32)

    @cached_property
    def _slot_chunks(self) -> np.ndarray:
        """int64: the chunk in each slot, −1 for none."""
        return np.full(self._slots, -1, np.int64)

    @cached_property
    def _used(self) -> np.ndarray:
        """int64: when each slot was used last."""
        return np.zeros(self._slots, np.int64)

    @cached_property
    def _values(self) -> np.ndarray:
        """`[slots × chunk]`; the system allocates memory only for the parts that are written."""
        return np.empty(self._slots * self._chunk, self._dtype)

    def read(self, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Reads spans, given by first element and length, and returns their values end to end."""
        begins, counts = np.asarray(begins, np.int64), np.asarray(counts, np.int64)
        # Empty spans would have no piece, and their begin may lie behind the last element.
        begins, counts = begins[counts > 0], counts[counts > 0]
        assert not len(begins) or (begins.min() >= 0 and (begins + counts).max() <= self._starts[-1])
        values = np.empty(int(counts.sum()), self._dtype)
        chunks, begins, counts = self._pieces(begins, counts)
        with self._lock:
            # All pieces at once, where there is room for their chunks.
            step = len(chunks) if len(np.unique(chunks)) <= self._slots else self._slots
            at = 0
            # Otherwise at most `_slots` pieces at a time, which need at most as many chunks.
            for start in range(0, len(chunks), max(step, 1)):
                part = slice(start, start + step)
                size = int(counts[part].sum())
                self._copy(self._chunk_starts(chunks[part]) + begins[part], counts[part], values[at : at + size])
                at += size
        return values

    def _copy(self, begins: np.ndarray, counts: np.ndarray, out: np.ndarray) -> None:
        """Copies spans of the slots: short ones all at once, long ones one by one."""
        if len(out) < LONG_SPAN * len(counts):
            # `clip` only avoids the buffered copy that NumPy makes with `raise`; all indices are in range.
            np.take(self._values, span_indices(begins, counts), out=out, mode="clip")
            return
        at = 0
        for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
            out[at : at + count] = self._values[begin : begin + count]
            at += count

    def _pieces(self, begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cuts spans at the ends of arrays and chunks; returns each piece's chunk, offset in the chunk, and length."""
        ends = begins + counts
        # First cut at the borders of arrays, then at those of chunks; `span` and `piece` map a piece to what it is cut
        # from.
        first = np.searchsorted(self._starts, begins, side="right") - 1
        number = np.searchsorted(self._starts, ends, side="left") - first
        array, span = span_indices(first, number), np.repeat(np.arange(len(begins)), number)
        starts = np.maximum(begins[span], self._starts[array]) - self._starts[array]
        stops = np.minimum(ends[span], self._starts[array + 1]) - self._starts[array]
        # Empty arrays (shards without a document) give empty pieces.
        array, starts, stops = (x[stops > starts] for x in (array, starts, stops))
        first = starts // self._chunk
        number = (stops - 1) // self._chunk - first + 1
        inside, piece = span_indices(first, number), np.repeat(np.arange(len(starts)), number)
        cut = inside * self._chunk
        starts, stops = np.maximum(starts[piece], cut), np.minimum(stops[piece], cut + self._chunk)
        return self._first_chunks[array[piece]] + inside, starts - cut, stops - starts

    def _chunk_starts(self, chunks: np.ndarray) -> np.ndarray:
        """The position in the slots at which each of these chunks begins; reads those that are not cached."""
        self._clock += 1
        unique = np.unique(chunks)
        slots = self._chunk_slots[unique]
        # Chunks of this call get the present time first, so that `_fetch` does not evict them.
        self._used[slots[slots >= 0]] = self._clock
        missing = unique[slots < 0]
        if len(missing):
            self._fetch(missing)
        # The last chunk of an array may be short and leave a part of its slot unfilled; no piece reaches there.
        return self._chunk_slots[chunks].astype(np.int64) * self._chunk

    def _fetch(self, chunks: np.ndarray) -> None:
        # The least recently used slots. All reads are started before the first one is awaited.
        # `argpartition` puts the smallest use times first, in no order among them, which suffices.
        free = np.argpartition(self._used, len(chunks) - 1)[: len(chunks)]
        assert (self._used[free] < self._clock).all(), "more chunks are needed at once than there are slots"
        arrays = np.searchsorted(self._first_chunks, chunks, side="right") - 1
        reads = []
        for chunk, number in zip(chunks.tolist(), arrays.tolist(), strict=True):
            start = (chunk - int(self._first_chunks[number])) * self._chunk
            stop = min(start + self._chunk, self._arrays[number].shape[0])
            reads.append((chunk, number, start, stop, self._arrays[number][start:stop].read()))
        for slot, (chunk, number, start, stop, future) in zip(free.tolist(), reads, strict=True):
            try:
                read = future.result()
            except (ValueError, OSError) as error:
                raise self._damaged(number, start, stop, error) from error
            before = self._slot_chunks[slot]
            # Only a chunk that was read replaces another one: an error above leaves the maps consistent.
            if before >= 0:
                self._chunk_slots[before] = -1
            self._values[slot * self._chunk : slot * self._chunk + len(read)] = read
            self._slot_chunks[slot], self._chunk_slots[chunk], self._used[slot] = chunk, slot, self._clock
