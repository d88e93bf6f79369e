"""The processes of a run, as each of them sees the others: barriers with names, and who is gone.

All processes of a run take the same steps. Before a phase in which they need each other (loading, the first step, a
save, an export, the end) they *meet* at a **barrier**, which has a name and a timeout; the error of a barrier that
times out lists which processes are missing and where each was last seen. Between barriers a process may be stuck in a
collective that one of its peers has left: then only a thread can notice. It does so within seconds where a process was
killed and within the heartbeat timeout where a host vanished, and calls the function that `on_lost` was given.

With one process nothing is started, and a barrier returns at once.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from levanter.distributed.connection import Connection, Message
from levanter.distributed.coordinator import format_processes

logger = logging.getLogger(__name__)

PEER_LOST = 5
"""The exit code of a process whose peers are missing."""
GATHER_SECONDS = 1.0
"""Seconds between the first lost peer and the report, so that it names all that were lost together."""
SAME_ERROR_SECONDS = 10.0
"""Seconds that a process has to hit the error itself that another one has ended with: all may share it."""
WHO_SECONDS = 10.0
"""Seconds between two questions of a waiting process which processes it is waiting for."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """The timeouts of the processes of a run, in seconds.

    Attributes:
        roll: at the start, until all have joined.
        barrier: in a barrier that has no timeout of its own.
        heartbeat: how long a process may be silent before it counts as gone.
    """

    roll: float = 300.0
    barrier: float = 1800.0
    heartbeat: float = 100.0


class PeerLostError(ConnectionError):
    """A process of the run is gone, or did not come to a barrier in time."""

    exit_code = PEER_LOST


class PeersDifferError(ValueError):
    """The processes of a run were started with different values."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process of the run.

    Attributes:
        process: its number.
        host: the host it runs on.
        pid: its number on that host.
    """

    process: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.process} ({self.host}, pid {self.pid})"


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A process that is gone.

    Attributes:
        member: which.
        why: how that is known.
        where: the barrier it waited in or had passed last.
        code: its exit code, where it announced its end.
    """

    member: Member
    why: str
    where: str
    code: int | None

    def __str__(self) -> str:
        outcome = f"ended with exit code {self.code}: {self.why}" if self.code is not None else f"was lost: {self.why}"
        return f"{self.member} {outcome}; last seen {self.where}"


