"""`HedgedRequest`: a range, what of it has arrived, and the one or two requests for the rest that are under way."""

import threading

from levanter.io.ranges.request import Attempt, Pieces, RangeSource, ReplacedError, behind, spread


class Underway:
    """A request under way, and for how long nothing has arrived of it.

    Attributes:
        attempt: it.
        began: when it was made.
        silence: seconds for which nothing arrived, at most, as far as those know who look now and then.
    """

    def __init__(self, attempt: Attempt, now: float):
        self.attempt, self.began, self.silence = attempt, now, 0.0
        self._moved_at, self._seen = now, attempt.received

    def look(self, now: float) -> float:
        """How long nothing has arrived."""
        silence = now - self._moved_at
        self.silence = max(self.silence, silence)
        if self.attempt.received != self._seen:
            self._seen, self._moved_at = self.attempt.received, now
            return 0.0
        return silence


class HedgedRequest:
    """A range that is asked for until it is there.

    The first request writes into its place. A second one beside it asks for what had not arrived when it began, and
    has a buffer of its own, so that two never write to one place.

    Attributes:
        file, start, into: what is read, and whereto.
        nbytes: all of it.
        kept: of these, the first ones that are there for good: earlier requests brought them.
        first, second: the requests of now; None while there is none.
        second_requests: how many second ones there have been.
        won: what the second one brought, and where in the range it begins.
        replaced: the second one found another file.
        over: nobody waits for it any more.
        changed: set when the second one is home.
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
        """A first request is made."""
        self.first = Underway(attempt, now)

    def begin_second(self, now: float) -> Underway:
        """A second one is made beside it."""
        self.second = Underway(Attempt(), now)
        self.second_requests += 1
        return self.second

    def end(self, now: float) -> Underway:
        """The first one ended."""
        assert self.first is not None, "begun"
        ended, self.first = self.first, None
        ended.look(now)
        self.kept += ended.attempt.received
        return ended

    @property
    def arrived(self) -> int:
        """Bytes at the beginning of the range that are in their place."""
        return self.kept + (self.first.attempt.received if self.first is not None else 0)

    @property
    def missing(self) -> int:
        """Bytes that are not."""
        return self.nbytes - self.arrived

    @property
    def rest(self) -> Pieces:
        """The memory of what no earlier request has brought."""
        return behind(self.into, self.kept)

    def take(self) -> None:
        """Puts what the second request brought into its place."""
        assert self.won is not None, "it won"
        at, content = self.won
        spread(content, behind(self.into, at))
