"""One process among several: joining the others, ending with them, and ending when one of them is lost.

A process whose peers are lost is usually stuck in a collective, where no exception reaches it. A thread notices,
reports who is lost and where, and ends the process with exit code 5. JAX's own service notices too and aborts the
process with a C++ stack trace; while the run has several processes, that signal is caught, and the same error is
printed instead.
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
from levanter.distributed.barrier import barrier, current_peers, set_peers
from levanter.distributed.initialize import DistributedConfig, find_place, join, on_tpu_pod, platforms, start_jax
from levanter.distributed.peers import PeerLostError, Peers
from levanter.io import release_all, setup_logging

logger = logging.getLogger(__name__)

PARTING_SECONDS = 0.3
"""Seconds that a failing process stays, so that its last message reaches the others."""
SUSPECT_SECONDS = 3.0
"""Seconds after an unexpected error within which a lost peer counts as its cause."""
SAME_ERROR_SECONDS = 3.0
_SIGABRT_ACTION = ctypes.CFUNCTYPE(None, ctypes.c_int)


@dataclass
class _Kept:
    """Objects that must live as long as the process."""

    abort_action: Any = None
    final: int | None = None
    ending: threading.Lock = field(default_factory=threading.Lock)
    last_words: list[Callable[[str], object]] = field(default_factory=list)


_kept = _Kept()


def join_processes(config: DistributedConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Joins the other processes of this run, if there are any; call it before anything asks JAX for devices.

    Raises:
        PlaceError: this process's index is unknown.
        RollCallError: not all of them joined in time.
    """
    import jax

    if current_peers() is not None or jax.distributed.is_initialized():
        return
    place = find_place(config, environment, lambda: on_tpu_pod(platforms()))
    if place is None:
        return
    setup_logging(process_index=place.process, process_count=place.processes)
    peers = join(config, place)
    set_peers(peers)
    peers.on_lost(_end_with)
    _catch_aborts(peers)
    start_jax(config, place)
    if place.process == 0:
        logger.info("%d processes, known from %s; process 0 is %s", place.processes, place.found, peers.roster[0])


@contextlib.contextmanager
def last_words(say: Callable[[str], object]) -> Iterator[None]:
    """Has `say` called with the reason if the process ends in the block because a peer is lost: somebody waits for it.

    Args:
        say: returns at once; it is called in another thread, and what it starts has some tenths of a second.
    """
    _kept.last_words.append(say)
    try:
        yield
    finally:
        _kept.last_words.remove(say)


def left_to_process_0(config: DistributedConfig, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process has nothing to do: work that needs no device is done by process 0, however many are started.

    Raises:
        PlaceError: this process's index is unknown.
    """
    place = find_place(config, environment, lambda: on_tpu_pod(platforms()))
    return place is not None and place.process != 0


def end_together(code: int) -> int:
    """Ends a finished run: waits for the others, so that no service disappears under them.

    Returns:
        The exit code.
    """
    peers = current_peers()
    if peers is None:
        return code
    import jax

    barrier("the end")
    # From here on, processes may end in any order.
    _kept.final = code
    peers.part()
    jax.distributed.shutdown()
    peers.leave(OK if code == PREEMPTED else code)
    return code


def end_alone(code: int, said: str) -> int:
    """Ends a run that failed here; with several processes the others are told why, and this call does not return."""
    peers = current_peers()
    if peers is None:
        return code
    peers.leave(code, said)
    _exit(code)


def leave(code: int) -> NoReturn:
    """Ends the program with an entry point's exit code; the last call of a `__main__`.

    After an interrupt the process ends at once: XLA may still be compiling in a thread of its own, and crashes if the
    interpreter takes the devices down meanwhile. What had to be closed or given back has been.
    """
    if code == INTERRUPTED and "jax" in sys.modules:
        _exit(code)
    sys.exit(code)


def is_said_already(said: str) -> bool:
    """Whether process 0 ended with the same error, which then is not shown by every process."""
    peers = current_peers()
    return peers is not None and peers.process != 0 and peers.said_by(0, SAME_ERROR_SECONDS) == said


def end_with_traceback(error: BaseException) -> int:
    """Ends one process of several after an unexpected error; if a peer is lost, that was its cause."""
    peers = current_peers()
    assert peers is not None, "a process that is alone raises its errors"
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    if peers.wait_lost(SUSPECT_SECONDS):
        if os.environ.get("LEVANTER_TRACEBACK"):
            traceback.print_exception(error)
        _end_with(peers.lost())
    traceback.print_exception(error)
    return end_alone(INTERNAL_ERROR, said)


def end_if_lost(error: BaseException) -> None:
    """Ends one process of several if a user error was caused by a collective that a peer has left.

    A checkpoint cannot be written if the step before it failed; the user cannot fix that.
    """
    peers = current_peers()
    if peers is None:
        return
    import jax

    if not any(isinstance(each, jax.errors.JaxRuntimeError) for each in _causes(error)):
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
    """Prints the error and ends the process, whatever its other threads are doing."""
    with _kept.ending:
        os.write(2, f"\nerror: {error}\n".encode())
        if os.environ.get("LEVANTER_TRACEBACK"):
            faulthandler.dump_traceback(all_threads=True)
        for say in list(_kept.last_words):
            # An event loop that has closed has nobody to tell.
            with contextlib.suppress(RuntimeError):
                say(str(error).splitlines()[0])
        peers = current_peers()
        if peers is not None:
            peers.leave(PEER_LOST, str(error).splitlines()[0])
        _exit(PEER_LOST)


def _exit(code: int) -> NoReturn:
    """Exits without waiting for anything that waits for peers."""
    # Another thread may hold a stream's lock forever.
    flusher = threading.Thread(target=_part, daemon=True)
    flusher.start()
    time.sleep(PARTING_SECONDS)
    flusher.join(1.0)
    os._exit(code)


def _part() -> None:
    """Best-effort cleanup before the process ends."""
    _flush()
    release_all()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _catch_aborts(peers: Peers) -> None:
    """Reports an abort caused by a lost peer like any other loss of a peer; other aborts are left alone."""

    def action(number: int) -> None:
        # Called in the thread that aborts, which is one of JAX's service.
        if _kept.final is not None:
            _exit(_kept.final)
        if peers.wait_lost(SUSPECT_SECONDS):
            # Either `on_lost` ends the process, or its own error does.
            time.sleep(60)
            os._exit(PEER_LOST)
        _libc().signal(number, signal.SIG_DFL)

    _kept.abort_action = _SIGABRT_ACTION(action)
    _libc().signal(int(signal.SIGABRT), _kept.abort_action)


def _libc() -> Any:
    return ctypes.CDLL(None)
