"""How the processes of a run connect at the start, and what is logged while some are missing.

Process 0 listens on the coordinator's port; the others try to connect until it answers, and each sends its number, host
and versions. Process 0 logs how many have joined. When all have, the port is free again and each process has a `Peers`.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from levanter.distributed.connection import Connection, Message
from levanter.distributed.coordinator import Coordinator, RendezvousError, format_processes, listen
from levanter.distributed.peers import WHO_SECONDS, Member, Peers, Timeouts

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
CONNECT_SECONDS = 10.0
TAKEN_PORT_SECONDS = 3.0
"""Seconds that a program which has the coordinator's port may take to answer, if it is a coordinator."""


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """A process's place in a run.

    Attributes:
        coordinator: `host:port` of process 0.
        processes: how many there are.
        process: the number of this one.
        local_devices: the devices it may use; None for all.
        source: where these values come from.
    """

    coordinator: str
    processes: int
    process: int
    local_devices: tuple[int, ...] | None = None
    source: str = "trainer.distributed"

    @property
    def address(self) -> tuple[str, int]:
        """The coordinator's host and port."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def connect_peers(place: ProcessPlace, *, versions: Mapping[str, str], timeouts: Timeouts) -> Peers:
    """Waits until all processes of the run have joined, and logs meanwhile how many have.

    Args:
        place: this process's.
        versions: versions that must be the same on all of them.
        timeouts: how long they wait for each other.

    Raises:
        RendezvousError: not all came in time, or their numbers or versions differ; lists who is missing.
    """
    if place.process == 0:
        try:
            listener = listen(place.address[1])
        except RendezvousError as error:
            # Often a second process 0 of this run, whose coordinator then waits for the others until its timeout.
            if (why := _refusal_of_listener(place, versions)) is None:
                raise
            raise RendezvousError(why) from error
        hub = Coordinator(
            listener,
            processes=place.processes,
            versions=versions,
            roll_seconds=timeouts.roll,
            heartbeat_seconds=timeouts.heartbeat,
        )
        # Process 0 joins through the same handshake as all others, over a socket pair.
        peers = _Handshake(Connection(hub.start()), place, versions, timeouts).peers()
        assert peers is not None, "the hub closed its own process's connection"
        return peers
    reported_at = began = time.monotonic()
    while True:
        why = "it closed the connection"
        try:
            connection = socket.create_connection(place.address, timeout=CONNECT_SECONDS)
        except OSError as error:
            why = error.strerror or str(error)
        else:
            # The timeout was for connecting: the connection is read for the whole run, however quiet it is.
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peers = _Handshake(Connection(connection), place, versions, timeouts).peers()
            # None means that the connection closed without an answer (process 0 was restarted, say): it is tried again.
            if peers is not None:
                return peers
        now = time.monotonic()
        if now - began >= timeouts.roll:
            raise RendezvousError(
                f"process {place.process} of {place.processes}: process 0 does not answer at {place.coordinator} "
                f"({why}) after {timeouts.roll:.0f} s: it did not start, it started elsewhere, or a firewall blocks "
                "the connection"
            )
        if now - reported_at >= WHO_SECONDS:
            reported_at = now
            logger.warning(
                "process %d of %d: waiting for process 0 at %s (%s)",
                place.process,
                place.processes,
                place.coordinator,
                why,
            )
        time.sleep(RETRY_SECONDS)


def _refusal_of_listener(place: ProcessPlace, versions: Mapping[str, str]) -> str | None:
    """The reason for which the coordinator that has this process's port refuses it; None if it is another program.

    The coordinator refuses the processes that have joined it with the same reason, so that they do not wait either.
    """
    try:
        connection = socket.create_connection(("localhost", place.address[1]), timeout=TAKEN_PORT_SECONDS)
    except OSError:
        return None
    wire = Connection(connection)
    _say_hello(wire, place, versions)
    refusals = (message.get("why") for message in wire.messages() if message["kind"] == "refused")
    why = next(refusals, None)
    wire.close()
    return why if isinstance(why, str) else None


def _say_hello(wire: Connection, place: ProcessPlace, versions: Mapping[str, str]) -> None:
    """Sends the first message; the coordinator checks number, count and versions before it counts this process."""
    wire.send(
        "hello",
        process=place.process,
        processes=place.processes,
        host=socket.gethostname(),
        pid=os.getpid(),
        versions=dict(versions),
    )


class _Handshake:
    """Sends one process's hello and waits for the answer; its thread keeps receiving for the entire run."""

    def __init__(self, wire: Connection, place: ProcessPlace, versions: Mapping[str, str], timeouts: Timeouts):
        self._wire, self._place, self._timeouts = wire, place, timeouts
        self._peers: Peers | None = None
        self._refused: str | None = None
        self._answered = threading.Event()
        _say_hello(wire, place, versions)
        threading.Thread(target=self._receive, name="peers-receive", daemon=True).start()

    def peers(self) -> Peers | None:
        """The peers, once all processes have joined; None where process 0 closed the connection before.

        Raises:
            RendezvousError: the coordinator refused the run.
        """
        # The coordinator reports when time is up; a little more is for one that hangs.
        # Set by `go`, by a refusal, or when the connection closes.
        self._answered.wait(self._timeouts.roll + WHO_SECONDS)
        if self._peers is not None:
            self._peers.start()
            return self._peers
        self._wire.close()
        if self._refused is not None:
            raise RendezvousError(self._refused)
        return None

    def _receive(self) -> None:
        for message in self._wire.messages():
            if self._peers is not None:
                # After `go` every message is for the run's barriers, decisions and departures.
                self._peers.heard(message)
            elif message["kind"] == "present":
                self._log(message)
            elif message["kind"] == "refused":
                self._refused = message["why"]
                break
            elif message["kind"] == "go":
                roster = tuple(Member(**fields) for fields in message["roster"])
                self._peers = Peers(self._wire, process=self._place.process, roster=roster, timeouts=self._timeouts)
                # Only after `_peers` is set, which the waiting thread reads.
                self._answered.set()
        if self._peers is not None:
            # The coordinator closed the connection, or its host is gone.
            self._peers.hub_closed()
        self._answered.set()

    def _log(self, message: Message) -> None:
        joined, count = message["processes"], self._place.processes
        missing = set(range(count)) - set(joined)
        if missing and message["seconds"] > 0 and self._place.process == 0:
            logger.warning(
                "%d of %d processes have joined after %d s; missing: %s",
                len(joined),
                count,
                message["seconds"],
                format_processes(missing),
            )
