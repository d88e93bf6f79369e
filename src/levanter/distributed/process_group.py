"""Barriers and broadcasts between the processes of a program: one interface, two implementations.

A run that levanter started has `Peers`: connections of our own, which report a lost process within seconds. A program
that joined its processes itself, by `jax.distributed.initialize`, has the service that JAX runs. `process_group()`
returns the one there is. No device takes part, so nothing waits for the step that is under way. All processes must call
the same methods with the same names in the same order.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import jax
from jax._src import distributed

from levanter.distributed.agreement import current_peers
from levanter.distributed.peers import PeerLostError, Peers

_KEPT_ANSWERS = 200
"""Answers that are kept in JAX's store; older ones are deleted. No process lags behind by that many questions."""


class ProcessGroup(Protocol):
    """The processes of a program."""

    @property
    def decides(self) -> bool:
        """Whether this is the process that decides: the first."""
        ...

    def follow(self, question: str, decide: Callable[[], str], *, seconds: float) -> str:
        """Returns the result of process 0's `decide` on every process; only process 0 calls it.

        Args:
            question: the name of the decision; the nth use of a name is a decision of its own.
            decide: called on process 0 only.
            seconds: how long the others wait.

        Raises:
            PeerLostError: process 0 does not answer in time.
        """
        ...

    def wait(self, point: str, *, seconds: float) -> None:
        """Waits until every process is here; may be called from any thread.

        Args:
            point: new each time.
            seconds: how long to wait for the other processes.

        Raises:
            PeerLostError: a process does not come in time.
        """
        ...


class SingleProcess:
    """A program of one process."""

    decides = True

    def follow(self, question: str, decide: Callable[[], str], *, seconds: float) -> str:
        """What `decide` returns."""
        del question, seconds
        return decide()

    def wait(self, point: str, *, seconds: float) -> None:
        """Returns at once."""
        del point, seconds


class PeerGroup:
    """A run that has `Peers`."""

    def __init__(self, peers: Peers):
        self._peers = peers

    @property
    def decides(self) -> bool:
        """Whether this is process 0."""
        return self._peers.process == 0

    def follow(self, question: str, decide: Callable[[], str], *, seconds: float) -> str:
        """See `ProcessGroup`."""
        return self._peers.follow(question, decide, seconds=seconds)

    def wait(self, point: str, *, seconds: float) -> None:
        """See `ProcessGroup`."""
        self._peers.meet(point, seconds=seconds)


class JaxGroup:
    """A program that joined its processes by `jax.distributed.initialize`."""

    def __init__(self) -> None:
        # The key-value store and the barriers have no public API; Orbax uses the same private one.
        # JAX's coordination service, over which `jax.distributed` itself synchronizes.
        client = distributed.global_state.client
        assert client is not None, "several processes without jax.distributed"
        self._client = client
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._answer_keys: deque[str] = deque()

    @property
    def decides(self) -> bool:
        """Whether this is process 0."""
        return jax.process_index() == 0

    def follow(self, question: str, decide: Callable[[], str], *, seconds: float) -> str:
        """See `ProcessGroup`."""
        # The training thread and the checkpoint thread both call this.
        with self._lock:
            number = self._counts[question] = self._counts.get(question, 0) + 1
        key = f"levanter/{question}/{number}"
        if self.decides:
            answer = decide()
            self._client.key_value_set(key, answer)
            with self._lock:
                self._answer_keys.append(key)
                # The service keeps every key until it is deleted, in the memory of process 0.
                old = self._answer_keys.popleft() if len(self._answer_keys) > _KEPT_ANSWERS else None
            if old is not None:
                self._client.key_value_delete(old)
            return answer
        try:
            # Blocks without a device, so a step that is under way is not disturbed.
            return self._client.blocking_key_value_get(key, int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise self._late(question, seconds, error) from error

    def wait(self, point: str, *, seconds: float) -> None:
        """See `ProcessGroup`."""
        try:
            # Callers give a new name each time, because a barrier that was passed cannot be entered again.
            self._client.wait_at_barrier(f"levanter/{point}", int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise self._late(point, seconds, error) from error

    def _late(self, point: str, seconds: float, error: Exception) -> PeerLostError:
        first = str(error).splitlines()[0]
        return PeerLostError(
            f"process {jax.process_index()} of {jax.process_count()} waited {seconds:g} s at {point!r} for the other "
            "processes "
            f"({first})"
        )


_service: dict[int, JaxGroup] = {}


def process_group() -> ProcessGroup:
    """The processes of this program, by whichever carrier it has."""
    peers = current_peers()
    if peers is not None:
        # Not cached: peers may be set after the first call.
        return PeerGroup(peers)
    if jax.process_count() == 1:
        return SingleProcess()
    # One for each client: a program may leave its processes and join others.
    return _service.setdefault(id(distributed.global_state.client), JaxGroup())
