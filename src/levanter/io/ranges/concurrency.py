"""`ConcurrencyLimit`: requests of one kind, how many of them may be under way, and who is next.

A range that was begun and broke off goes before those that nobody has asked for yet: somebody waits for it, and what
was read behind it holds memory for as long.
"""

import contextlib
import threading
from collections.abc import Generator

from levanter.io.ranges.pace import AdaptiveConcurrency
from levanter.io.ranges.request import GivenUpError


class ConcurrencyLimit:
    """How many requests of one kind are under way, may be, and wait for room.

    Attributes:
        pace: says how many may be.
        under_way: that are.
        waiting: that wait for room.
    """

    def __init__(self, most: int):
        self.pace = AdaptiveConcurrency(most)
        self.under_way = self.waiting = 0
        self._lock = threading.Lock()
        self._next, self._others = threading.Condition(self._lock), threading.Condition(self._lock)
        self._ahead = 0

    @contextlib.contextmanager
    def slot(self, stop: threading.Event, *, again: bool) -> Generator[None]:
        """Room for one more request; `again` for one that was under way before.

        Raises:
            GivenUpError: everything was stopped.
        """
        with self._lock:
            self._wait(stop, again=again)
            if stop.is_set():
                raise GivenUpError
            self.under_way += 1
            self._call()  # where there is more room, whoever gave way to this one has not been told
        try:
            yield
        finally:
            with self._lock:
                self.under_way -= 1
                self._call()

    def stopped(self) -> None:
        """Tells everybody who waits that everything was stopped."""
        with self._lock:
            self._next.notify_all()
            self._others.notify_all()

    def _wait(self, stop: threading.Event, *, again: bool) -> None:
        self.waiting += 1
        self._ahead += again
        try:
            while not stop.is_set() and (self._free_slots <= 0 or (self._ahead and not again)):
                (self._next if again else self._others).wait()
        finally:
            self.waiting -= 1
            self._ahead -= again

    @property
    def _free_slots(self) -> int:
        return self.pace.limit - self.under_way

    def _call(self) -> None:
        if self._free_slots > 0:
            (self._next if self._ahead else self._others).notify(self._free_slots)
