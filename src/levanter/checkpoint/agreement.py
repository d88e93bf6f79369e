"""How the processes of a run agree: process 0 decides, the others take its word.

Clocks differ, and so do random names. What depends on them is decided by process 0 and passed on as a short text
through the run's `Peers`, or, where a program has joined its processes itself, through the service that
`jax.distributed` runs. No device takes part, so nothing waits for the step that is under way. All processes must ask
the same things in the same order.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from jax._src import distributed

from levanter.checkpoint.errors import CheckpointPeerError
from levanter.processes.barrier import current_peers
from levanter.processes.peers import PeerLostError

_LIVES = 200
"""So many answers are left to be read; older ones are deleted. No process is so many questions behind."""


class Agreement:
    """The agreement of one group of questions.

    Args:
        name: a name that no other group of this run has.
        timeout_seconds: how long a process waits for the others.
    """

    def __init__(self, name: str, *, timeout_seconds: float):
        self._name = name
        self._timeout = timeout_seconds
        self._count = itertools.count()

    @property
    def decides(self) -> bool:
        """Whether this is the process that decides."""
        return jax.process_index() == 0

    def on(self, question: str, decide: Callable[[], str]) -> str:
        """What process 0's `decide` returns, on every process; the others' is not called.

        Raises:
            CheckpointPeerError: process 0 does not answer in time.
        """
        if jax.process_count() == 1:
            return decide()
        peers = current_peers()
        if peers is not None:
            with _as_checkpoint_error():
                return peers.follow(f"{self._name}: {question}", decide, seconds=self._timeout)
        number, client = next(self._count), _client()
        if self.decides:
            answer = decide()
            client.key_value_set(self._key(number, question), answer)
            if number >= _LIVES:
                client.key_value_delete(self._key(number - _LIVES))
            return answer
        try:
            return client.blocking_key_value_get(self._key(number, question), self._milliseconds)
        except jax.errors.JaxRuntimeError as error:
            raise self._late(question, error) from error

    def meet(self, point: str) -> None:
        """Waits until every process is here; `point` must be new each time. May be called from any thread.

        Raises:
            CheckpointPeerError: a process does not come in time.
        """
        if jax.process_count() == 1:
            return
        peers = current_peers()
        if peers is not None:
            with _as_checkpoint_error():
                peers.meet(f"{self._name}: {point}", seconds=self._timeout)
            return
        try:
            _client().wait_at_barrier(f"{self._name}/{point}", self._milliseconds)
        except jax.errors.JaxRuntimeError as error:
            raise self._late(point, error) from error

    @property
    def _milliseconds(self) -> int:
        return int(self._timeout * 1000)

    def _key(self, number: int, question: str | None = None) -> str:
        return f"{self._name}/{number}/" + (question or "")

    def _late(self, point: str, error: Exception) -> CheckpointPeerError:
        first = str(error).splitlines()[0]
        return CheckpointPeerError(
            f"{self._name}: process {jax.process_index()} of {jax.process_count()} waited {self._timeout:g} s at "
            f"{point!r} for the others ({first})"
        )


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """Who waits for checkpoints knows one kind of error; `decide`'s own errors pass."""
    try:
        yield
    except PeerLostError as error:
        raise CheckpointPeerError(str(error)) from error


def _client():
    # The store of keys and the barriers of `jax.distributed` have no public door; Orbax uses the same one.
    client = distributed.global_state.client
    assert client is not None, "several processes without jax.distributed"
    return client
