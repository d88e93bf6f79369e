"""Worker threads that read boxes of source tensors into the blocks of this host's devices.

Where a box lies in its block as it lies in the file, and the dtypes agree, it is read right into its place; otherwise
into a buffer (`scratch`), and cast and copied from there. A source on another machine wants many threads, which wait
for the network; `Readers` says how many, and which part of the memory budget is theirs.
"""

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from haliax_ext.buffer_pool import SMALL, Scratch, aligned, aligned_zeros
from haliax_ext.buffer_pool import aligned_empty as aligned_empty
from haliax_ext.leaf_layout import box_shape, box_size, to_slices
from haliax_ext.load_plan import LeafLoad
from haliax_ext.nonfinite import NotFinite, all_finite, not_finite
from haliax_ext.read_coalescing import InflightUnit as InflightUnit
from haliax_ext.read_coalescing import LeafRead, ReadRequest, TensorSlice, portions
from haliax_ext.sources import AdjacentSource, Index, RemoteAccess, RemoteReads, TensorSource, remote_of

READ_BYTES = 2 << 20
"""Bytes of one read: much more than a request to a local file costs, little enough for a core's cache."""
LEAST_READ_BYTES = 1 << 20
"""Of one read from another machine, where memory is short or little is left to read."""
LAST_READS = 128
"""What is left is asked for in so many reads, where that makes them smaller."""
AHEAD = 32
"""Reads from another machine beside a block that is larger than the memory budget."""
BUFFERS = 32
"""Reads from another machine that have a buffer, at least, if they must be smaller for it."""
SCRATCH_SHARE = 8
"""One part in so many of the memory budget is for buffers, where a source is on another machine: what they have the
blocks have not, and while the last reads of one block are under way, the network lives off the room for the next."""
MOST_SCRATCH_SHARE = 4
"""The same where memory is so short that there would be fewer buffers than it takes."""


