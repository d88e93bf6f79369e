"""`PagePool`: who holds which page of the cache, on the host, without JAX.

A page is *free*, *held* by rows (several, if they have a prefix in common), or *idle*: held by nobody, but with
contents that a later prompt may begin with. Idle pages are given away when there are no free ones, those that were used
longest ago first.

Prefixes in common: full pages named by what they and all pages before them hold.

The name of a page is a hash of the name of the page before it and of its own tokens, so equal names mean equal tokens
from the first one on, and with them equal keys and values. Only full pages have names; the rest of a prompt is computed
again.

`SchedulerState`: who waits, who runs, and who holds which page, between two calls of the device.

A value: `Schedule` makes a new one of an old one. The device runs behind the host, so a row may have tokens that were
planned and not read yet (`due`); what they are does not matter for planning, how many there may be does.

`StepPlan`: what the device does in one step, and what stands when that is planned.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from levanter.inference.requests import ChoiceId, Request


class OutOfPagesError(Exception):
    """More pages were asked for than are free or idle."""


class PagePool:
    """The pages of one shard of the cache.

    A pool is changed by whoever works on it; `copy` is for whoever wants to keep a value.

    Attributes:
        size: how many pages there are.
    """

    def __init__(self, size: int):
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._holders: dict[int, int] = {}
        self._idle: dict[int, None] = {}  # in the order in which they are given away
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    def copy(self) -> "PagePool":
        """The same pool, to be changed by itself."""
        other = PagePool(0)
        other.size = self.size
        other._free = self._free.copy()
        other._holders = self._holders.copy()
        other._idle = self._idle.copy()
        other._page_of = self._page_of.copy()
        other._name_of = self._name_of.copy()
        return other

    @property
    def available(self) -> int:
        """Pages that can be taken: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Pages that rows hold."""
        return len(self._holders)

    @property
    def idle(self) -> int:
        """Pages that nobody holds and whose contents are known."""
        return len(self._idle)

    def holders(self, page: int) -> int:
        """How many rows hold a page."""
        return self._holders.get(page, 0)

    def take(self, count: int) -> tuple[int, ...]:
        """Pages for one row; what idle ones among them held is forgotten.

        Raises:
            OutOfPagesError: there are not so many; nothing has changed.
        """
        if count > self.available:
            raise OutOfPagesError(f"{count} pages wanted, {self.available} of {self.size} available")
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._forget(next(iter(self._idle)))
            self._holders[page] = 1
            pages.append(page)
        return tuple(pages)

    def _forget(self, page: int) -> int:
        del self._idle[page]
        del self._page_of[self._name_of.pop(page)]
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Lets one more row hold pages whose contents are known."""
        for page in pages:
            assert page in self._name_of, f"page {page} is shared, and nobody knows what it holds"
            self._idle.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Lets a row's pages go; those that nobody else holds become idle, or free if their contents are not known.

        The last page is given away first: a page is of no use without those before it.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._name_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def name(self, page: int, name: bytes) -> None:
        """Says what a held page has in it from now on; nothing changes if another page has the same."""
        assert self._holders.get(page), f"page {page} gets a name, and nobody holds it"
        if name not in self._page_of and page not in self._name_of:
            self._page_of[name] = page
            self._name_of[page] = name

    def find(self, name: bytes) -> int | None:
        """The page that has certain contents; None if there is none."""
        return self._page_of.get(name)

    def is_idle(self, page: int) -> bool:
        """Whether nobody holds a page whose contents are known."""
        return page in self._idle

    def check(self) -> None:
        """Asserts that every page is in exactly one place; for tests."""
        places = [*self._free, *self._holders, *self._idle]
        assert sorted(places) == list(range(self.size)), "a page is lost, or in two places"
        assert all(count > 0 for count in self._holders.values())
        assert {page: name for name, page in self._page_of.items()} == self._name_of
        assert self._idle.keys() <= self._name_of.keys()
        assert not self._name_of.keys() & set(self._free)


NAME_BYTES = 16
"""Of a name. Two different prefixes get the same one with probability 2⁻¹²⁸ each time."""


