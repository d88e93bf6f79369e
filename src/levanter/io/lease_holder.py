"""The holder of a lease, as its claim names it, and whether that process still runs."""

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
    """The process that holds a lease.

    Attributes:
        id: a random identifier.
        host: the host name.
        machine: identifies the boot of the kernel and the PID namespace; only processes of one machine see each other.
        pid, started: the process and its start time by the kernel, because process numbers are reused.
        user: the user who started it.
        what: its activity, with the name of the run.
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
            # The content is untrusted: types are checked, because `pid` goes to `kill` and the texts to a terminal.
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
        """Whether the process has certainly ended: it ran on this machine and runs no longer."""
        # A process of another machine, or of another container, is not visible here: nothing is known about it.
        return self.machine == _machine() and not _alive(self.pid, self.started)

    def surely_alive(self) -> bool:
        """Whether the process certainly runs: it is on this machine."""
        return self.machine == _machine() and _alive(self.pid, self.started)

    def __str__(self) -> str:
        return f"{self.what}: process {self.pid} of {self.user} on {self.host}, since {self.since}"


_TEXTS = ("id", "host", "machine", "started", "user", "what", "since")


def _printable(text: str) -> str:
    """A text from a claim, safe for a terminal: anyone with access to the folder may have written it."""
    return "".join(character if character.isprintable() else "?" for character in text[:200])


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            # The boot id alone is the same in all containers of a host, whose process numbers differ.
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {sys.platform} {uuid.getnode()}"


def _started(pid: int) -> str | None:
    """The start time of a process in clock ticks of the kernel; None where unknown, or for a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The second field is the command in parentheses and may contain spaces and parentheses itself.
            fields = file.read().rpartition(")")[2].split()
        # Counted from behind the command: field 0 is the state (Z zombie, X dead), field 19 the start time
        # (`starttime`, field 22 in proc(5)).
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None


def _alive(pid: int, started: str) -> bool:
    if pid <= 0:
        return False  # `kill` takes these numbers for process groups
    try:
        # Signal 0 is not delivered; the call only checks that the process exists.
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    # The process exists and belongs to another user.
    except PermissionError:
        pass
    # A process number is reused after a while; the start time tells whether it is still the same process.
    return not started or _started(pid) == started


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"user {os.getuid()}" if hasattr(os, "getuid") else "an unknown user"
