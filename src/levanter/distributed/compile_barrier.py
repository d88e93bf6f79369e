"""Programs of a run of several processes: compiled by each, then run by all at once.

The first call of a jitted function compiles. Processes do that at their own pace, and one that is done waits for the
others inside the program's first collective, for as long as the transport has patience (on CPUs, half a minute). With
`jit_together` a process compiles, meets the others in a barrier, and runs when all of them can.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jax.sharding import Mesh

from haliax_ext.program import Program
from haliax_ext.pytree import PyTree
from levanter.distributed.barrier import barrier
from levanter.distributed.memory_check import require_room_for
from levanter.io.progress import duration

logger = logging.getLogger(__name__)

SAID_AFTER = 2.0
"""Seconds after which a compilation is logged."""


def jit_together(program: Program, mesh: Mesh) -> Callable[..., Any]:
    """`program.jit(mesh)`, of which no process runs the first call before all have compiled it.

    All processes must call the same programs in the same order.

    Raises (when called):
        PeerLostError: a process did not come to its first call.
    """
    run = program.jit(mesh)

    def call(*values: PyTree) -> PyTree:
        if not program.is_prepared(mesh):
            with _said(program.name):
                program.prepare(mesh, *values)
            require_room_for(program, mesh)
            barrier(f"the first {program.name}")
        return run(*values)

    return functools.update_wrapper(call, run)


@contextmanager
def _said(name: str) -> Iterator[None]:
    """Says what is compiled where that takes a while, and in the end how long it took."""
    began = time.monotonic()
    timer = threading.Timer(SAID_AFTER, logger.info, ("compiling %s", name))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    seconds = time.monotonic() - began
    if seconds > SAID_AFTER:
        logger.info("compiled %s in %s", name, duration(seconds))