def page_hashes(tokens: Sequence[int], page_size: int, known: Sequence[bytes] = ()) -> tuple[bytes, ...]:
    """The names of the full pages of a sequence.

    Args:
        tokens: from the first one on.
        page_size: tokens in a page.
        known: names of the first pages, where they are known already.
    """
    names = list(known)
    for page in range(len(names), len(tokens) // page_size):
        own = array("q", tokens[page * page_size : (page + 1) * page_size]).tobytes()
        before = names[-1] if names else b""
        names.append(hashlib.blake2b(before + own, digest_size=NAME_BYTES).digest())
    return tuple(names)


def cached_pages(pool: PagePool, names: Sequence[bytes]) -> tuple[int, ...]:
    """The pages of the longest prefix that the pool has."""
    pages = []
    for name in names:
        page = pool.find(name)
        if page is None:
            break
        pages.append(page)
    return tuple(pages)


V = TypeVar("V")


def replace_fields(value: V, **fields: object) -> V:
    """`dataclasses.replace` for frozen values that check nothing when they are made, in a tenth of its time.

    A step changes each row a few times, and between two steps every stream waits.
    """
    assert fields.keys() <= value.__dict__.keys(), f"{type(value).__name__} has none of {sorted(fields)}"
    made = object.__new__(type(value))
    made.__dict__.update(value.__dict__)
    made.__dict__.update(fields)
    return made


@dataclass(frozen=True, kw_only=True)
class SequenceState:
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

    queue: tuple[SequenceState, ...]
    rows: tuple[SequenceState | None, ...]
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

    def find(self, id: ChoiceId) -> SequenceState | None:
        """A choice, waiting or running; None if it is neither."""
        for row in self.rows:
            if row is not None and row.id == id:
                return row
        for row in self.queue:
            if row.id == id:
                return row
        return None

    def with_row(self, row: SequenceState) -> "SchedulerState":
        """The same with another value for a choice that is there."""
        if row.place is None:
            return replace_fields(self, queue=tuple(row if each.id == row.id else each for each in self.queue))
        return replace_fields(self, rows=(*self.rows[: row.place], row, *self.rows[row.place + 1 :]))

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
        return self.with_row(replace_fields(row, made=made, due=row.due[1:], sound=sound))

    def read_part(self, id: ChoiceId, end: int) -> "SchedulerState":
        """The standing when a call for a part of a choice's prompt was read and all in it was numbers.

        Args:
            id: the choice; nothing changes if it has ended.
            end: how many of its positions there are then.
        """
        row = self.find(id)
        if row is None or row.place is None:
            return self
        return self.with_row(replace_fields(row, sound=row.sound_with(end)))


@dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """A part of one row's prompt.

    Attributes:
        id: which choice.
        place: its place in `batch`.
        lane: its place in the call.
        start: where in its sequence the part begins.
        tokens: the part.
        fresh: whether it is the first part since the row was admitted.
        ends: whether it is the last one: the call samples the row's next token.
        left: how many tokens the row may still have then, that one included.
    """

    id: ChoiceId
    place: int
    lane: int
    start: int
    tokens: tuple[int, ...]
    fresh: bool
    ends: bool
    left: int


@dataclass(frozen=True, kw_only=True)
class DecodeSlot:
    """A row that gets tokens.

    Attributes:
        id: which choice.
        place: its place in `batch`.
        start: where in its sequence the first token is read, as far as it is known.
        tokens: how many there will be at most.
    """

    id: ChoiceId
    place: int
    start: int
    tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """What the device does next, in this order: release rows, prefill, decode.

    Attributes:
        released: places whose rows are no more.
        bucket: the rows and tokens of the prefill call; None for none.
        prefill: what it computes.
        decode: the rows of the decode call; none for no call.
        tables: int32 `[rows, pages of a row]`, the pages of the row at each place, in its shard; then `fill`.
        gave_way: choices that had to give way.
        after: the standing when this is planned.
    """

    released: tuple[int, ...]
    bucket: tuple[int, int] | None
    prefill: tuple[PrefillChunk, ...]
    decode: tuple[DecodeSlot, ...]
    tables: np.ndarray
    gave_way: tuple[ChoiceId, ...]
    after: SchedulerState

    @property
    def empty(self) -> bool:
        """Whether the device has nothing to do."""
        return not self.prefill and not self.decode
