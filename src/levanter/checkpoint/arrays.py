"""Arrays to Orbax's files and back: the only module that knows Orbax.

Every process writes the shards it holds, each shard once (of copies, one), as Zarr 3 in one OCDBT store. Reading takes
any sharding: each process reads the ranges its devices need. A leaf's path is its name in the store.
"""

import logging
import traceback
from collections.abc import Mapping

import jax
import numpy as np
import orbax.checkpoint as ocp

from levanter.checkpoint.errors import UnreadableCheckpointError
from levanter.checkpoint.refs import CheckpointRef, absolute
from levanter.checkpoint.targets import Target

# Orbax logs through the first; the second logs what its event loops leave behind.
_LOGGERS = ("absl", "asyncio")


class ArrayWriter:
    """Writes one set of arrays at a time, in the background.

    Args:
        timeout_seconds: how long a save may take, waiting for other processes included.
    """

    def __init__(self, *, timeout_seconds: float):
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_told_by_us)
        self._orbax = ocp.AsyncCheckpointer(
            # Weights of floats shrink by a tenth under Orbax's compression, which takes four times the processor time.
            ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False),
            # A folder that cannot be made is then an error of `start` itself, not one that a waiting thread sees.
            async_options=ocp.options.AsyncOptions(
                timeout_secs=int(timeout_seconds), create_directories_asynchronously=False
            ),
        )

    def start(self, path: str, arrays: Mapping[str, jax.Array]) -> None:
        """Copies the arrays to the host and begins to write them; `path` must not exist.

        When it returns, the arrays may be donated or deleted. On a CPU Orbax holds views of them instead of copies;
        JAX does not reuse a buffer that somebody views.
        """
        self._orbax.save(absolute(path), args=ocp.args.PyTreeSave(dict(arrays)))

    def wait(self) -> None:
        """Waits until all processes have written and the folder has its name; raises what went wrong."""
        self._orbax.wait_until_finished()

    def close(self) -> None:
        """Waits and frees threads."""
        try:
            self._orbax.close()
        finally:
            for name in _LOGGERS:
                logging.getLogger(name).removeFilter(_told_by_us)


def _told_by_us(record: logging.LogRecord) -> bool:
    """Leaves out tracebacks that are logged, thread by thread, for a failure Orbax then raises: we raise it by name."""
    error = record.exc_info[1] if record.exc_info else None
    return not (record.levelno >= logging.ERROR and error is not None and _passed_through_orbax(error))


def _passed_through_orbax(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    before = error.__cause__ or error.__context__
    return any(f.f_globals.get("__name__", "").startswith("orbax.") for f, _ in frames) or (
        before is not None and _passed_through_orbax(before)
    )


def read_arrays(ref: CheckpointRef, targets: Mapping[str, Target]) -> dict[str, jax.Array]:
    """Reads leaves of a checkpoint, each into its target's sharding; shapes and dtypes must have been compared.

    Raises:
        UnreadableCheckpointError: files of the checkpoint are missing or damaged.
    """
    if not targets:
        return {}
    item = {path: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=t.sharding) for path, t in targets.items()}
    how = {
        path: ocp.ArrayRestoreArgs(dtype=np.dtype(t.dtype), sharding=t.sharding, global_shape=t.shape, strict=True)
        for path, t in targets.items()
    }
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
    try:
        found = reader.restore(
            absolute(ref.arrays_path),
            args=ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True),
        )
    except (OSError, ValueError, KeyError) as error:
        raise UnreadableCheckpointError(
            f"{ref.path}: the arrays of this checkpoint cannot be read: {type(error).__name__}: {first_lines(error)}"
        ) from error
    finally:
        reader.close()
    return {path: found[path] for path in targets}


def first_lines(error: BaseException) -> str:
    """The beginning of a message of a library, on one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:300] + " …"
