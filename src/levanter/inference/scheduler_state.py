"""`SchedulerState`: who waits, who runs, and who holds which page, between two calls of the device.

A value: `Schedule` makes a new one of an old one. The device runs behind the host, so a row may have tokens that were
planned and not read yet (`due`); what they are does not matter for planning, how many there may be does.
"""

from dataclasses import dataclass
from typing import TypeVar

from levanter.inference.page_allocator import PagePool
from levanter.inference.requests import ChoiceId, Request

V = TypeVar("V")


def changed(value: V, **fields: object) -> V:
    """`dataclasses.replace` for frozen values that check nothing when they are made, in a tenth of its time.

    A step changes each row a few times, and between two steps every stream waits.
    """
    assert fields.keys() <= value.__dict__.keys(), f"{type(value).__name__} has none of {sorted(fields)}"
    made = object.__new__(type(value))
    made.__dict__.update(value.__dict__)
    made.__dict__.update(fields)
    return made


@dataclass(frozen=True, kw_only=True)
class Row:
    """One choice of a request, waiting or running.

    Attributes:
        id: which choice it is.
        request: whose.
        order: how many choices came before it. Who came first is served first and gives way last.
        limit: tokens that it may have at most.
        made: the tokens that were read from the device.
        due: for each call that was planned and not read: how many tokens it brings at most.
        place: its index in `batch`; None while it waits.
        target: how many tokens it was admitted with: those are prefilled, what comes behind them is decoded.
        shared: positions that it did not have to compute: another row had.
        written: positions whose keys and values are in the cache when all planned calls have run.
        pages: the pages that it holds, in the order of its positions.
        names: the names of its full pages, as far as their tokens are known.
        sound: positions whose keys and values are in the cache and known to be numbers: of calls that were read.
        named: how many of its pages the pool has been told about.
        gave_way: whether it ran before.
    """

    id: ChoiceId
    request: Request
    order: int
    limit: int
    made: tuple[int, ...] = ()
    due: tuple[int, ...] = ()
    place: int | None = None
    target: int = 0
    shared: int = 0
    written: int = 0
    pages: tuple[int, ...] = ()
    names: tuple[bytes, ...] = ()
    sound: int = 0
    named: int = 0
    gave_way: bool = False

    @property
    def known(self) -> int:
        """How many of its tokens are known, the prompt's included."""
        return len(self.request.tokens) + len(self.made)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its tokens as far as they are known."""
        return self.request.tokens + self.made

    @property
    def left(self) -> int:
        """How many tokens may be planned for it beside those that are."""
        return self.limit - len(self.made) - sum(self.due)

    def sound_with(self, positions: int) -> int:
        """How many positions are known to be sound when so many of a call are.

        A row that gave way and came back hears of calls from before. What those found of its tokens still holds, for
        as many of them as are planned again.
        """
        return max(self.sound, min(positions, self.written))

    @property
    def prefilling(self) -> bool:
        """Whether it runs and part of its prompt has not been planned yet."""
        return self.place is not None and self.written < self.target


@dataclass(frozen=True, kw_only=True)
class SchedulerState:
    """The rows and the pages at one moment.

    Attributes:
        queue: the choices that wait, in their order.
        rows: the choice at each place of `batch`; None where there is none.
        pools: the pages of each shard of the cache.
        arrived: how many choices have come so far.
        released: places whose rows have ended since the last step.
    """

    queue: tuple[Row, ...]
    rows: tuple[Row | None, ...]
    pools: tuple[PagePool, ...]
    arrived: int = 0
    released: tuple[int, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether nobody waits and nobody runs."""
        return not self.queue and not any(self.rows)

    @property
    def queued_tokens(self) -> int:
        """Tokens of the prompts that have never run."""
        return sum(len(row.request.tokens) for row in self.queue if not row.gave_way)

    def find(self, id: ChoiceId) -> Row | None:
        """A choice, waiting or running; None if it is neither."""
        for row in self.rows:
            if row is not None and row.id == id:
                return row
        for row in self.queue:
            if row.id == id:
                return row
        return None

    def with_row(self, row: Row) -> "SchedulerState":
        """The same with another value for a choice that is there."""
        if row.place is None:
            return changed(self, queue=tuple(row if each.id == row.id else each for each in self.queue))
        return changed(self, rows=(*self.rows[: row.place], row, *self.rows[row.place + 1 :]))

    def read(self, id: ChoiceId, tokens: tuple[int, ...]) -> "SchedulerState":
        """The standing when the tokens of a choice's oldest unread call are known; itself if the choice has ended.

        Args:
            id: the choice.
            tokens: what the call brought; fewer than planned if the row was done.
        """
        row = self.find(id)
        if row is None:
            return self
        assert row.due and len(tokens) <= row.due[0], f"{id}: {len(tokens)} tokens, {row.due} due"
        made, sound = row.made + tokens, row.sound
        if tokens and row.place is not None:
            # A token's key and value are there when the next token is.
            sound = row.sound_with(len(row.request.tokens) + len(made) - 1)
        return self.with_row(changed(row, made=made, due=row.due[1:], sound=sound))

    def read_part(self, id: ChoiceId, end: int) -> "SchedulerState":
        """The standing when a call for a part of a choice's prompt was read and all in it was numbers.

        Args:
            id: the choice; nothing changes if it has ended.
            end: how many of its positions there are then.
        """
        row = self.find(id)
        if row is None or row.place is None:
            return self
        return self.with_row(changed(row, sound=row.sound_with(end)))
