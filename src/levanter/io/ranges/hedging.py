"""`HedgedRequest`: the state of one range: the bytes that arrived and the one or two running requests for the rest.

The first request writes into the destination. The second (the *hedge*) starts at the first byte that had not arrived
when it began, and fills a buffer of its own, so that two threads never write to the same memory.
"""

import threading

from levanter.io.ranges.request import Attempt, Pieces, RangeSource, ReplacedError, behind, spread


class Underway:
    """A running request, with the time since its last byte.

    Attributes:
        attempt: the request; counts the bytes.
        began: its start time.
        silence: the longest time without a byte, as sampled by `look`.
    """

    def __init__(self, attempt: Attempt, now: float):
        self.attempt, self.began, self.silence = attempt, now, 0.0
        self._moved_at, self._seen = now, attempt.received

    def look(self, now: float) -> float:
        """Samples the byte count; returns the seconds since it last changed."""
        silence = now - self._moved_at
        # The silence that ends with this sample counts too, so update before the byte count is compared.
        self.silence = max(self.silence, silence)
        if self.attempt.received != self._seen:
            self._seen, self._moved_at = self.attempt.received, now
            return 0.0
        return silence


class HedgedRequest:
    """A range that is requested until all of it has arrived.

    Attributes:
        file, start, into: the file, the first byte and the destination.
        nbytes: the size of the range.
        kept: bytes at its beginning that earlier requests have written.
        first, second: the running requests; None if it does not run.
        second_requests: the number of second requests so far.
        won: the bytes of a second request that finished first, with their offset in the range.
        replaced: the error of a second request that met another version of the file.
        over: whether the caller has returned.
        changed: set when the second request has finished.
    """

    def __init__(self, file: RangeSource, start: int, into: Pieces):
        self.file, self.start, self.into = file, start, into
        self.nbytes = sum(map(len, into))
        self.kept = 0
        self.first: Underway | None = None
        self.second: Underway | None = None
        self.second_requests = 0
        self.won: tuple[int, bytearray] | None = None
        self.replaced: ReplacedError | None = None
        self.over = False
        self.changed = threading.Event()

    def begin(self, attempt: Attempt, now: float) -> None:
        """Records the start of a first request."""
        self.first = Underway(attempt, now)

    def begin_second(self, now: float) -> Underway:
        """Records the start of a second request."""
        # Created by the watcher thread before the request runs, so that the count of hedges is exact under its lock.
        self.second = Underway(Attempt(), now)
        self.second_requests += 1
        return self.second

    def end(self, now: float) -> Underway:
        """Records the end of the first request; its bytes are kept even if it failed."""
        assert self.first is not None, "begun"
        ended, self.first = self.first, None
        ended.look(now)
        # What arrived before a failure stays in the destination; the next request starts behind it.
        self.kept += ended.attempt.received
        return ended

    @property
    def arrived(self) -> int:
        """Bytes at the beginning of the range that are in the destination."""
        return self.kept + (self.first.attempt.received if self.first is not None else 0)

    @property
    def missing(self) -> int:
        """Bytes that have not arrived."""
        return self.nbytes - self.arrived

    @property
    def rest(self) -> Pieces:
        """The destination of the bytes that no earlier request has written."""
        return behind(self.into, self.kept)

    def take(self) -> None:
        """Copies the bytes of the second request into the destination."""
        assert self.won is not None, "it won"
        # The first request is over by now, so nothing else writes behind `at`.
        offset, content = self.won
        spread(content, behind(self.into, offset))
