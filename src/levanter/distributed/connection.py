"""Messages between the processes of a run: one JSON object a line over one TCP connection.

They are few and short (who has joined, who waits where, who left), so they are text that a person can read.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

MAX_MESSAGE = 1 << 20
"""Bytes; a longer message does not come from one of our processes."""

SEND_SECONDS = 10
"""Seconds that a message may wait for space in the connection's buffer."""

Message = Mapping[str, Any]


class Connection:
    """One connection; any thread may send, one thread receives.

    Args:
        connection: the socket; this object owns it from now on.

    Attributes:
        heard: when something was last received, on the monotonic clock.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        # A process that hangs reads nothing; a thread that writes to it must not hang with it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        self._sending = threading.Lock()
        self.heard = time.monotonic()

    def send(self, kind: str, **fields: object) -> bool:
        """Sends a message; returns False where the connection is closed."""
        line = json.dumps({"kind": kind, **fields}, ensure_ascii=True).encode() + b"\n"
        try:
            # Several threads send: two messages must not be mixed on the wire.
            with self._sending:
                self._connection.sendall(line)
        except OSError:
            return False
        return True

    def messages(self) -> Iterator[Message]:
        """The messages that arrive, until the connection closes or anything else arrives."""
        waiting = b""
        while len(waiting) <= MAX_MESSAGE:
            try:
                received = self._connection.recv(1 << 16)
            except OSError:
                return
            if not received:
                return
            self.heard = time.monotonic()
            # TCP has no message boundaries: what follows the last newline is the beginning of a message.
            *lines, waiting = (waiting + received).split(b"\n")
            for line in lines:
                message = _read(line)
                if message is None:
                    return
                yield message

    def close(self) -> None:
        """Closes the connection; messages that were sent before still arrive."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _read(line: bytes) -> Message | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None
