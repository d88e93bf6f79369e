"""Worker threads that read boxes of source tensors into the blocks of this host's devices.

Where a box lies in its block as it lies in the file, and the dtypes agree, it is read right into its place; otherwise
into a buffer of the thread, small enough to stay in a core's cache until it has been cast and copied from there.
"""

import math
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from haliax_ext.finite import NotFinite, all_finite, not_finite
from haliax_ext.load_plan import LeafLoad
from haliax_ext.reading import Read, Unit, flat_stack, reads
from haliax_ext.slices import Box, box_shape, box_size, to_slices
from haliax_ext.sources import TensorSource

ALIGNMENT = 64
"""Bytes to which XLA's CPU devices want memory to be aligned that they adopt instead of copying."""
READ_BYTES = 2 << 20
"""Bytes of one read: much more than a request to a local file costs, little enough for a core's cache."""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialized memory that begins at a multiple of 64 bytes."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


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

    def __init__(self, source: TensorSource, *, threads: int, read_bytes: int):
        self.bytes_done = 0
        self.at: tuple[str, int | None] = ("", None)
        self.not_finite: dict[tuple[str, str], NotFinite] = {}
        self._source = source
        self._read_bytes = read_bytes
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="load")
        self._lock = threading.Lock()
        self._local = threading.local()

    def __enter__(self) -> "HostReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

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
            Exception: what a read raised.
        """
        futures = [future for arrival in arrivals for future in arrival.futures]
        done, pending = wait(futures, timeout=seconds, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return not pending

    def _scratch(self, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        nbytes = math.prod(shape) * dtype.itemsize
        held = getattr(self._local, "buffer", None)
        if held is None or held.nbytes < nbytes:
            held = self._local.buffer = aligned_empty((max(nbytes, self._read_bytes),), np.dtype(np.uint8))
        return held[:nbytes].view(dtype).reshape(shape)

    def _read(self, arrival: Arrival, read: Read) -> None:
        load = arrival.load
        name = load.sources[flat_stack(load.layout, read.stack)]
        shape = box_shape(read.box)
        memory = None
        if len(read.copies) == 1 and load.source_dtype == load.leaf.dtype:
            number, copy = read.copies[0]
            memory = copy.in_place(arrival.blocks[number], shape)
        if memory is not None:
            buffer = self._source.read(name, to_slices(read.box), memory)
        else:
            buffer = self._source.read(name, to_slices(read.box), self._scratch(load.source_dtype, shape))
            # Infinities and NaNs among weights are passed on as they are; NumPy would warn about casting them.
            with np.errstate(invalid="ignore", over="ignore"):
                for number, copy in read.copies:
                    copy.scatter(buffer, arrival.blocks[number])
        # Now, while the bytes are in the core's cache.
        bad = None
        if not all_finite(buffer, load.leaf.dtype):
            bad = not_finite(buffer, load.leaf.dtype, path=load.path, tensor=name)
        with self._lock:
            if bad is not None:
                before = self.not_finite.get((load.path, name))
                self.not_finite[load.path, name] = bad if before is None else before + bad
            self.bytes_done += round(math.prod(shape) * load.bytes_per_element)
            self.at = (load.path, read.stack[0] if read.stack else None)
