"""Programs of a run of several processes: compiled by each, then run by all at once.

The first call of a jitted function compiles. Processes do that at their own pace, and one that is done waits for the
others inside the program's first collective until the transport times out (on CPUs, after half a minute). With
`jit_together` a process compiles, compares the executable's memory with the device's, waits for the others in a
barrier, and runs when all of them can.

The memory is compared because a CPU's allocator does not refuse: where a Program needs more than the machine has, the
kernel kills the process without a message.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from jax.sharding import Mesh

from haliax_ext.errors import gib
from haliax_ext.program import Program
from haliax_ext.pytree import PyTree
from levanter.distributed.agreement import barrier
from levanter.hardware.memory import host_memory
from levanter.io.progress import duration
from levanter.runplan import DoesNotFitError

logger = logging.getLogger(__name__)

LOG_AFTER_SECONDS = 2.0
"""Seconds after which a compilation is logged."""


def jit_together(
    program: Program, mesh: Mesh, *, around: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Callable[..., Any]:
    """`program.jit(mesh)`, of which no process runs the first call before all have compiled it.

    All processes must call the same programs in the same order.

    Args:
        program: what is compiled.
        mesh: its devices.
        around: a context for the compilation, including the wait for other processes.

    Raises (when called):
        PeerLostError: a process did not come to its first call.
    """
    run = program.jit(mesh)

    def call(*values: PyTree) -> PyTree:
        # Only the first call compiles; later ones find the executable and need no barrier.
        if not program.is_prepared(mesh):
            with around():
                with _log_compilation(program.name):
                    program.prepare(mesh, *values)
                # Before the barrier: a process whose memory is too small fails here, while its peers are in no
                # collective yet.
                check_memory(program, mesh)
                barrier(f"the first {program.name}")
        return run(*values)

    return functools.update_wrapper(call, run)


@contextmanager
def _log_compilation(name: str) -> Iterator[None]:
    """Says what is compiled where that takes a while, and in the end how long it took."""
    began = time.monotonic()
    timer = threading.Timer(LOG_AFTER_SECONDS, logger.info, ("compiling %s", name))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    seconds = time.monotonic() - began
    if seconds > LOG_AFTER_SECONDS:
        logger.info("compiled %s in %s", name, duration(seconds))


def check_memory(program: Program, mesh: Mesh) -> None:
    """Checks that a Program that was prepared for a mesh fits on its devices.

    Raises:
        DoesNotFitError: it takes more than a device has.
    """
    needed, limit = program.memory(mesh), device_memory(mesh)
    if needed is None or limit is None or needed.total <= limit:
        return
    breakdown = f"{gib(needed.argument)} of inputs, {gib(needed.temp)} for what it makes on the way"
    raise DoesNotFitError(
        f"{program.name} does not fit: it takes {gib(needed.total)} of a device's {gib(limit)}: {breakdown}, "
        f"{gib(needed.output)} of results\n"
        "fewer rows at once, a shorter row, or more devices need less; `levanter plan` says how much before"
    )


def device_memory(mesh: Mesh) -> int | None:
    """Bytes of a device: its own memory, or its share of the machine's; None where no check is needed."""
    if mesh.devices.flat[0].platform == "tpu":
        return None  # its compiler refuses by itself
    local_devices = [device for device in mesh.devices.flat if device.process_index == device.client.process_index()]
    if not local_devices:
        return None
    if local_devices[0].platform == "cpu":
        memory = host_memory()
        # The devices of a CPU process share the machine's memory.
        return None if memory is None else memory // len(local_devices)
    return (local_devices[0].memory_stats() or {}).get("bytes_limit")
