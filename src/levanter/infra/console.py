"""Output of a launcher: its own lines on standard error, those of the processes on standard output, secrets masked."""

import sys
import threading
from collections.abc import Collection

HIDDEN = "***"
_SHORTEST_SECRET = 6


class Console:
    """Lines for a person, never interleaved even when several threads write.

    Args:
        secrets: texts that are replaced by `***`; short ones are not, because they would mask ordinary words.
    """

    def __init__(self, secrets: Collection[str] = ()):
        # Longest first: a secret that contains another one is masked as a whole.
        self._secrets = sorted((text for text in secrets if len(text) >= _SHORTEST_SECRET), key=len, reverse=True)
        self._lock = threading.Lock()

    def clean(self, text: str) -> str:
        """The text with every secret masked."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def say(self, text: str) -> None:
        """Prints a line of the launcher on standard error."""
        with self._lock:
            for line in self.clean(text).splitlines() or [""]:
                sys.stderr.write(f"launch: {line}\n")
            sys.stderr.flush()

    def show(self, text: str, *, prefix: str = "") -> None:
        """Prints a result, or a line of a process, on standard output."""
        with self._lock:
            for line in self.clean(text).splitlines() or [""]:
                sys.stdout.write(f"{prefix}{line}\n")
            sys.stdout.flush()
