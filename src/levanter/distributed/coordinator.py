"""The hub: threads of process 0 that know which processes are there, where each one is, and who is gone.

At the start it calls the *roll*: it listens on the coordinator's port until every process has said hello, then stops
listening (JAX's own service takes the port over) and keeps the connections. From then on it opens *barriers* when
everybody is there, and tells everybody when somebody is gone: at once where a process was killed (its connection
closes), after the heartbeat timeout where a host vanished or hangs.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from levanter.distributed.connection import Message, Wire

logger = logging.getLogger(__name__)

TELL_SECONDS = 10.0
"""How often processes that have joined are told who else has."""


@dataclass(kw_only=True)
class ConnectedMember:
    """One process as the hub sees it.

    Attributes:
        process: its number.
        host: the host it runs on.
        pid: its number on that host.
        wire: the connection to it.
        where: the barrier it passed last, or waits in.
        since: since when, on the monotonic clock.
        ended: whether it said goodbye, or is gone.
    """

    process: int
    host: str
    pid: int
    wire: Wire
    where: str = "at the start"
    since: float = field(default_factory=time.monotonic)
    ended: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """What messages tell other processes of this one."""
        return {"process": self.process, "host": self.host, "pid": self.pid}

    def told(self) -> str:
        """Where it was last seen."""
        return f"{self.where} ({time.monotonic() - self.since:.0f} s ago)"


@dataclass(kw_only=True)
class _Barrier:
    here: dict[int, str] = field(default_factory=dict)


class RollCallError(ConnectionError):
    """The processes of a run did not come together."""

    exit_code = 5


class Hub:
    """See the module; it runs in threads of process 0 until the process ends.

    Args:
        listener: on the coordinator's port.
        processes: how many there are.
        versions: of process 0; the others must have the same.
        roll_seconds: how long the roll call may take.
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
        self._guests: dict[int, ConnectedMember] = {}
        self._barriers: dict[str, _Barrier] = {}
        self._open = False
        self._refused: str | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def start(self) -> socket.socket:
        """Starts the threads; the end of a connection for process 0 itself."""
        mine, own = socket.socketpair()
        _thread(self._receive, Wire(own), name="hub-receive")
        _thread(self._accept, name="hub-accept")
        _thread(self._roll, name="hub-roll")
        return mine

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            _keep_alive(connection)
            _thread(self._receive, Wire(connection), name="hub-receive")

    def _roll(self) -> None:
        """Waits until everybody is here, and tells those who are."""
        began, told = time.monotonic(), 0.0
        deadline = began + self._roll_seconds
        with self._changed:
            while len(self._guests) < self._processes and self._refused is None:
                now = time.monotonic()
                if now >= deadline:
                    missing = shown(set(range(self._processes)) - self._guests.keys())
                    self._refuse(
                        f"{len(self._guests)} of {self._processes} processes joined within "
                        f"{self._roll_seconds:.0f} s; missing: {missing}; joined: {self._names()}"
                    )
                    break
                if now - told >= TELL_SECONDS:
                    told = now
                    self._tell("present", processes=sorted(self._guests), seconds=round(now - began))
                self._changed.wait(min(1.0, deadline - now))
            if self._refused is None:
                self._open = True
        # Closing alone would leave the port to the thread that waits in `accept`.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._open:
            with self._lock:
                roster = [self._guests[n].facts for n in sorted(self._guests)]
                self._tell("go", roster=roster)
            self._beat()

    def _names(self) -> str:
        return ", ".join(f"{n} ({self._guests[n].host})" for n in sorted(self._guests))

    def _refuse(self, why: str) -> None:
        self._refused = why
        self._tell("refused", why=why)
        self._changed.notify_all()

    def _tell(self, kind: str, **fields: object) -> None:
        for guest in list(self._guests.values()):
            if not guest.ended:
                guest.wire.send(kind, **fields)

    def _receive(self, wire: Wire) -> None:
        guest: ConnectedMember | None = None
        for message in wire.messages():
            if guest is None:
                guest = self._welcome(message, wire)
                if guest is None:
                    break
            else:
                self._heard(guest, message)
        if guest is not None:
            self._closed(guest)
        else:
            # Somebody else's connection, or one that was refused: what it was told may still be on its way.
            time.sleep(0.5)
        wire.close()

    def _welcome(self, message: Message, wire: Wire) -> ConnectedMember | None:
        if message["kind"] != "hello":
            return None
        number, count = int(message["process"]), int(message["processes"])
        guest = ConnectedMember(process=number, host=str(message["host"]), pid=int(message["pid"]), wire=wire)
        with self._changed:
            why = self._refused or self._why_not(guest, count, message["versions"])
            if why is not None:
                wire.send("refused", why=why)
                if self._refused is None:
                    self._refuse(why)
                return None
            self._guests[number] = guest
            self._changed.notify_all()
        return guest

    def _why_not(self, guest: ConnectedMember, count: int, versions: Mapping[str, str]) -> str | None:
        """Why a process does not belong to this run."""
        number, there = guest.process, self._guests.get(guest.process)
        if count != self._processes:
            return f"process {number} on {guest.host} expects {count} processes, process 0 expects {self._processes}"
        if not 0 <= number < count:
            return f"a process on {guest.host} has number {number}; numbers range from 0 to {count - 1}"
        if there is not None:
            return (
                f"two processes have number {number}: on {there.host} (pid {there.pid}) and "
                f"on {guest.host} (pid {guest.pid})"
            )
        if versions != self._versions:
            return f"process {number} on {guest.host} has {_listed(versions)}, process 0 has {_listed(self._versions)}"
        return None

    def _heard(self, guest: ConnectedMember, message: Message) -> None:
        kind = message["kind"]
        with self._lock:
            if kind == "at":
                self._arrived(guest, message["barrier"], message["value"])
            elif kind == "who":
                here = self._barriers.get(message["barrier"], _Barrier()).here
                missing = [n for n in sorted(self._guests) if n not in here]
                where = {n: self._guests[n].told() for n in missing}
                guest.wire.send("missing", barrier=message["barrier"], processes=missing, where=where)
            elif kind == "decided":
                self._tell("decided", question=message["question"], answer=message["answer"])
            elif kind == "stop":
                self._tell("stop", process=guest.process)
            elif kind == "bye":
                guest.ended = True
                if message["code"] != 0:
                    self._gone(guest, why=message["said"], code=message["code"])

    def _arrived(self, guest: ConnectedMember, name: str, value: str) -> None:
        barrier = self._barriers.setdefault(name, _Barrier())
        barrier.here[guest.process] = value
        guest.where, guest.since = f"in barrier {name!r}", time.monotonic()
        if len(barrier.here) < self._processes:
            return
        del self._barriers[name]
        first = barrier.here[0]
        others = {n: value for n, value in sorted(barrier.here.items()) if value != first}
        for each in self._guests.values():
            each.where, each.since = f"after barrier {name!r}", time.monotonic()
        self._tell("open", barrier=name, first=first, others=others)

    def _closed(self, guest: ConnectedMember) -> None:
        with self._changed:
            if not self._open:
                # It may have been restarted and come again before the roll is complete.
                self._guests.pop(guest.process, None)
                self._changed.notify_all()
            elif not guest.ended:
                guest.ended = True
                self._gone(guest, why="its connection closed without notice: it or its host was killed", code=None)

    def _gone(self, guest: ConnectedMember, *, why: str, code: int | None) -> None:
        self._tell("gone", **guest.facts, why=why, code=code, where=guest.told())

    def _beat(self) -> None:
        """Says that process 0 is there, and notices who has been silent for too long."""
        every = self._heartbeat / 5
        last = time.monotonic()
        while True:
            time.sleep(every)
            now = time.monotonic()
            # Where this process itself stood still, what the others sent was not read.
            stood_still = now - last > 2 * every
            last = now
            with self._lock:
                self._tell("beat")
                for guest in self._guests.values():
                    if stood_still:
                        guest.wire.heard = now
                    elif not guest.ended and now - guest.wire.heard > self._heartbeat:
                        guest.ended = True
                        self._gone(guest, why=f"no heartbeat for {self._heartbeat:.0f} s", code=None)


def listen(port: int) -> socket.socket:
    """Listens on a port of this host, on all its addresses.

    Raises:
        RollCallError: something else does.
    """
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise RollCallError(
            f"process 0 cannot listen on port {port} of {socket.gethostname()}: {error.strerror or error}; "
            "another run may still be shutting down here, or another program is using the port"
        ) from error


def shown(processes: set[int] | list[int]) -> str:
    """Numbers, with ranges where they follow each other: `1, 4–7`."""
    parts: list[str] = []
    numbers = sorted(processes)
    at = 0
    while at < len(numbers):
        to = at
        while to + 1 < len(numbers) and numbers[to + 1] == numbers[to] + 1:
            to += 1
        parts.append(str(numbers[at]) if at == to else f"{numbers[at]}{'–' if to > at + 1 else ', '}{numbers[to]}")
        at = to + 1
    return ", ".join(parts)


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _thread(target: Callable[..., object], *args: object, name: str) -> None:
    threading.Thread(target=target, args=args, name=name, daemon=True).start()
