"""Writes arrays to Orbax's files; the only module that imports Orbax.

Every process writes the shards it holds, each shard once (of copies, one), as Zarr 3 in one OCDBT store. A leaf's path
is its name in the store. `source` reads the chunks back.

TensorStore writes with as many threads as there are cores. Where the training step runs on the same cores, every step
during a save would be longer by what the save takes. So these threads run at a lower priority (`lower_priority`; Linux
only): they get all of an idle core, and a tenth of a busy one. The priority of Python's threads is not changed, because
a thread that waits for the interpreter's lock would wait for a thread of low priority.
"""

import contextlib
import logging
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from levanter.checkpoint.checksums import ArrayDigests, Number, array_digest, box_chunks
from levanter.checkpoint.refs import absolute
from levanter.checkpoint.staging import StagingBuffers

# Orbax logs through the first; the second logs what its event loops leave behind.
_LOGGERS = ("absl", "asyncio")
STACK_AXES = 3


class ArrayWriter:
    """Writes one set of arrays at a time, in background threads.

    Args:
        timeout_seconds: how long a save may take, waiting for other processes included.
        chunk_bytes: the most bytes of one stored piece of an array's part on a device.
    """

    def __init__(self, *, timeout_seconds: float, chunk_bytes: int):
        self._chunk_bytes, self._staging = chunk_bytes, StagingBuffers()
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_drop_reported)
        self._failed, self._hook = False, sys.unraisablehook
        self._chunks: dict[str, tuple[int, ...]] = {}
        self._digests: dict[str, dict[Number, str]] = {}
        self._on_host: list[tuple[str, tuple[slice, ...], np.ndarray]] = []
        sys.unraisablehook = _UnraisableFilter(self._hook)
        _disable_counters()
        self._orbax = ocp.AsyncCheckpointer(
            # Weights of floats shrink by a tenth under Orbax's compression, which takes four times the processor time.
            ocp.PyTreeCheckpointHandler(
                use_ocdbt=True, use_zarr3=True, use_compression=False, type_handler_registry=_whole_shards()
            ),
            # A folder that cannot be made is then an error of `start` itself, not one that a waiting thread sees.
            async_options=ocp.options.AsyncOptions(
                timeout_secs=int(timeout_seconds), create_directories_asynchronously=False
            ),
        )

    def start(self, path: str, arrays: Mapping[str, jax.Array]) -> None:
        """Copies the arrays to the host and begins to write them; `path` must not exist.

        When it returns, the arrays may be donated or deleted.
        """
        save_args = {name: _pieces(array, self._chunk_bytes) for name, array in arrays.items()}
        self._chunks = {name: _chunk(array, save_args[name]) for name, array in arrays.items()}
        # Stays set until `wait` has succeeded: `close` must then leave the filter of late errors in place.
        self._failed = True
        # Arrays on CPU devices are copied before Orbax sees them: it would hold views of the caller's memory.
        copies, self._digests = self._staging.copy_and_digest(arrays, self._chunks)
        self._orbax.save(absolute(path), args=ocp.args.PyTreeSave(copies, save_args=save_args))
        # Orbax has copied these to the host, and the arrays cache those copies: nothing is copied twice.
        self._on_host = [
            (name, shard.index, np.asarray(shard.data))
            for name, array in arrays.items()
            # Arrays on CPU devices got their digests while they were copied; these are the arrays on accelerators.
            if name not in self._digests
            for shard in array.addressable_shards
            if shard.replica_id == 0
        ]

    def wait(self) -> dict[str, ArrayDigests]:
        """Waits until all processes have written and the folder has its name; raises what went wrong.

        What writes has a lower priority from now on, so call it at once, from a thread that has nothing else to do.

        Returns:
            The digests of the chunks that this process wrote.
        """
        with lower_priority():
            # Digests of accelerator arrays are computed here, while TensorStore writes.
            for name, index, values in self._on_host:
                box = tuple((s.start or 0, (s.start or 0) + n) for s, n in zip(index, values.shape, strict=True))
                digests = self._digests.setdefault(name, {})
                digests |= {n: array_digest(values[..., *inside]) for n, inside in box_chunks(box, self._chunks[name])}
            self._on_host = []
            self._orbax.wait_until_finished()
        self._failed = False
        return {
            name: ArrayDigests(chunk=chunk, by_number=self._digests.get(name, {}))
            for name, chunk in self._chunks.items()
        }

    def close(self) -> None:
        """Waits and frees threads."""
        try:
            self._orbax.close()
        finally:
            self._staging.close()
            for name in _LOGGERS:
                logging.getLogger(name).removeFilter(_drop_reported)
            # After a save that failed, late errors appear until the process ends.
            if not self._failed and isinstance(sys.unraisablehook, _UnraisableFilter):
                sys.unraisablehook = self._hook


