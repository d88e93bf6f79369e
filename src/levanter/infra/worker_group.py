"""A worker group (gang): one process on each host of some slices, started together, with one outcome.

A `Cluster` provides the hosts; a gang only starts processes on them, shows their output, and judges the outcome of the
attempt. `run_worker_group` repeats it while that may help.
"""

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from levanter.infra.console import Console
from levanter.infra.host import ProcessStatus
from levanter.infra.processes import place
from levanter.infra.restart_policy import Judgement, Outcome, judge

_TAIL = 40


class HostGone(Exception):
    """A host no longer responds and will not come back."""


class GangMember(Protocol):
    """A host of a gang."""

    slice: int
    where: str

    def coordinator(self) -> str:
        """The address (`host:port`) at which the other hosts reach a process 0 that runs here."""
        ...

    def start(self, command: Sequence[str], environment: Mapping[str, str], *, grace: float) -> None:
        """Starts the command here; once stopped, it has `grace` seconds to exit by itself."""
        ...

    def news(self) -> ProcessStatus:
        """News since the last call: output, and the exit status once there is one."""
        ...

    def stop(self) -> None:
        """Stops the command if it is still running."""
        ...


class Cluster(Protocol):
    """A provider of hosts."""

    def acquire(self) -> Sequence[GangMember]:
        """The hosts of all slices, slice by slice, each ordered by host number."""
        ...

    def release(self, members: Sequence[GangMember]) -> None:
        """Releases the hosts."""
        ...


@dataclass(frozen=True, kw_only=True)
class GangRun:
    """The command of a gang, and its timeouts.

    Attributes:
        command: the arguments of each process.
        environment: variables of every process.
        restarts: further attempts after a lost host or a preemption.
        settle: seconds that the others have to end by themselves once one has ended; that reveals the root cause.
        grace: seconds from SIGTERM to SIGKILL for those that do not.
        poll: polling interval in seconds.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    restarts: int = 3
    settle: float = 15.0
    grace: float = 10.0
    poll: float = 0.5


def run_worker_group(
    run: GangRun, cluster: Cluster, console: Console, *, sleep: Callable[[float], None] = time.sleep
) -> Judgement:
    """Runs the command on a gang, restarts it where that may help, and reports the outcome.

    Raises:
        LaunchError: no hosts are available.
    """
    for attempt in range(1, run.restarts + 2):
        members = cluster.acquire()
        try:
            console.say(f"attempt {attempt}: {len(members)} processes")
            judgement = _attempt(run, members, console, sleep)
        finally:
            cluster.release(members)
        attempts_left = run.restarts + 1 - attempt
        if judgement.again and attempts_left:
            console.say(f"attempt {attempt}: {judgement}; restarting, {attempts_left} attempts left")
            continue
        if judgement.again:
            console.say(f"attempt {attempt}: {judgement}; giving up, {run.restarts} restarts were allowed (--restarts)")
        return judgement
    raise AssertionError("the last attempt returns")


def _attempt(
    run: GangRun, members: Sequence[GangMember], console: Console, sleep: Callable[[float], None]
) -> Judgement:
    ended: dict[int, Outcome] = {}
    tails = [collections.deque[str](maxlen=_TAIL) for _ in members]
    width = len(str(len(members) - 1))

    def reached(index: int, act: Callable[[], None]) -> None:
        try:
            act()
        except HostGone:
            # `setdefault`: a host that is lost after its process has ended does not change the outcome.
            ended.setdefault(index, Outcome(process=index, code=None, where=members[index].where))

    def look(index: int) -> None:
        news = members[index].news()
        for line in news.lines:
            tails[index].append(line)
            console.show(line, prefix=f"[{index:>{width}}] ")
        if news.code is not None:
            ended[index] = Outcome(process=index, code=news.code, where=members[index].where)

    def start_all() -> None:
        coordinator = members[0].coordinator()
        for index, member in enumerate(members):
            reached(index, lambda index=index, member=member: member.start(
                run.command, _environment(run, members, coordinator, index), grace=run.grace
            ))  # fmt: skip

    # The coordinator runs on host 0, so its loss while starting is the loss of member 0.
    reached(0, start_all)
    deadline: float | None = None
    try:
        while len(ended) < len(members) and (deadline is None or time.monotonic() < deadline):
            for index in range(len(members)):
                if index not in ended:
                    reached(index, lambda index=index: look(index))
            if deadline is None and any(outcome.code != 0 for outcome in ended.values()):
                # The others get some seconds to end by themselves, which reveals the root cause; a peer that
                # hangs would wait for its own timeout of minutes.
                deadline = time.monotonic() + run.settle
            if len(ended) < len(members):
                sleep(run.poll)
    finally:
        # Taken before the others are stopped: exits that follow from our SIGTERM say nothing about the cause.
        outcomes = list(ended.values())
        for index, member in enumerate(members):
            if index not in ended:
                reached(index, member.stop)
        # The chips are free once all have ended; only then can another attempt use them.
        deadline = time.monotonic() + run.grace + 2.0
        while len(ended) < len(members) and time.monotonic() < deadline:
            for index in range(len(members)):
                if index not in ended:
                    reached(index, lambda index=index: look(index))
            sleep(min(run.poll, 0.1))
    judgement = judge(outcomes)
    cause = judgement.cause
    if cause is not None and not judgement.again:
        tail = tails[cause.process]
        console.say(f"{cause}; its last output:" if tail else f"{cause}; it printed nothing")
        for line in tail:
            console.say(f"    {line}")
    return judgement


def _environment(run: GangRun, members: Sequence[GangMember], coordinator: str, index: int) -> dict[str, str]:
    values = {**run.environment, **place(coordinator, len(members), index)}
    slices = 1 + max(member.slice for member in members)
    if slices > 1:
        # How the TPU runtime joins slices over the data-center network.
        values |= {
            "MEGASCALE_COORDINATOR_ADDRESS": coordinator.rsplit(":", 1)[0],
            "MEGASCALE_PORT": "8081",
            "MEGASCALE_NUM_SLICES": str(slices),
            "MEGASCALE_SLICE_ID": str(members[index].slice),
        }
    return values
