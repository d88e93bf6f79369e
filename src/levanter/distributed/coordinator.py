"""The coordinator: threads of process 0 that know which processes have joined, where each one is, and which are gone.

At the start it listens on the coordinator's port until every process has sent `hello`, then stops listening (JAX's own
service takes the port over) and keeps the connections. From then on it opens each *barrier* when all processes have
reached it, and reports to all when a process is gone: at once where a process was killed (its connection closes), after
the heartbeat timeout where a host vanished or hangs.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from levanter.distributed.connection import Connection, Message

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0
"""Seconds between two messages to the joined processes about which others have joined."""


@dataclass(kw_only=True)
class ConnectedMember:
    """One process as the coordinator sees it.

    Attributes:
        process: its number.
        host: the host it runs on.
        pid: its number on that host.
        wire: the connection to it.
        where: the barrier it passed last, or waits in.
        since: since when, on the monotonic clock.
        ended: whether it announced its end, or is gone.
    """

    process: int
    host: str
    pid: int
    wire: Connection
    where: str = "at the start"
    since: float = field(default_factory=time.monotonic)
    ended: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """The fields that identify this process in messages to the others."""
        return {"process": self.process, "host": self.host, "pid": self.pid}

    def last_seen(self) -> str:
        """Where it was last seen."""
        return f"{self.where} ({time.monotonic() - self.since:.0f} s ago)"


@dataclass(kw_only=True)
class _Barrier:
    here: dict[int, str] = field(default_factory=dict)


class RendezvousError(ConnectionError):
    """The processes of a run could not all be connected."""

    exit_code = 5


class Coordinator:
    """See the module; it runs in threads of process 0 until the process ends.

    Args:
        listener: on the coordinator's port.
        processes: how many there are.
        versions: of process 0; the others must have the same.
        roll_seconds: how long the processes may take to join.
        heartbeat_seconds: how long a process may be silent.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        processes: int,
        versions: Mapping[str, str],
        roll_seconds: float,
        heartbeat_seconds: float,
    ):
        self._listener = listener
        self._processes = processes
        self._versions = dict(versions)
        self._roll_seconds = roll_seconds
        self._heartbeat = heartbeat_seconds
        self._members: dict[int, ConnectedMember] = {}
        self._barriers: dict[str, _Barrier] = {}
        self._open = False
        self._refused: str | None = None
        # Reentrant: `_refuse` and `_gone` are called by methods that hold it, and may be called by ones that do not.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def start(self) -> socket.socket:
        """Starts the threads; the end of a connection for process 0 itself."""
        # Process 0 is a member like any other; its connection is a socket pair instead of TCP.
        local, remote = socket.socketpair()
        _thread(self._receive, Connection(remote), name="hub-receive")
        _thread(self._accept, name="hub-accept")
        _thread(self._roll, name="hub-roll")
        return local

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # `_roll` closed the listener: everyone has joined, or the run was refused.
                return
            _keep_alive(connection)
            _thread(self._receive, Connection(connection), name="hub-receive")

    def _roll(self) -> None:
        """Waits until all processes have joined, reports progress to those that have, and starts the run."""
        began, reported_at = time.monotonic(), 0.0
        deadline = began + self._roll_seconds
        with self._changed:
            while len(self._members) < self._processes and self._refused is None:
                now = time.monotonic()
                if now >= deadline:
                    missing = format_processes(set(range(self._processes)) - self._members.keys())
                    self._refuse(
                        f"{len(self._members)} of {self._processes} processes joined within "
                        f"{self._roll_seconds:.0f} s; missing: {missing}; joined: {self._names()}"
                    )
                    break
                if now - reported_at >= PROGRESS_SECONDS:
                    reported_at = now
                    self._tell("present", processes=sorted(self._members), seconds=round(now - began))
                self._changed.wait(min(1.0, deadline - now))
            if self._refused is None:
                self._open = True
        # Closing alone would leave the port to the thread that waits in `accept`.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        # The port must be free before any process hears `go`: JAX's own service is started on it next.
        if self._open:
            with self._lock:
                roster = [self._members[n].facts for n in sorted(self._members)]
                self._tell("go", roster=roster)
            self._beat()

    def _names(self) -> str:
        return ", ".join(f"{n} ({self._members[n].host})" for n in sorted(self._members))

    def _refuse(self, why: str) -> None:
        self._refused = why
        self._tell("refused", why=why)
        self._changed.notify_all()

    def _tell(self, kind: str, **fields: object) -> None:
        for member in list(self._members.values()):
            if not member.ended:
                member.wire.send(kind, **fields)

    def _receive(self, wire: Connection) -> None:
        member: ConnectedMember | None = None
        for message in wire.messages():
            # The first message of a connection must be a hello; only then its messages count.
            if member is None:
                member = self._welcome(message, wire)
                if member is None:
                    break
            else:
                self._heard(member, message)
        if member is not None:
            self._closed(member)
        else:
            # A connection of another program, or one that was refused: the refusal may still be on its way.
            time.sleep(0.5)
        wire.close()

    def _welcome(self, message: Message, wire: Connection) -> ConnectedMember | None:
        if message["kind"] != "hello":
            return None
        number, count = int(message["process"]), int(message["processes"])
        member = ConnectedMember(process=number, host=str(message["host"]), pid=int(message["pid"]), wire=wire)
        with self._changed:
            why = self._refused or self._why_not(member, count, message["versions"])
            # One process that does not fit ends the start for all of them: the run could never be complete.
            if why is not None:
                wire.send("refused", why=why)
                if self._refused is None:
                    self._refuse(why)
                return None
            self._members[number] = member
            self._changed.notify_all()
        return member

    def _why_not(self, member: ConnectedMember, count: int, versions: Mapping[str, str]) -> str | None:
        """Why a process cannot join this run; None where it can."""
        number, registered = member.process, self._members.get(member.process)
        if count != self._processes:
            return f"process {number} on {member.host} expects {count} processes, process 0 expects {self._processes}"
        if not 0 <= number < count:
            return f"a process on {member.host} has number {number}; numbers range from 0 to {count - 1}"
        if registered is not None:
            return (
                f"two processes have number {number}: on {registered.host} (pid {registered.pid}) and "
                f"on {member.host} (pid {member.pid})"
            )
        if versions != self._versions:
            return f"process {number} on {member.host} has {_listed(versions)}, process 0 has {_listed(self._versions)}"
        return None

    def _heard(self, member: ConnectedMember, message: Message) -> None:
        kind = message["kind"]
        with self._lock:
            if kind == "at":
                self._arrived(member, message["barrier"], message["value"])
            elif kind == "who":
                arrived = self._barriers.get(message["barrier"], _Barrier()).here
                missing = [n for n in sorted(self._members) if n not in arrived]
                where = {n: self._members[n].last_seen() for n in missing}
                member.wire.send("missing", barrier=message["barrier"], processes=missing, where=where)
            elif kind == "decided":
                self._tell("decided", question=message["question"], answer=message["answer"])
            elif kind == "stop":
                self._tell("stop", process=member.process)
            elif kind == "bye":
                # Set before the connection closes, so that `_closed` does not report the same process as killed.
                member.ended = True
                if message["code"] != 0:
                    self._gone(member, why=message["reason"], code=message["code"])

    def _arrived(self, member: ConnectedMember, name: str, value: str) -> None:
        barrier = self._barriers.setdefault(name, _Barrier())
        barrier.here[member.process] = value
        member.where, member.since = f"in barrier {name!r}", time.monotonic()
        # A process that has ended never arrives; the others learn of it from `gone` and stop waiting.
        if len(barrier.here) < self._processes:
            return
        del self._barriers[name]
        first = barrier.here[0]
        others = {n: value for n, value in sorted(barrier.here.items()) if value != first}
        # Everyone has passed the barrier, so this is where each of them was last seen from now on.
        for other in self._members.values():
            other.where, other.since = f"after barrier {name!r}", time.monotonic()
        self._tell("open", barrier=name, first=first, others=others)

    def _closed(self, member: ConnectedMember) -> None:
        with self._changed:
            if not self._open:
                # It may have been restarted and come again before the roll is complete.
                self._members.pop(member.process, None)
                self._changed.notify_all()
            elif not member.ended:
                member.ended = True
                self._gone(member, why="its connection closed without notice: it or its host was killed", code=None)

    def _gone(self, member: ConnectedMember, *, why: str, code: int | None) -> None:
        self._tell("gone", **member.facts, why=why, code=code, where=member.last_seen())

    def _beat(self) -> None:
        """Sends the heartbeats of process 0, and reports processes that have been silent for too long."""
        period = self._heartbeat / 5
        # Five beats fit into the timeout: a few may be late or lost.
        last = time.monotonic()
        while True:
            time.sleep(period)
            now = time.monotonic()
            # Where this process itself stood still, what the others sent was not read.
            stood_still = now - last > 2 * period
            last = now
            with self._lock:
                self._tell("beat")
                for member in self._members.values():
                    if stood_still:
                        member.wire.heard = now
                    elif not member.ended and now - member.wire.heard > self._heartbeat:
                        member.ended = True
                        self._gone(member, why=f"no heartbeat for {self._heartbeat:.0f} s", code=None)


def listen(port: int) -> socket.socket:
    """Listens on a port of this host, on all its addresses.

    Raises:
        RendezvousError: something else does.
    """
    try:
        # One socket for IPv4 and IPv6: processes may find this host's name as either.
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise RendezvousError(
            f"process 0 cannot listen on port {port} of {socket.gethostname()}: {error.strerror or error}; "
            "another run may still be shutting down here, another process may have number 0 too, or another program is "
            "using the port"
        ) from error


def format_processes(processes: set[int] | list[int]) -> str:
    """Numbers, with ranges where they follow each other: `1, 4–7`."""
    ranges: list[str] = []
    numbers = sorted(processes)
    at = 0
    while at < len(numbers):
        to = at
        while to + 1 < len(numbers) and numbers[to + 1] == numbers[to] + 1:
            to += 1
        # Two numbers are listed, three and more are a range.
        ranges.append(str(numbers[at]) if at == to else f"{numbers[at]}{'–' if to > at + 1 else ', '}{numbers[to]}")
        at = to + 1
    return ", ".join(ranges)


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Messages are short and waited for; they must not be held back to be sent together.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _thread(target: Callable[..., object], *args: object, name: str) -> None:
    threading.Thread(target=target, args=args, name=name, daemon=True).start()
