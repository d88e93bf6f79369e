"""Who holds a lease, as its claim says, and whether that process is still there."""

import getpass
import json
import os
import secrets
import socket
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lease.

    Attributes:
        id: random.
        host: its name.
        machine: of one running kernel and one space of process numbers; processes of one machine see each other.
        pid, started: the process, and when the kernel says that it began (numbers of processes are used again).
        user: who started it.
        what: what it does there, with its run's name.
        since: when it took the lease, UTC, by its own clock.
    """

    id: str
    host: str
    machine: str
    pid: int
    started: str
    user: str
    what: str
    since: str

    @classmethod
    def here(cls, what: str) -> Self:
        """This process."""
        return cls(
            id=secrets.token_hex(8),
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=_started(os.getpid()) or "",
            user=_user(),
            what=what,
            since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        )

    @classmethod
    def read(cls, content: bytes) -> "Holder | None":
        """The holder that a claim names; None where it is damaged."""
        try:
            fields = json.loads(content)
            pid, texts = fields["pid"], {name: fields[name] for name in _TEXTS}
            if not isinstance(pid, int) or not all(isinstance(text, str) for text in texts.values()):
                return None
            return cls(pid=pid, **{name: _printable(text) for name, text in texts.items()})
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def content(self) -> bytes:
        """The bytes of a claim."""
        return (json.dumps(asdict(self), indent=1, sort_keys=True) + "\n").encode()

    def gone(self) -> bool:
        """Whether it is certain that the process is no more: it was one of this machine."""
        return self.machine == _machine() and not _alive(self.pid, self.started)

    def surely_alive(self) -> bool:
        """Whether it is certain that the process is there."""
        return self.machine == _machine() and _alive(self.pid, self.started)

    def __str__(self) -> str:
        return f"{self.what}: process {self.pid} of {self.user} on {self.host}, since {self.since}"


_TEXTS = ("id", "host", "machine", "started", "user", "what", "since")


def _printable(text: str) -> str:
    """A text of a file that anybody may have written, for a terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in text[:200])


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {sys.platform} {uuid.getnode()}"


def _started(pid: int) -> str | None:
    """When a process began, in the kernel's own counting; None where that is not told, or it is a dead one's entry."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None


def _alive(pid: int, started: str) -> bool:
    if pid <= 0:
        return False  # what `kill` takes for groups of processes
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return not started or _started(pid) == started


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"user {os.getuid()}" if hasattr(os, "getuid") else "an unknown user"
