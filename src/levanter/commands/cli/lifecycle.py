"""Lifecycle of one process among several: joining the others, ending with them, and ending when a peer is lost.

A process whose peers are lost is usually blocked in a collective, where no exception reaches it. A thread detects the
loss, reports which peer is lost and where, and ends the process with exit code 5. JAX's coordination service detects it
too and aborts the process with a C++ stack trace; while the run has several processes, SIGABRT is caught, and the same
error is printed instead.
"""

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from levanter.base.exit_codes import INTERNAL_ERROR, INTERRUPTED, OK, PEER_LOST, PREEMPTED
from levanter.distributed.agreement import barrier, current_peers, set_peers
from levanter.distributed.initialize import (
    DistributedConfig,
    find_process_place,
    join,
    platforms,
    start_jax,
    tpu_pod_hints,
)
from levanter.distributed.peers import PeerLostError, Peers
from levanter.io import release_all, setup_logging

logger = logging.getLogger(__name__)

LINGER_SECONDS = 0.3
"""Seconds that a failing process lingers, so that its last message reaches the others."""
SUSPECT_SECONDS = 3.0
"""Seconds after an unexpected error within which a lost peer is considered its cause."""
SAME_ERROR_SECONDS = 3.0
_SIGABRT_ACTION = ctypes.CFUNCTYPE(None, ctypes.c_int)


@dataclass
class _ProcessState:
    """State that must live as long as the process."""

    abort_action: Any = None
    final_code: int | None = None
    end_lock: threading.Lock = field(default_factory=threading.Lock)
    on_peer_lost: list[Callable[[str], object]] = field(default_factory=list)


_state = _ProcessState()


