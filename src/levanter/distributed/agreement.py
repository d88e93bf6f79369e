"""What the processes of a run agree on: that all are here, one value for all, the step to stop after.

For code that does not hold the `Peers` of this process:

    barrier("loading")                        all processes are here, or an error that lists which are missing
    id_ = agreed("run id", random_id())       process 0's value
    require_same("the text", digest)          all have the same value, or an error that lists which differ

With one process they return at once. All processes must pass the same barriers in the same order.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from levanter.distributed.peers import Peers, PeersDifferError

ONE_FOR_ALL_SECONDS = 24 * 3600.0
"""Seconds that processes wait for one that works for all of them: tokenizes, exports to a bucket. If it is lost, they
learn so within seconds."""

_SHOWN_VALUES = 3


@dataclass
class _Current:
    peers: Peers | None = None


_current = _Current()


def set_peers(peers: Peers | None) -> None:
    """Makes `peers` those of this process."""
    _current.peers = peers


def current_peers() -> Peers | None:
    """The peers of this process; None where it is alone."""
    return _current.peers


def is_process_0() -> bool:
    """Whether this process is the first of its run, or alone: the one that prints."""
    return _current.peers is None or _current.peers.process == 0


def barrier(name: str, *, seconds: float | None = None) -> None:
    """Waits until every process is here.

    Args:
        name: what all processes are about to do, in two or three words.
        seconds: how long to wait; None for the run's `barrier_timeout`.

    Raises:
        PeerLostError: a process did not come; lists which, and where each was last seen.
    """
    if _current.peers is not None:
        _current.peers.meet(name, seconds=seconds)


def agreed(name: str, value: str) -> str:
    """Process 0's value, on every process.

    Raises:
        PeerLostError: a process did not come.
    """
    # Every process sends its own value; only process 0's is returned.
    return value if _current.peers is None else _current.peers.meet(name, value=value)[0]


def require_same(name: str, value: str, *, advice: str, seconds: float | None = None) -> None:
    """Refuses a run whose processes have different values.

    Args:
        name: what it is.
        value: this process's, short enough to be shown.
        advice: what to do where they differ.
        seconds: how long to wait for the others; None for the run's `barrier_timeout`.

    Raises:
        PeersDifferError: on every process; lists which processes differ.
        PeerLostError: a process did not come.
    """
    if _current.peers is None:
        return
    # All processes receive the same answer, so all of them raise or none does.
    first, others = _current.peers.meet(name, value=value, seconds=seconds)
    if others:
        lines = [f"  {_current.peers.roster[n]}: {text}" for n, text in others.items()]
        more = [f"  and {len(lines) - 4} more"] if len(lines) > 4 else []
        raise PeersDifferError(
            "\n".join(
                [
                    f"{name} differs between processes:",
                    f"  {_current.peers.roster[0]}: {first}",
                    *lines[:4],
                    *more,
                    f"  → {advice}",
                ]
            )
        )


def require_same_values(name: str, values: Mapping[str, str], *, advice: str) -> None:
    """Refuses a run whose processes differ in any of many values; says which differ, and where.

    Args:
        name: what they are.
        values: this process's.
        advice: what to do where they differ.

    Raises:
        PeersDifferError: on every process; lists which processes differ, and in which values.
        PeerLostError: a process did not come.
    """
    if _current.peers is None:
        return
    text = json.dumps(values, sort_keys=True)
    # A digest is enough to see whether values differ; the text is exchanged only if they do.
    _, others = _current.peers.meet(name, value=hashlib.sha256(text.encode()).hexdigest())
    if not others:
        return
    # `others` is the same on all processes, so all of them make this second exchange.
    expected = json.loads(agreed(name, text))
    wrong = [
        f"{key} {values.get(key, 'absent')} (process 0: {expected.get(key, 'absent')})"
        for key in sorted({*values, *expected})
        if values.get(key) != expected.get(key)
    ]
    more = f", and {len(wrong) - _SHOWN_VALUES} more" if len(wrong) > _SHOWN_VALUES else ""
    differences = "; ".join(wrong[:_SHOWN_VALUES]) + more
    require_same(name, differences or f"{len(values)} values", advice=advice)


def agreed_stop(should_stop: Callable[[], bool]) -> Callable[[], bool]:
    """A function that all processes call after every step: whether the run is to stop, the same answer on all of them.

    A signal to one process is enough; all stop after the same step.

    Args:
        should_stop: whether this process was signalled to stop.
    """
    peers = _current.peers
    if peers is None:
        return should_stop

    # Called after every step, so the exchange must not wait for peers: only process 0's answer is waited for.
    def stop() -> bool:
        if should_stop():
            peers.request_stop()
        # Process 0's answer counts for all: a process that stopped by its own signal alone would leave the others
        # waiting.
        return peers.follow("stop", lambda: str(int(peers.is_stopping or should_stop()))) == "1"

    return stop


@contextmanager
def process_0_first(name: str, *, seconds: float) -> Iterator[None]:
    """Runs a block on process 0, then on all others, which find what it has written to a shared disk.

    Args:
        name: what is done.
        seconds: how long the others wait for it.

    Raises:
        PeerLostError: process 0 did not finish it in time.
    """
    peers = _current.peers
    # The others wait before the block, process 0 after it: the meeting marks the end of process 0's work.
    if peers is not None and peers.process != 0:
        peers.meet(name, seconds=seconds)
    yield
    if peers is not None and peers.process == 0:
        peers.meet(name, seconds=seconds)
