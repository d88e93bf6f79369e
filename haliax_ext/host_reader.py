"""Worker threads that read boxes of source tensors into the blocks of this host's devices.

Where a box has the same order in its block as in the file, and the dtypes agree, it is read right into the block;
otherwise into a buffer of a `BufferPool`, and cast and copied from there. A source on another machine needs many
threads, which wait for the network; `Readers` says how many, and which part of the memory budget is theirs.
"""

import itertools
import math
import os
import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np

from haliax_ext.leaf_layout import box_shape, box_size, to_slices
from haliax_ext.load_plan import LeafLoad
from haliax_ext.nonfinite import NotFinite, all_finite, not_finite
from haliax_ext.read_plan import ReadPlan, ReadRequest, Slice, merged_requests, slice_box, slice_bytes
from haliax_ext.sources import AdjacentSource, Index, RemoteAccess, RemoteReads, TensorSource, remote_access

READ_BYTES = 2 << 20
"""Bytes of one read: much more than a request to a local file costs, little enough for a core's cache."""
LEAST_READ_BYTES = 1 << 20
"""Of one read from another machine, where memory is short or little is left to read."""
LAST_READS = 128
"""Towards the end of a source, reads become smaller, so that at least this many remain."""
AHEAD = 32
"""Reads from another machine beyond a block that is larger than the memory budget."""
BUFFERS = 32
"""Reads from another machine that have a buffer, at least, if they must be smaller for it."""
BUFFER_SHARE = 8
"""The memory budget divided by this is for buffers, where a source is on another machine. Blocks cannot use that part:
while the last reads of one block are under way, it keeps the network busy with reads for the next."""
MAX_BUFFER_SHARE = 4
"""The same where memory is so short that there would be fewer buffers than `BUFFERS`."""
ALIGNMENT = 64
"""Bytes to which XLA's CPU devices want memory to be aligned that they adopt instead of copying."""
SMALL = 16
"""A read of at most a buffer's size divided by this uses memory of its thread, and waits for no buffer."""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialized memory that begins at a multiple of 64 bytes.

    >>> aligned_empty((3, 5), np.dtype(np.float32)).ctypes.data % 64
    0
    """
    nbytes = math.prod(shape) * dtype.itemsize
    # NumPy aligns to 16 bytes only: more is allocated, and the array begins at the first aligned byte of it.
    raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory filled with zeros that begins at a multiple of 64 bytes; the system allocates pages on first access."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


def aligned(nbytes: int) -> int:
    """The next multiple of 64.

    >>> aligned(65), aligned(128)
    (128, 128)
    """
    return nbytes + -nbytes % ALIGNMENT


class BufferPool:
    """A fixed number of buffers, each allocated when it is first used.

    A buffer of one read is small enough to stay in a core's cache. Threads that wait for a network are many more than
    cores: those share a few buffers, so that memory is bounded by the buffers and not by the threads.

    Args:
        nbytes: of each buffer.
        count: how many; one more thread waits for one of the others.
    """

    def __init__(self, nbytes: int, count: int):
        self.nbytes, self.count = nbytes, count
        # Last in, first out: the buffer that was used last is the one most likely to be in a cache.
        self._free: queue.LifoQueue[np.ndarray | None] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(None)
        self._local = threading.local()

    @contextmanager
    def borrow(self, dtype: np.dtype, shape: tuple[int, ...]) -> Generator[np.ndarray]:
        """A buffer as an uninitialized array, for as long as the context is open."""
        # Small reads are frequent (norms, biases); waiting for a shared buffer would cost more than the read.
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes <= self.nbytes // SMALL:
            yield self._thread_memory(nbytes).view(dtype).reshape(shape)
            return
        buffer = self._free.get()
        try:
            # A read may be larger than planned for (one row of a very wide tensor); the buffer then stays that large.
            # A buffer is allocated by the first thread that needs it, so unused ones cost nothing.
            if buffer is None or buffer.nbytes < nbytes:
                buffer = aligned_empty((max(nbytes, self.nbytes),), np.dtype(np.uint8))
            yield buffer[:nbytes].view(dtype).reshape(shape)
        finally:
            self._free.put(buffer)

    def _thread_memory(self, nbytes: int) -> np.ndarray:
        buffer = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = aligned_empty((self.nbytes // SMALL,), np.dtype(np.uint8))
        return buffer[:nbytes]


@dataclass(frozen=True, kw_only=True)
class Readers:
    """The number of reading threads, the size of their reads, and the memory they need.

    Attributes:
        threads: that read concurrently.
        read_bytes: of one read.
        buffers: of `read_bytes` each, for what is not read right into a block.
        held_bytes: of the memory budget that blocks may not have.
        ahead_bytes: of blocks that are read into while one that is larger than the budget is under way.
    """

    threads: int
    read_bytes: int
    buffers: int
    held_bytes: int = 0
    ahead_bytes: int = 0

    @classmethod
    def of(
        cls, remote: RemoteAccess | RemoteReads | None, budget: int, *, threads: int | None, read_bytes: int | None
    ) -> "Readers":
        """The readers that fit a source and a memory budget.

        Args:
            remote: how the source is reached; None for one on this machine.
            budget: host memory beyond the arrays.
            threads: a number that overrides what suits the source.
            read_bytes: a size that overrides what suits the source.
        """
        if remote is None:
            # A buffer for each core stays in its cache; they come on top of the budget, which is for blocks.
            cores = threads or min(16, max(2, os.cpu_count() or 2))
            return cls(threads=cores, read_bytes=read_bytes or READ_BYTES, buffers=cores)
        num_threads = threads or remote.reads_at_once
        # Where memory is short, reads become smaller before there are fewer buffers.
        affordable = budget // BUFFER_SHARE // BUFFERS
        size = read_bytes or min(remote.read_bytes, max(affordable, LEAST_READ_BYTES))
        min_buffers = min(BUFFERS, budget // MAX_BUFFER_SHARE // size)
        buffers = max(1, min(num_threads, max(min_buffers, budget // BUFFER_SHARE // size)))
        # Small reads have memory of their threads, second requests for slow ranges have some of their own.
        reserved = buffers * size + num_threads * size // SMALL + remote.hedge_bytes
        return cls(
            threads=num_threads,
            read_bytes=size,
            buffers=buffers,
            held_bytes=min(reserved, budget),
            ahead_bytes=AHEAD * size,
        )


class HostReader:
    """A pool of reading threads.

    Attributes:
        position: the leaf and the index along its stacked axis that were read last.
        not_finite: weights that are not finite, by leaf and source tensor.
    """

    def __init__(self, source: TensorSource, readers: Readers):
        # Storage bytes of a source element are not whole where elements share scales: rounded once, not at each read.
        self._bytes_done = 0.0
        self.position: tuple[str, int | None] = ("", None)
        self.not_finite: dict[tuple[str, str], NotFinite] = {}
        self._source = source
        self._remote = remote_access(source)
        self._read_bytes = readers.read_bytes
        self._pool = ThreadPoolExecutor(max_workers=readers.threads, thread_name_prefix="load")
        self._buffers = BufferPool(readers.read_bytes, readers.buffers)
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    @property
    def bytes_done(self) -> int:
        """Storage bytes read so far."""
        return round(self._bytes_done)

    def __enter__(self) -> "HostReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._remote is not None:
            # After Ctrl-C, or an error of a damaged file, the process must not wait for a slow network.
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._remote.interrupt()
        self._pool.shutdown(wait=kind is None or self._remote is None, cancel_futures=True)

    def requests(self, plans: Sequence[ReadPlan], remaining: int | None = None) -> Iterator[tuple[Slice, ...]]:
        """The reads of plans, in order, each as its slices.

        Args:
            plans: that are read at one time.
            remaining: storage bytes that are still to be requested, these included; towards the end, reads get smaller,
                so that the last of them end together.
        """
        size = self._read_bytes
        if remaining is not None and self._remote is not None:
            size = min(size, max(remaining // LAST_READS, LEAST_READ_BYTES))
        return merged_requests(plans, self._source, read_bytes=size, together=self._remote is not None)

    def start(self, plan: ReadPlan) -> None:
        """Allocates the blocks of a plan; no page of them is used before something is read into it."""
        for block in plan.blocks:
            # What the source lacks of a padded block must be zero.
            allocate = aligned_empty if plan.load.layout.clipped(block.box) == block.box else aligned_zeros
            block.memory = allocate(box_shape(block.box), plan.load.leaf.dtype)

    def submit(self, slices: tuple[Slice, ...]) -> Future[None]:
        """Queues a read into blocks of plans that were started."""
        return self._pool.submit(self._read, slices)

    def wait(self, futures: Sequence[Future[None]], seconds: float) -> bool:
        """Waits for reads, at most so many seconds; returns whether they are complete.

        Raises:
            Exception: the error of a read, of these or of later ones, since these may take long.
        """
        # The timeout lets the caller report progress; the first exception ends the wait early.
        done, pending = wait(futures, timeout=seconds, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        if self._failure is not None:
            raise self._failure
        return not pending

    def _read(self, slices: tuple[Slice, ...]) -> None:
        try:
            self._read_slices(slices)
        except BaseException as error:
            # The first failure is kept: later ones are usually its consequences, such as an interrupted source.
            self._failure = self._failure or error
            raise

    def _read_slices(self, slices: tuple[Slice, ...]) -> None:
        """Reads slices that are adjacent in a file, into their blocks where possible, the others into one buffer."""
        block_views = [_block_view(requests) for requests in slices]
        buffered = [requests for requests, view in zip(slices, block_views, strict=True) if view is None]
        # Every slice begins at an aligned offset of the buffer, where elements of any dtype may begin.
        offsets = list(itertools.accumulate((aligned(slice_bytes(requests)) for requests in buffered), initial=0))
        context = (
            self._buffers.borrow(np.dtype(np.uint8), (offsets[-1],)) if buffered else nullcontext(np.empty(0, np.uint8))
        )
        with context as buffer:
            buffer_views = (
                buffer[at : at + slice_bytes(requests)].view(requests[0].dtype).reshape(box_shape(slice_box(requests)))
                for at, requests in zip(offsets, buffered, strict=False)
            )
            outs = [next(buffer_views) if view is None else view for view in block_views]
            self._fetch(
                [
                    (requests[0].tensor, to_slices(slice_box(requests)), out)
                    for requests, out in zip(slices, outs, strict=True)
                ]
            )
            # Where several leaves share rows, each takes its columns of the slice.
            for requests, out, view in zip(slices, outs, block_views, strict=True):
                box = slice_box(requests)
                for request in requests:
                    values = out if len(requests) == 1 else _columns(request, out, box[-1][0])
                    self._deliver(request, values, in_place=view is not None)

    def _fetch(self, slices: list[tuple[str, Index, np.ndarray]]) -> None:
        if len(slices) > 1 and isinstance(self._source, AdjacentSource):
            self._source.read_adjacent(slices)
            return
        for name, index, out in slices:
            self._source.read(name, index, out)

    def _deliver(self, request: ReadRequest, values: np.ndarray, *, in_place: bool) -> None:
        """Copies what was read into its blocks, and counts it."""
        load = request.plan.load
        if not in_place:
            # Infinities and NaNs among weights are passed on as they are; NumPy would warn about casting them.
            with np.errstate(invalid="ignore", over="ignore"):
                for block, copy in request.copies:
                    assert block.memory is not None
                    copy.scatter(values, block.memory)
        bad = _not_finite(values, load, request.tensor)
        # Threads deliver concurrently; the counters are shared.
        with self._lock:
            if bad is not None:
                key = (load.path, request.tensor)
                before = self.not_finite.get(key)
                self.not_finite[key] = bad if before is None else before + bad
            self._bytes_done += box_size(request.box) * load.bytes_per_element
            self.position = (load.path, request.stack[0] if request.stack else None)


def _columns(request: ReadRequest, values: np.ndarray, start: int) -> np.ndarray:
    """The elements of one request of a slice whose last axis begins at `start`, contiguous."""
    first, stop = request.box[-1]
    return np.ascontiguousarray(values[..., first - start : stop - start])


def _block_view(requests: Slice) -> np.ndarray | None:
    """The memory of a block itself, where a slice has the same order there as in the file; else `None`."""
    if len(requests) != 1:
        return None
    (request,) = requests
    if len(request.copies) != 1 or request.dtype != request.plan.load.leaf.dtype:
        return None
    ((block, copy),) = request.copies
    assert block.memory is not None
    return copy.in_place(block.memory, box_shape(request.box))


def _not_finite(buffer: np.ndarray, load: LeafLoad, name: str) -> NotFinite | None:
    """The values in a buffer that are not finite; checked at once, while the bytes are in the core's cache."""
    if all_finite(buffer, load.leaf.dtype):
        return None
    return not_finite(buffer, load.leaf.dtype, path=load.path, tensor=name)
