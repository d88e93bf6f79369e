"""Copies of a state in reused host memory, which are written while the next steps change the state.

Orbax copies arrays on accelerators; of arrays on CPU devices it takes views. A buffer that has a view cannot be
donated, so XLA would copy the whole state in the next step instead, into new memory, which the kernel has to allocate
and clear page by page: on the machine where this was measured, that took three times as long as a copy into memory that
has been used before. So CPU arrays are copied here, into the same memory at each save, and the step still updates its
state in place. This costs the memory of one state, between saves too.
"""

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np

from haliax_ext.host_reader import aligned_empty
from levanter.checkpoint.checksums import Box, Number, box_chunks, copy_with_digest


class StagingBuffers:
    """Memory for the copies of one set of arrays at a time."""

    def __init__(self):
        self._blocks: dict[tuple[str, Box], np.ndarray] = {}
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="checkpoint copy")

    def copy(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The same arrays, those on CPU devices as copies; the copies of the call before are overwritten.

        Parts that several devices hold are copied once. Nothing is left under way when it returns.
        """
        return self.copy_and_digest(arrays, {})[0]

    def copy_and_digest(
        self, arrays: Mapping[str, jax.Array], chunks: Mapping[str, tuple[int, ...]]
    ) -> tuple[dict[str, jax.Array], dict[str, dict[Number, str]]]:
        """The result of `copy`, and the digests of those chunks of the copies that this process writes.

        Args:
            arrays: by name.
            chunks: the shape of a chunk, by name; it divides what a device holds.
        """
        cpu_names = {name for name, array in arrays.items() if _on_cpus(array)}
        used: dict[tuple[str, Box], np.ndarray] = {}
        copies: list[tuple[str, Future[dict[Number, str]]]] = []
        for name in cpu_names:
            array = arrays[name]
            # Of copies that several processes hold, the first is written.
            # Replica 0 of each shard is the one that Orbax writes.
            written = {
                index_box(owner.index, array.shape) for owner in array.addressable_shards if owner.replica_id == 0
            }
            for shard in array.addressable_shards:
                key = (name, index_box(shard.index, array.shape))
                if key not in used:
                    # A block is used again as long as the array's part has the same shape and dtype, which it has from
                    # save to save.
                    block = self._blocks.get(key)
                    if block is None or block.shape != shard.data.shape or block.dtype != array.dtype:
                        block = aligned_empty(shard.data.shape, np.dtype(array.dtype))
                    used[key] = block
                    chunk = chunks.get(name) if key[1] in written else None
                    copies.append((name, self._pool.submit(_copy, shard.data, block, key[1], chunk)))
        digests: dict[str, dict[Number, str]] = {name: {} for name in cpu_names}
        # All copies are finished before this returns: the caller may then donate the arrays.
        for name, future in copies:
            digests[name] |= future.result()
        # Blocks of arrays that were not part of this save are freed.
        self._blocks = used
        staged = {
            name: _from_blocks(name, array, used) if name in cpu_names else array for name, array in arrays.items()
        }
        return staged, digests

    def close(self) -> None:
        """Frees memory and threads."""
        self._pool.shutdown()
        self._blocks = {}


def _on_cpus(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.sharding.addressable_devices)


def index_box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """An index into an array as a box of it."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _copy(part: jax.Array, block: np.ndarray, box: Box, chunk: tuple[int, ...] | None) -> dict[Number, str]:
    values = np.asarray(part)
    if chunk is None:
        np.copyto(block, values)
        return {}
    # The ellipsis makes indexing return a view also for arrays without axes.
    return {
        number: copy_with_digest(values[..., *inside], block[..., *inside]) for number, inside in box_chunks(box, chunk)
    }


def _from_blocks(name: str, array: jax.Array, blocks: Mapping[tuple[str, Box], np.ndarray]) -> jax.Array:
    """An array of the same sharding whose memory is the blocks', which CPU devices adopt."""
    shards = [
        # CPU devices adopt aligned memory instead of copying it, so no second copy of the state exists.
        jax.device_put(blocks[name, index_box(shard.index, array.shape)], shard.device)
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