def join_processes(config: DistributedConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Joins the other processes of this run, if there are any; must be called before JAX initializes its devices.

    Raises:
        PlaceError: this process's index is unknown.
        RendezvousError: not all of them joined in time.
    """
    import jax

    if current_peers() is not None or jax.distributed.is_initialized():
        return
    place = find_process_place(config, environment, lambda: tpu_pod_hints(platforms()))
    if place is None:
        return
    setup_logging(process_index=place.process, process_count=place.processes)
    peers = join(config, place)
    set_peers(peers)
    # Before `start_jax`: a peer may already be lost while JAX's own service connects.
    peers.on_lost(_end_with)
    _catch_aborts(peers)
    start_jax(config, place)
    if place.process == 0:
        logger.info("%d processes, known from %s; process 0 is %s", place.processes, place.source, peers.roster[0])


@contextlib.contextmanager
def peer_loss_reported(report: Callable[[str], object]) -> Iterator[None]:
    """Calls `report` with the reason if the process ends inside the block because a peer is lost, to notify clients.

    Args:
        report: must return at once; called in another thread, a few tenths of a second before the process ends.
    """
    _state.on_peer_lost.append(report)
    try:
        yield
    finally:
        _state.on_peer_lost.remove(report)


def is_idle_process(config: DistributedConfig, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process has nothing to do: work that needs no device runs on process 0 only.

    Raises:
        PlaceError: this process's index is unknown.
    """
    place = find_process_place(config, environment, lambda: tpu_pod_hints(platforms()))
    return place is not None and place.process != 0


def end_together(code: int) -> int:
    """Ends a finished run: waits for the other processes, so that no service they use disappears.

    Returns:
        The exit code.
    """
    peers = current_peers()
    if peers is None:
        return code
    import jax

    barrier("the end")
    # After the barrier, processes may end in any order.
    _state.final_code = code
    peers.part()
    jax.distributed.shutdown()
    # A preempted process saved its state, so its end is not a failure to the others.
    peers.leave(OK if code == PREEMPTED else code)
    return code


def end_alone(code: int, reason: str) -> int:
    """Ends a run that failed in this process; with several processes the others are notified and this never returns."""
    peers = current_peers()
    if peers is None:
        return code
    peers.leave(code, reason)
    _exit(code)


def exit_process(code: int) -> NoReturn:
    """Ends the program with an entry point's exit code; the last call of a `__main__`.

    After an interrupt the process ends at once: XLA may still be compiling in another thread, and crashes if the
    interpreter shuts the devices down meanwhile. Files are closed and leases released by then.
    """
    if code == INTERRUPTED and "jax" in sys.modules:
        _exit(code)
    sys.exit(code)


def is_reported_by_leader(message: str) -> bool:
    """Whether process 0 ended with the same error, which the other processes then do not repeat."""
    peers = current_peers()
    return peers is not None and peers.process != 0 and peers.exit_reason(0, SAME_ERROR_SECONDS) == message


def end_with_traceback(error: BaseException) -> int:
    """Ends one process of several after an unexpected error; a lost peer is reported as the cause instead."""
    peers = current_peers()
    assert peers is not None, "a process that is alone raises its errors"
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    # A collective fails at once if a peer dies; the heartbeat that identifies the peer takes a moment longer.
    if peers.wait_lost(SUSPECT_SECONDS):
        if os.environ.get("LEVANTER_TRACEBACK"):
            traceback.print_exception(error)
        _end_with(peers.lost())
    traceback.print_exception(error)
    return end_alone(INTERNAL_ERROR, reason)


def end_if_lost(error: BaseException) -> None:
    """Ends one process of several if a user error was caused by a collective that a peer has left.

    For example, a checkpoint cannot be written if the step before it failed; the user cannot fix that.
    """
    peers = current_peers()
    if peers is None:
        return
    import jax

    if not any(isinstance(cause, jax.errors.JaxRuntimeError) for cause in _causes(error)):
        return
    if peers.wait_lost(SUSPECT_SECONDS):
        if os.environ.get("LEVANTER_TRACEBACK"):
            traceback.print_exception(error)
        _end_with(peers.lost())


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and its chain of causes."""
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__


def _end_with(error: PeerLostError) -> NoReturn:
    """Prints the error and ends the process, regardless of its other threads."""
    # Never released: the first of several threads that get here ends the process.
    with _state.end_lock:
        # Not print: another thread may hold the lock of sys.stderr.
        os.write(2, f"\nerror: {error}\n".encode())
        if os.environ.get("LEVANTER_TRACEBACK"):
            faulthandler.dump_traceback(all_threads=True)
        for report in list(_state.on_peer_lost):
            # A closed event loop raises: there is no client left to notify.
            with contextlib.suppress(RuntimeError):
                report(str(error).splitlines()[0])
        peers = current_peers()
        if peers is not None:
            peers.leave(PEER_LOST, str(error).splitlines()[0])
        _exit(PEER_LOST)


def _exit(code: int) -> NoReturn:
    """Exits without running handlers that wait for peers."""
    # Another thread may hold a stream's lock forever, so the cleanup runs in a thread with a time limit.
    flusher = threading.Thread(target=_clean_up, daemon=True)
    flusher.start()
    time.sleep(LINGER_SECONDS)
    flusher.join(1.0)
    os._exit(code)


def _clean_up() -> None:
    """Best-effort cleanup before the process ends."""
    _flush()
    release_all()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _catch_aborts(peers: Peers) -> None:
    """Reports an abort caused by a lost peer like any other lost peer; other aborts keep their default action."""

    def action(number: int) -> None:
        # Runs in the aborting thread, which belongs to JAX's coordination service.
        if _state.final_code is not None:
            _exit(_state.final_code)
        if peers.wait_lost(SUSPECT_SECONDS):
            # The `on_lost` thread ends the process meanwhile; the exit below is a fallback.
            time.sleep(60)
            os._exit(PEER_LOST)
        _libc().signal(number, signal.SIG_DFL)

    # ctypes does not keep the callback alive, so the module does. A Python signal handler would never run: the aborting
    # thread is not the main thread.
    _state.abort_action = _SIGABRT_ACTION(action)
    _libc().signal(int(signal.SIGABRT), _state.abort_action)


def _libc() -> Any:
    return ctypes.CDLL(None)
