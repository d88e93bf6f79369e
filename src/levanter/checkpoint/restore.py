"""`restore`: a checkpoint's arrays onto devices, each process reading the ranges that its own devices need."""

import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np

from haliax_ext.host_reader import aligned_empty
from haliax_ext.meshspec import Device
from levanter.checkpoint.checksums import Box
from levanter.checkpoint.refs import CheckpointRef
from levanter.checkpoint.restore_specs import RestoreTarget, Unexpected, check_targets
from levanter.checkpoint.source import CheckpointSource
from levanter.checkpoint.staging import index_box


def restore(
    ref: CheckpointRef, targets: Mapping[str, RestoreTarget], *, unexpected: Unexpected = "error"
) -> dict[str, jax.Array]:
    """Reads a checkpoint, every array straight into its target's sharding.

    Each process reads the ranges of the files that its own devices need; the values are those that were saved, bit
    for bit, on whatever mesh.

    Args:
        ref: the checkpoint.
        targets: every array that is wanted, by path.
        unexpected: whether leaves of the checkpoint that no target takes are an error, or left out (to take the
            model from a checkpoint of a whole training state).

    Raises:
        CheckpointMismatchError: lists every leaf that is missing, unexpected, or of another shape or dtype; nothing
            has been read.
        UnreadableCheckpointError: files of the checkpoint are missing or damaged.
    """
    check_targets(ref, targets, unexpected=unexpected)
    return read_arrays(ref, targets)


_Task = tuple[str, list[Device], Future[np.ndarray]]


def read_arrays(ref: CheckpointRef, targets: Mapping[str, RestoreTarget]) -> dict[str, jax.Array]:
    """Reads leaves of a checkpoint, each into its target's sharding; shapes and dtypes must have been compared.

    Every chunk is compared with its digest. What several devices hold alike is read once; host memory holds what is on
    its way, and no more.

    Raises:
        UnreadableCheckpointError: files of the checkpoint are missing or damaged.
    """
    source = CheckpointSource(ref)
    workers = min(16, max(2, os.cpu_count() or 2))
    shards: dict[str, list[jax.Array]] = {path: [] for path in targets}
    under_way: deque[_Task] = deque()

    def place() -> None:
        path, devices, block = under_way.popleft()
        # Waits for the oldest read, then for its transfer: only then is its host memory freed.
        placed = [jax.device_put(block.result(), device) for device in devices]
        shards[path] += jax.block_until_ready(placed)

    with ThreadPoolExecutor(workers, thread_name_prefix="checkpoint reader") as pool:
        try:
            for path, target in targets.items():
                for box, devices in _boxes(target):
                    # At most two parts for each thread are in memory, whatever the size of the checkpoint.
                    if len(under_way) == 2 * workers:
                        place()
                    under_way.append((path, devices, pool.submit(_block, source, ref, path, target, box)))
            while under_way:
                place()
        finally:
            # After an error the parts that were not begun are not read.
            for _, _, block in under_way:
                block.cancel()
    return {
        path: jax.make_array_from_single_device_arrays(target.shape, target.sharding, shards[path])
        for path, target in targets.items()
    }


def _boxes(target: RestoreTarget) -> Iterator[tuple[Box, list[Device]]]:
    """The distinct parts of an array on this process's devices, each with the devices that hold it."""
    holders: dict[Box, list[Device]] = {}
    for device, index in target.sharding.addressable_devices_indices_map(target.shape).items():
        assert index is not None
        holders.setdefault(index_box(index, target.shape), []).append(device)
    yield from holders.items()


def _block(source: CheckpointSource, ref: CheckpointRef, path: str, target: RestoreTarget, box: Box) -> np.ndarray:
    """A part of an array; padding that was not saved is zero."""
    saved = ref.leaves[path].shape
    block = aligned_empty(tuple(stop - start for start, stop in box), np.dtype(target.dtype))
    # A target may be padded further than what was saved: only the saved part is read.
    index = tuple(slice(start, min(stop, size)) for (start, stop), size in zip(box, saved, strict=True))
    inside = tuple(slice(0, max(s.stop - s.start, 0)) for s in index)
    if any(s.stop < n for s, n in zip(inside, block.shape, strict=True)):
        block[...] = np.zeros((), block.dtype)
    if all(s.stop > 0 for s in inside):
        source.read(path, index, block[..., *inside])
    return block
