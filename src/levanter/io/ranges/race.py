"""`Race`: a range, what of it has arrived, and the one or two requests for the rest that are under way."""

import threading

from levanter.io.ranges.attempt import Attempt, Pieces, RangeSource, ReplacedError, behind, spread


class Race:
    """A range that is asked for until it is there.

    The first request writes into its place. A second one beside it asks for what had not arrived when it began, and
    has a buffer of its own, so that two never write to one place.

    Attributes:
        file, start, into: what is read, and whereto.
        nbytes: all of it.
        kept: of these, the first ones that are there for good: earlier requests brought them.
        began: when the first request of now was made; None while there is none.
        first, second: the requests.
        won: what the second one brought, and where in the range it begins.
        replaced: the second one found another file.
        over: nobody waits for it any more.
        changed: set when the second one is home.
        silence: seconds for which nothing arrived, at most, of the first one.
    """

    def __init__(self, file: RangeSource, start: int, into: Pieces):
        self.file, self.start, self.into = file, start, into
        self.nbytes = sum(map(len, into))
        self.kept = 0
        self.began: float | None = None
        self.first: Attempt | None = None
        self.second: Attempt | None = None
        self.won: tuple[int, bytearray] | None = None
        self.replaced: ReplacedError | None = None
        self.over = False
        self.changed = threading.Event()
        self.silence = 0.0
        self._moved_at, self._seen = 0.0, 0

    def begin(self, attempt: Attempt, now: float) -> None:
        """A first request is made."""
        self.first, self.began = attempt, now
        self.silence, self._moved_at, self._seen = 0.0, now, 0

    def end(self, now: float) -> float:
        """It ended; how many seconds it took."""
        assert self.first is not None and self.began is not None, "begun"
        self.look(now)
        self.kept += self.first.received
        seconds, self.began, self.first = now - self.began, None, None
        return seconds

    def look(self, now: float) -> float:
        """How long nothing has arrived of the first request, as far as those know who look now and then."""
        assert self.first is not None, "begun"
        silence = now - self._moved_at
        self.silence = max(self.silence, silence)
        if self.first.received != self._seen:
            self._seen, self._moved_at = self.first.received, now
            return 0.0
        return silence

    @property
    def arrived(self) -> int:
        """Bytes at the beginning of the range that are in their place."""
        return self.kept + (self.first.received if self.first is not None else 0)

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