class Peers:
    """The processes of this run; `connect_peers` makes it.

    Args:
        wire: the connection to the coordinator.
        process: this one's number.
        roster: all processes, in order.
        timeouts: how long they wait for each other.
    """

    def __init__(self, wire: Connection, *, process: int, roster: tuple[Member, ...], timeouts: Timeouts):
        self.process = process
        self.roster = roster
        self._wire = wire
        self._timeouts = timeouts
        self._changed = threading.Condition()
        self._opened: dict[str, Message] = {}
        self._missing: dict[str, Message] = {}
        self._met: dict[str, int] = {}
        self._decided: dict[str, str] = {}
        self._where = "at the start"
        self._departed: list[Departure] = []
        self._leaving = self._has_left = False
        self._stop = False

    @property
    def count(self) -> int:
        """The number of processes."""
        return len(self.roster)

    @property
    def is_stopping(self) -> bool:
        """Whether any process has received a signal to stop."""
        return self._stop

    def request_stop(self) -> None:
        """Informs process 0 (and all others) that this process has received a signal to stop."""
        if not self._stop:
            self._wire.send("stop")

    def meet(self, name: str, *, value: str = "", seconds: float | None = None) -> tuple[str, Mapping[int, str]]:
        """Waits until every process is in the barrier of this name; the nth use of a name is a barrier of its own.

        Args:
            name: of the barrier.
            value: the value that this process sends to the others.
            seconds: how long it waits for the others.

        Returns:
            The value of process 0, and the values of the processes that sent another one, by number.

        Raises:
            PeerLostError: a process did not come in time, or is gone; names it and where it was last seen.
        """
        limit = self._timeouts.barrier if seconds is None else seconds
        with self._changed:
            # All processes count a name's meetings alike, so the number tells the nth meeting from the ones before.
            number = self._met[name] = self._met.get(name, 0) + 1
            key = name if number == 1 else f"{name} ({number})"
            self._where = f"in barrier {key!r}"
        began = queried_at = time.monotonic()
        shown_at = began
        self._wire.send("at", barrier=key, value=value)
        with self._changed:
            while key not in self._opened:
                if self._departed:
                    # Waiting on the condition releases its lock, so that the receiving thread can record further
                    # departures meanwhile.
                    self._changed.wait_for(lambda: False, GATHER_SECONDS)
                    raise self.lost(f"in barrier {key!r}")
                now = time.monotonic()
                # The limit is checked only after departures: a lost process is the better explanation of a timeout.
                if now - began >= limit:
                    raise PeerLostError(self._late(key, limit))
                # Which processes are missing is known to the coordinator only; the answer is used if this barrier times
                # out.
                if now - queried_at >= min(WHO_SECONDS, limit / 3):
                    queried_at = now
                    self._wire.send("who", barrier=key)
                if now - shown_at >= 3 * WHO_SECONDS and key in self._missing:
                    shown_at = now
                    logger.info("%s", self._waiting(key, now - began))
                # Nothing notifies when a limit passes, so the loop wakes up by itself.
                self._changed.wait(min(1.0, limit / 10))
            # A barrier is opened once; its entry must not remain for the rest of the run.
            opened = self._opened.pop(key)
            self._missing.pop(key, None)
            self._where = f"after barrier {key!r}"
        return opened["first"], {int(n): text for n, text in opened["others"].items()}

    def follow(self, question: str, decide: Callable[[], str], *, seconds: float | None = None) -> str:
        """Returns process 0's decision on every process; process 0 does not wait for the others, which wait for it.

        Args:
            question: the name of the decision; the nth use of a name is a decision of its own.
            decide: called on process 0 only.
            seconds: how long the others wait.

        Raises:
            PeerLostError: process 0 does not answer in time, or a process is gone.
        """
        limit = self._timeouts.barrier if seconds is None else seconds
        with self._changed:
            number = self._met[question] = self._met.get(question, 0) + 1
        key = f"{question} ({number})"
        if self.process == 0:
            # Outside the lock: a decision may take long, and messages must be taken in meanwhile.
            answer = decide()
            self._wire.send("decided", question=key, answer=answer)
            return answer
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._decided or self._departed, limit):
                raise PeerLostError(
                    f"process {self.process} of {self.count} waited {limit:g} s for process 0 to decide {key!r}; "
                    f"{self.roster[0]} does not answer"
                )
            # An answer that arrived before the loss is still valid on all processes.
            if key not in self._decided:
                self._changed.wait_for(lambda: False, GATHER_SECONDS)
                raise self.lost(f"waiting for {key!r}")
            return self._decided.pop(key)

    def _waiting(self, key: str, seconds: float) -> str:
        missing = self._missing[key]
        processes = format_processes(missing["processes"])
        return f"{seconds:.0f} s in barrier {key!r}, waiting for process {processes} of {self.count}"

    def _late(self, key: str, limit: float) -> str:
        missing = self._missing.get(key)
        start = f"process {self.process} of {self.count} waited {limit:g} s in barrier {key!r}"
        if missing is None:
            return f"{start}, and process 0 did not report which processes are missing"
        lines = [f"  {self.roster[n]}: last seen {missing['where'][str(n)]}" for n in missing["processes"]]
        arrived = sorted(set(range(self.count)) - set(missing["processes"]))
        return "\n".join([f"{start}; missing:", *lines, f"  here: {format_processes(arrived)}"])

    def lost(self, where: str | None = None) -> PeerLostError:
        """The error that names the processes that are gone."""
        # A process that ended because others were lost is a consequence, not a cause.
        causes = [departure for departure in self._departed if departure.code != PEER_LOST] or self._departed
        lost_processes = {departure.member.process for departure in causes}
        remaining = sorted(set(range(self.count)) - lost_processes)
        plural = "process" if len(lost_processes) == 1 else "processes"
        return PeerLostError(
            "\n".join(
                [
                    f"{plural} {format_processes(lost_processes)} of {self.count} "
                    f"{'is' if len(lost_processes) == 1 else 'are'} missing; noticed by process {self.process} "
                    f"{where or self._where}",
                    *(f"  {departure}" for departure in causes),
                    f"  here: {format_processes(remaining)}",
                ]
            )
        )

    def wait_lost(self, seconds: float) -> bool:
        """Whether a process is gone, now or within so many seconds."""
        with self._changed:
            if self._changed.wait_for(lambda: bool(self._departed), seconds):
                self._changed.wait_for(lambda: False, GATHER_SECONDS)
                return True
        return False

    def on_lost(self, end: Callable[[PeerLostError], None]) -> None:
        """Has a thread call `end` when a process is gone, unless this process is leaving by then."""

        def watch() -> None:
            # `wait_lost` returns False after its time: an hour is only the period of the loop.
            while not self.wait_lost(3600.0):
                pass
            # A process that ended with an error may only have been the first to meet an error that all share.
            if any(departure.code not in (None, PEER_LOST) for departure in self._departed):
                time.sleep(SAME_ERROR_SECONDS)
            # A process that is about to exit itself needs no end from here.
            if not self._leaving:
                end(self.lost())

        threading.Thread(target=watch, name="peers-watch", daemon=True).start()

    def exit_reason(self, process: int, seconds: float) -> str | None:
        """The reason that a process gave when it ended with an error, if it does so within so many seconds."""

        def reasons() -> list[str]:
            return [
                departure.why
                for departure in self._departed
                if departure.member.process == process and departure.code is not None
            ]

        with self._changed:
            self._changed.wait_for(lambda: bool(reasons()), seconds)
            return reasons()[0] if reasons() else None

    def part(self) -> None:
        """Marks the run as done on all processes: from now on none of them is reported as lost."""
        self._leaving = True

    def leave(self, code: int, reason: str = "") -> None:
        """Announces that this process ends now, and why; `on_lost` is not called any more."""
        # The first reason counts: `leave` is called again by handlers that run at exit.
        with self._changed:
            if self._has_left:
                return
            self._leaving = self._has_left = True
        self._wire.send("bye", code=code, reason=reason[:4000])

    def start(self) -> None:
        """Starts the thread that sends heartbeats and watches those of the coordinator."""
        threading.Thread(target=self._beat, name="peers-beat", daemon=True).start()

    def heard(self, message: Message) -> None:
        """Takes in a message of the coordinator."""
        kind = message["kind"]
        with self._changed:
            if kind == "open":
                self._opened[message["barrier"]] = message
            elif kind == "missing":
                self._missing[message["barrier"]] = message
            # Process 0 has its own answer already and would never take it out of the table.
            elif kind == "decided" and self.process != 0:
                self._decided[message["question"]] = message["answer"]
            elif kind == "stop":
                self._stop = True
            elif kind == "gone" and message["process"] != self.process:
                self._departed.append(
                    Departure(
                        member=self.roster[message["process"]],
                        why=message["why"],
                        where=message["where"],
                        code=message["code"],
                    )
                )
            self._changed.notify_all()

    def hub_closed(self, why: str = "its connection closed without notice: it or its host was killed") -> None:
        """Records that the coordinator, and process 0 with it, is gone."""
        with self._changed:
            # The coordinator's own departure was announced before its connection closed.
            if any(departure.member.process == 0 for departure in self._departed):
                return
            where = f"when process {self.process} was {self._where}"
            self._departed.append(Departure(member=self.roster[0], why=why, where=where, code=None))
            self._changed.notify_all()

    def _beat(self) -> None:
        period = self._timeouts.heartbeat / 5
        last = time.monotonic()
        while not self._leaving:
            time.sleep(period)
            now = time.monotonic()
            # This process itself was suspended: it did not read what arrived meanwhile, so silence is no sign of a
            # loss.
            if now - last > 2 * period:
                self._wire.heard = now
            last = now
            self._wire.send("beat")
            # Process 0 runs the coordinator, whose silence would be its own.
            if self.process != 0 and now - self._wire.heard > self._timeouts.heartbeat:
                self.hub_closed(f"no heartbeat for {self._timeouts.heartbeat:.0f} s")
                return