@dataclass(frozen=True, kw_only=True)
class Readers:
    """Who reads, and in what portions.

    Attributes:
        threads: reading side by side.
        read_bytes: of one read.
        buffers: of `read_bytes` each, for what is not read into its place.
        held_bytes: of the memory budget that blocks may not have.
        ahead_bytes: of blocks that are read into beside one that is larger than the budget.
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
        """Those that fit a source and a memory budget.

        Args:
            remote: how the source is reached; None where it is here.
            budget: host memory beyond the arrays.
            threads: so many, whatever the source.
            read_bytes: so many, whatever the source.
        """
        if remote is None:
            # A buffer for each core stays in its cache; they come on top of the budget, which is for blocks.
            cores = threads or min(16, max(2, os.cpu_count() or 2))
            return cls(threads=cores, read_bytes=read_bytes or READ_BYTES, buffers=cores)
        many = threads or remote.reads_at_once
        room = budget // SCRATCH_SHARE // BUFFERS
        each = read_bytes or min(remote.read_bytes, max(room, LEAST_READ_BYTES))
        fewest = min(BUFFERS, budget // MOST_SCRATCH_SHARE // each)
        buffers = max(1, min(many, max(fewest, budget // SCRATCH_SHARE // each)))
        # Small reads have memory of their threads, second requests for slow ranges have some of their own.
        held = buffers * each + many * each // SMALL + remote.hedge_bytes
        return cls(
            threads=many, read_bytes=each, buffers=buffers, held_bytes=min(held, budget), ahead_bytes=AHEAD * each
        )


class HostReader:
    """A pool of reading threads.

    Attributes:
        bytes_done: storage bytes read so far.
        at: the leaf and the index along its stacked axis that were read last.
        not_finite: what of the weights is not finite, by leaf and source tensor.
    """

    def __init__(self, source: TensorSource, readers: Readers):
        self.bytes_done = 0
        self.at: tuple[str, int | None] = ("", None)
        self.not_finite: dict[tuple[str, str], NotFinite] = {}
        self._source = source
        self._remote = remote_of(source)
        self._read_bytes = readers.read_bytes
        self._pool = ThreadPoolExecutor(max_workers=readers.threads, thread_name_prefix="load")
        self._scratch = Scratch(readers.read_bytes, readers.buffers)
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def __enter__(self) -> "HostReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._remote is not None:
            # Whoever pressed Ctrl-C, or is told of a damaged file, does not wait for a slow network.
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._remote.interrupt()
        self._pool.shutdown(wait=kind is None or self._remote is None, cancel_futures=True)

    def portions(self, arrivals: Sequence[InflightUnit], left: int | None = None) -> Iterator[ReadRequest]:
        """What is read at a time for arrivals, in order.

        Args:
            arrivals: that are read at one time.
            left: storage bytes that are still to be asked for, these included; towards the end, reads get smaller, so
                that the last of them end together.
        """
        size = self._read_bytes
        if left is not None and self._remote is not None:
            size = min(size, max(left // LAST_READS, LEAST_READ_BYTES))
        return portions(arrivals, self._source, read_bytes=size, together=self._remote is not None)

    def start(self, arrival: InflightUnit) -> None:
        """Takes memory for an arrival's blocks; nothing of it is used before something is read into it."""
        for number in arrival.unit.members:
            box = arrival.boxes[number]
            taken = aligned_empty if arrival.load.layout.clipped(box) == box else aligned_zeros
            arrival.blocks[number] = taken(box_shape(box), arrival.load.leaf.dtype)

    def submit(self, portion: ReadRequest) -> None:
        """Queues a read of arrivals that were started."""
        future = self._pool.submit(self._read, portion)
        for arrival in {id(share.arrival): share.arrival for share in portion.shares}.values():
            arrival.futures.append(future)

    def wait(self, arrivals: list[InflightUnit], seconds: float) -> bool:
        """Waits at most so long for arrivals; whether they are complete.

        Raises:
            Exception: what a read raised, of these arrivals or later ones: those waited for may take long.
        """
        futures = {future for arrival in arrivals for future in arrival.futures}
        done, pending = wait(futures, timeout=seconds, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        if self._failure is not None:
            raise self._failure
        return not pending

    def _read(self, portion: ReadRequest) -> None:
        try:
            self._read_all(portion.slices)
        except BaseException as error:
            self._failure = self._failure or error
            raise

    def _read_all(self, slices: tuple[TensorSlice, ...]) -> None:
        there = [_in_place(each) for each in slices]
        elsewhere = [each for each, memory in zip(slices, there, strict=True) if memory is None]
        # Every one begins where its elements may begin.
        places = list(itertools.accumulate((aligned(each.nbytes) for each in elsewhere), initial=0))
        buffered = self._scratch.taken(np.dtype(np.uint8), (places[-1],)) if elsewhere else nullcontext(_NOTHING)
        with buffered as buffer:
            rooms = (
                buffer[at : at + each.nbytes].view(each.dtype).reshape(box_shape(each.box))
                for at, each in zip(places, elsewhere, strict=False)
            )
            filled = [next(rooms) if memory is None else memory for memory in there]
            self._fetch([(each.name, to_slices(each.box), out) for each, out in zip(slices, filled, strict=True)])
            for each, values, memory in zip(slices, filled, there, strict=True):
                for share in each.shares:
                    self._arrived(share, each.name, each.part(share, values), in_place=memory is not None)

    def _fetch(self, wanted: list[tuple[str, Index, np.ndarray]]) -> None:
        if len(wanted) > 1 and isinstance(self._source, AdjacentSource):
            self._source.read_adjacent(wanted)
            return
        for name, index, out in wanted:
            self._source.read(name, index, out)

    def _arrived(self, share: LeafRead, name: str, values: np.ndarray, *, in_place: bool) -> None:
        """Copies what was read into its blocks, and counts it."""
        arrival, read = share.arrival, share.read
        load = arrival.load
        if not in_place:
            # Infinities and NaNs among weights are passed on as they are; NumPy would warn about casting them.
            with np.errstate(invalid="ignore", over="ignore"):
                for number, copy in read.copies:
                    copy.scatter(values, arrival.blocks[number])
        bad = _not_finite(values, load, name)
        with self._lock:
            if bad is not None:
                before = self.not_finite.get((load.path, name))
                self.not_finite[load.path, name] = bad if before is None else before + bad
            self.bytes_done += round(box_size(read.box) * load.bytes_per_element)
            self.at = (load.path, read.stack[0] if read.stack else None)


_NOTHING = np.empty(0, np.uint8)


def _in_place(each: TensorSlice) -> np.ndarray | None:
    """The memory of a block itself, where a slice lies there as it lies in the file; else `None`."""
    if len(each.shares) > 1:
        return None
    ((arrival, read),) = ((share.arrival, share.read) for share in each.shares)
    if len(read.copies) != 1 or arrival.load.source_dtype != arrival.load.leaf.dtype:
        return None
    number, copy = read.copies[0]
    return copy.in_place(arrival.blocks[number], box_shape(read.box))


def _not_finite(buffer: np.ndarray, load: LeafLoad, name: str) -> NotFinite | None:
    """What is not finite in what was read; asked now, while the bytes are in the core's cache."""
    if all_finite(buffer, load.leaf.dtype):
        return None
    return not_finite(buffer, load.leaf.dtype, path=load.path, tensor=name)
