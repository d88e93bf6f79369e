"""How the processes of a run agree on checkpoints: process 0 decides, the others take its word.

Clocks differ, and so do random names. What depends on them is decided by process 0 and passed on as a short text
through `processes.meeting`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from levanter.checkpoint.errors import CheckpointPeerError
from levanter.distributed.peers import PeerLostError
from levanter.distributed.process_group import meeting


class Agreement:
    """The agreement of one group of questions.

    Args:
        name: a name that no other group of this run has.
        timeout_seconds: how long a process waits for the others.
    """

    def __init__(self, name: str, *, timeout_seconds: float):
        self._name = name
        self._timeout = timeout_seconds

    @property
    def decides(self) -> bool:
        """Whether this is the process that decides."""
        return meeting().decides

    def on(self, question: str, decide: Callable[[], str]) -> str:
        """What process 0's `decide` returns, on every process; the others' is not called.

        Raises:
            CheckpointPeerError: process 0 does not answer in time.
        """
        with _as_checkpoint_error():
            return meeting().follow(f"{self._name}: {question}", decide, seconds=self._timeout)

    def meet(self, point: str) -> None:
        """Waits until every process is here; `point` must be new each time. May be called from any thread.

        Raises:
            CheckpointPeerError: a process does not come in time.
        """
        with _as_checkpoint_error():
            meeting().wait(f"{self._name}: {point}", seconds=self._timeout)


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """Who waits for checkpoints knows one kind of error; `decide`'s own errors pass."""
    try:
        yield
    except PeerLostError as error:
        raise CheckpointPeerError(str(error)) from error
