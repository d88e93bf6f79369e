"""Worker threads that read boxes of source tensors into the blocks of this host's devices.

Where a box lies in its block as it lies in the file, and the dtypes agree, it is read right into its place; otherwise
into a buffer (`scratch`), and cast and copied from there. A source on another machine wants many threads, which wait
for the network; `Readers` says how many, and which part of the memory budget is theirs.
"""

import math
import os
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from haliax_ext.finite import NotFinite, all_finite, not_finite
from haliax_ext.load_plan import LeafLoad
from haliax_ext.reading import Read, Unit, flat_stack, reads
from haliax_ext.scratch import SMALL, Scratch
from haliax_ext.scratch import aligned_empty as aligned_empty
from haliax_ext.slices import Box, box_shape, box_size, to_slices
from haliax_ext.sources import RemoteAccess, TensorSource, remote_of

READ_BYTES = 2 << 20
"""Bytes of one read: much more than a request to a local file costs, little enough for a core's cache."""
SCRATCH_SHARE = 4
"""One part in so many of the memory budget is for buffers, where a source is on another machine."""


@dataclass(frozen=True, kw_only=True)
class Readers:
    """Who reads, and in what portions.

    Attributes:
        threads: reading side by side.
        read_bytes: of one read.
        buffers: of `read_bytes` each, for what is not read into its place.
        held_bytes: of the memory budget that blocks may not have.
    """

    threads: int
    read_bytes: int
    buffers: int
    held_bytes: int = 0

    @classmethod
    def of(cls, remote: RemoteAccess | None, budget: int, *, threads: int | None, read_bytes: int | None) -> "Readers":
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
        many, each = threads or remote.reads_at_once, read_bytes or remote.read_bytes
        buffers = max(1, min(many, budget // SCRATCH_SHARE // each))
        # Small reads have memory of their threads, second requests for slow ranges have some of their own.
        held = buffers * each + many * each // SMALL + remote.hedge_bytes
        return cls(threads=many, read_bytes=each, buffers=buffers, held_bytes=min(held, budget))


@dataclass(eq=False, kw_only=True)
class Arrival:
    """A unit of blocks on its way.

    Attributes:
        load: the leaf.
        boxes: the distinct blocks of this host.
        which: for each of this host's devices, the number of its block.
        unit: which blocks are read here, and how.
        blocks: their memory, by number, once the reading has begun.
        futures: the reads under way.
    """

    load: LeafLoad
    boxes: list[Box]
    which: np.ndarray
    unit: Unit
    blocks: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    futures: list[Future[None]] = field(default_factory=list[Future[None]])

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return sum(box_size(self.boxes[n]) for n in self.unit.members) * self.load.leaf.dtype.itemsize


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

    def start(self, arrival: Arrival) -> None:
        """Takes memory for an arrival's blocks and queues its reads."""
        layout = arrival.load.layout
        for number in arrival.unit.members:
            box = arrival.boxes[number]
            block = aligned_empty(box_shape(box), arrival.load.leaf.dtype)
            if layout.clipped(box) != box:
                block[...] = 0
            arrival.blocks[number] = block
        chunk = arrival.load.chunk(self._read_bytes)
        for read in reads(layout, arrival.boxes, arrival.unit, chunk=chunk):
            arrival.futures.append(self._pool.submit(self._read, arrival, read))

    def wait(self, arrivals: list[Arrival], seconds: float) -> bool:
        """Waits at most so long for arrivals; whether they are complete.

        Raises:
            Exception: what a read raised, of these arrivals or later ones: those waited for may take long.
        """
        futures = [future for arrival in arrivals for future in arrival.futures]
        done, pending = wait(futures, timeout=seconds, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        if self._failure is not None:
            raise self._failure
        return not pending

    def _read(self, arrival: Arrival, read: Read) -> None:
        try:
            self._read_one(arrival, read)
        except BaseException as error:
            self._failure = self._failure or error
            raise

    def _read_one(self, arrival: Arrival, read: Read) -> None:
        load = arrival.load
        name = load.sources[flat_stack(load.layout, read.stack)]
        shape = box_shape(read.box)
        memory = None
        if len(read.copies) == 1 and load.source_dtype == load.leaf.dtype:
            number, copy = read.copies[0]
            memory = copy.in_place(arrival.blocks[number], shape)
        if memory is not None:
            self._source.read(name, to_slices(read.box), memory)
            bad = _not_finite(memory, load, name)
        else:
            with self._scratch.taken(load.source_dtype, shape) as buffer:
                self._source.read(name, to_slices(read.box), buffer)
                # Infinities and NaNs among weights are passed on as they are; NumPy would warn about casting them.
                with np.errstate(invalid="ignore", over="ignore"):
                    for number, copy in read.copies:
                        copy.scatter(buffer, arrival.blocks[number])
                bad = _not_finite(buffer, load, name)
        with self._lock:
            if bad is not None:
                before = self.not_finite.get((load.path, name))
                self.not_finite[load.path, name] = bad if before is None else before + bad
            self.bytes_done += round(math.prod(shape) * load.bytes_per_element)
            self.at = (load.path, read.stack[0] if read.stack else None)


def _not_finite(buffer: np.ndarray, load: LeafLoad, name: str) -> NotFinite | None:
    """What is not finite in what was read; asked now, while the bytes are in the core's cache."""
    if all_finite(buffer, load.leaf.dtype):
        return None
    return not_finite(buffer, load.leaf.dtype, path=load.path, tensor=name)