def _whole_shards() -> "ocp.type_handlers.TypeHandlerRegistry":
    """The handler that writes each shard as a whole, by the first device that holds it.

    By default Orbax makes each holder write a part, which it slices out eagerly, in computations that no plan lists.
    Callers pass the parts instead (`haliax_ext.replica_slices`).
    """
    handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    return ocp.type_handlers.create_type_handler_registry((jax.Array, handler))


def _disable_counters() -> None:
    """Keeps Orbax from reading TensorStore's counters around each save, for telemetry that is not used here.

    TensorStore converts them to Python objects that are never freed (0.1.75 to 0.1.86): a leak of 16 KiB a save. Where
    Orbax does not read the counters, there is nothing to disable.
    """
    from orbax.checkpoint._src.serialization import tensorstore_utils

    if hasattr(tensorstore_utils, "get_tensorstore_raw_bytes"):
        tensorstore_utils.get_tensorstore_raw_bytes = _no_bytes


def _no_bytes(*_: object, **__: object) -> int:
    return 0


class _UnraisableFilter:
    """A `sys.unraisablehook` that leaves out the echoes of a failed save.

    When one write fails, Orbax closes the event loop it waited in; the other writes, still under way, then find it
    closed, each with a traceback that cannot be caught. The failure itself has been raised.
    """

    def __init__(self, before: "Callable[[sys.UnraisableHookArgs], object]"):
        self._before = before

    def __call__(self, unraisable: "sys.UnraisableHookArgs", /) -> None:
        # Only tracebacks that consist of asyncio's own frames are echoes; anything else is reported as usual.
        names = {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(unraisable.exc_traceback)}
        echo = isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"
        if not (echo and names <= {"asyncio.base_events"}):
            self._before(unraisable)


def _pieces(array: jax.Array, chunk_bytes: int) -> ocp.SaveArgs:
    """The pieces in which an array is written: a device's part, cut further where that is large.

    An array of three and more axes is a stack of matrices (one for each layer); it is cut into those first, because
    that is how an export reads it.
    """
    part = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    if part <= chunk_bytes:
        return ocp.SaveArgs()
    return ocp.SaveArgs(chunk_byte_size=chunk_bytes, shard_axes=(0,) if array.ndim >= STACK_AXES else ())


def _chunk(array: jax.Array, save_args: ocp.SaveArgs) -> tuple[int, ...]:
    """The shape of the chunks that Orbax stores an array in.

    Digests are computed per chunk, so that a reader can verify each chunk that it reads. If Orbax chose other chunks,
    the digests would still be right, and reading slower.
    """
    from orbax.checkpoint._src.arrays.subchunking import choose_chunk_shape

    part = array.sharding.shard_shape(array.shape)
    chunk = choose_chunk_shape(
        array.shape, part, array.dtype, save_args.chunk_byte_size, shard_axes=save_args.shard_axes
    )
    return tuple(chunk)


def _drop_reported(record: logging.LogRecord) -> bool:
    """Drops the tracebacks that each thread logs for a failure that Orbax then raises: ours names the checkpoint."""
    error = record.exc_info[1] if record.exc_info else None
    return not (record.levelno >= logging.ERROR and error is not None and _passed_through_orbax(error))


def _passed_through_orbax(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    before = error.__cause__ or error.__context__
    return any(f.f_globals.get("__name__", "").startswith("orbax.") for f, _ in frames) or (
        before is not None and _passed_through_orbax(before)
    )


NICE_INCREMENT = 10
"""The nice increment: the kernel then gives a thread a ninth of its former weight."""
_WORKERS = "ts_pool_worker"
_TASKS = Path("/proc/self/task")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25


@contextlib.contextmanager
def lower_priority(*, by: int = NICE_INCREMENT) -> Iterator[None]:
    """Keeps TensorStore's threads at a lower priority while the block runs, those that begin in it included.

    Behind it they have their priority back where the process may raise it (root, or a limit on `nice`); where not, the
    few that live on read the next batches at the lower one.
    """
    if by <= 0 or sys.platform != "linux" or not _TASKS.is_dir():
        yield
        return
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    ended = threading.Event()

    def keep() -> None:
        pause = _FIRST_PAUSE
        # TensorStore starts threads on demand: new ones are looked for often at first, then four times a second.
        while not ended.wait(pause):
            _set(usual + by)
            pause = min(2 * pause, _LONGEST_PAUSE)

    _set(usual + by)
    thread = threading.Thread(target=keep, name="checkpoint priority", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _set(usual)


def _set(priority: int) -> None:
    """Gives TensorStore's threads this priority. Threads come and go meanwhile."""
    for task in _TASKS.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if (task / "comm").read_text().strip() == _WORKERS:
                # 19 is the lowest priority that the kernel knows.
                os.setpriority(os.PRIO_PROCESS, int(task.name), min(priority, 19))
