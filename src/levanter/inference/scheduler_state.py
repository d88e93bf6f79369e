"""`SchedulerState`: waiting and running sequences, and the pages that they hold, between two calls of the device.

`PagePool` tracks the pages of one shard of the cache on the host. `page_hashes` names full pages by their content, for
prefix reuse. `SchedulerState` is a value: `Schedule` makes a new one from an old one, and a `StepPlan` with the next
calls. The device runs behind the host, so a sequence may have tokens that were planned and not read yet (`due`); for
planning only their number matters.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from levanter.inference.requests import ChoiceId, Request


class OutOfPagesError(Exception):
    """More pages are needed than are available."""


class PagePool:
    """The pages of one shard of the cache.

    A page is *free*, *in use* by sequences (several, if they share a prefix), or *idle*: not in use, but with known
    content that a later prompt may begin with. Idle pages are reused when there are no free ones, the least recently
    used first. Methods change the pool in place; `copy` makes an independent one.

    A *snapshot* holds what else a sequence remembered at the end of a page. It is known by the name of the page, and is
    of use as long as the page is. The least recently used one is overwritten, except if a sequence is about to load it.

    Attributes:
        size: number of pages.
        snapshots: number of snapshots.
    """

    def __init__(self, size: int, snapshots: int = 0):
        self.size, self.snapshots = size, snapshots
        self._snapshot_of: dict[bytes, int] = {}  # the least recently used first
        self._loading: dict[int, int] = {}
        # A stack: the lowest page number is taken first.
        self._free = list(range(size - 1, -1, -1))
        self._holders: dict[int, int] = {}
        self._idle: dict[int, None] = {}  # the least recently used first
        # Inverse of each other: a content is known in one page only, even if several pages hold it.
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    def copy(self) -> "PagePool":
        """An independent copy."""
        other = PagePool(0, self.snapshots)
        other.size = self.size
        other._snapshot_of = self._snapshot_of.copy()
        other._loading = self._loading.copy()
        other._free = self._free.copy()
        other._holders = self._holders.copy()
        other._idle = self._idle.copy()
        other._page_of = self._page_of.copy()
        other._name_of = self._name_of.copy()
        return other

    @property
    def available(self) -> int:
        """Number of pages that can be taken: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def in_use(self) -> int:
        """Number of pages in use."""
        return len(self._holders)

    @property
    def idle(self) -> int:
        """Number of pages that are not in use and have known content."""
        return len(self._idle)

    def holders(self, page: int) -> int:
        """Number of sequences that use a page."""
        return self._holders.get(page, 0)

    def take(self, count: int) -> tuple[int, ...]:
        """Takes pages for one sequence; the content of idle ones among them is dropped.

        Raises:
            OutOfPagesError: there are fewer available; the pool is unchanged.
        """
        if count > self.available:
            raise OutOfPagesError(f"{count} pages wanted, {self.available} of {self.size} available")
        pages = []
        for _ in range(count):
            # Pages without known content first: an idle page may still save a later prompt its prefill.
            page = self._free.pop() if self._free else self._forget(next(iter(self._idle)))
            self._holders[page] = 1
            pages.append(page)
        return tuple(pages)

    def _forget(self, page: int) -> int:
        del self._idle[page]
        # The page gets other content, so no later prompt may find it by its old one.
        name = self._name_of.pop(page)
        del self._page_of[name]
        # Nobody loads it: a sequence that is about to uses the page, too.
        self._snapshot_of.pop(name, None)
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Adds a sequence to pages with known content."""
        for page in pages:
            assert page in self._name_of, f"page {page} is shared, and its content is not known"
            # An idle page is in use again; one in use gets another holder.
            self._idle.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1

    def release(self, pages: Sequence[int]) -> None:
        """Releases the pages of a sequence; those without another user become idle, or free without known content.

        They become idle from the last to the first, so that the last is reused first: the content of a page is of no
        use without the pages before it.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            # Another sequence shares the page.
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._name_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def name(self, page: int, name: bytes) -> None:
        """Records the content of a page in use; without effect if another page has the same content."""
        assert self._holders.get(page), f"page {page} gets a name and is not in use"
        # A page without a name is freed at once when it is released; the content stays findable in the other page.
        if name not in self._page_of and page not in self._name_of:
            self._page_of[name] = page
            self._name_of[page] = name

    def find(self, name: bytes) -> int | None:
        """The page with this content; None if there is none."""
        return self._page_of.get(name)

    def has_snapshot(self, name: bytes) -> bool:
        """Whether there is a snapshot at the end of the page with this content."""
        return name in self._snapshot_of

    def pin_snapshot(self, name: bytes) -> int:
        """The number of a snapshot, which stays until `unpin_snapshot`."""
        number = self._snapshot_of[name] = self._snapshot_of.pop(name)
        self._loading[number] = self._loading.get(number, 0) + 1
        return number

    def unpin_snapshot(self, number: int) -> None:
        """Ends a `pin_snapshot`: the call that loads the snapshot is planned, or none will."""
        self._loading[number] -= 1
        if not self._loading[number]:
            del self._loading[number]

    def take_snapshot(self, name: bytes) -> int | None:
        """The number of a snapshot to be written at the end of a page; None if there is one already, or no room.

        Args:
            name: the content of the page, which need not be known to the pool yet.
        """
        number = self._snapshot_of.get(name)
        if number is None:
            unused = self.snapshots > len(self._snapshot_of)
            used = set(self._snapshot_of.values())
            # Free ones first, then the least recently used; those that will be loaded must stay.
            free = (n for n in range(self.snapshots) if n not in used) if unused else ()
            oldest = ((n, old) for old, n in self._snapshot_of.items())
            number = next((n for n in free if n not in self._loading), None)
            if number is None:
                number, old = next(((n, old) for n, old in oldest if n not in self._loading), (None, b""))
                self._snapshot_of.pop(old, None)
        # One of a page whose content was never read as finite is written again, unless it is about to be loaded.
        elif name in self._page_of or number in self._loading:
            return None
        if number is not None:
            self._snapshot_of[name] = number
        return number

    def is_idle(self, page: int) -> bool:
        """Whether a page is idle."""
        return page in self._idle

    def check(self) -> None:
        """Asserts that every page is in exactly one state; for tests."""
        pages = [*self._free, *self._holders, *self._idle]
        assert sorted(pages) == list(range(self.size)), "a page is lost, or in two states"
        assert all(count > 0 for count in self._holders.values())
        assert {page: name for name, page in self._page_of.items()} == self._name_of
        assert self._idle.keys() <= self._name_of.keys()
        assert not self._name_of.keys() & set(self._free)


NAME_BYTES = 16
"""Size of a page hash. Two different prefixes have the same one with a probability of 2⁻¹²⁸."""


def page_hashes(tokens: Sequence[int], page_size: int, known: Sequence[bytes] = ()) -> tuple[bytes, ...]:
    """The hashes of the full pages of a sequence.

    The hash of a page covers the hash of the page before it and its own tokens. So equal hashes mean equal tokens from
    the first one on, and with them equal keys and values.

    Args:
        tokens: tokens of the sequence from its beginning.
        page_size: tokens in a page.
        known: hashes of the first pages, if they are known already.
    """
    names = list(known)
    for page in range(len(names), len(tokens) // page_size):
        # 8 bytes a token, so that different token lists never have the same bytes.
        content = array("q", tokens[page * page_size : (page + 1) * page_size]).tobytes()
        before = names[-1] if names else b""
        names.append(hashlib.blake2b(before + content, digest_size=NAME_BYTES).digest())
    return tuple(names)


def cached_pages(pool: PagePool, names: Sequence[bytes]) -> tuple[int, ...]:
    """The pages of the longest prefix that is in the pool."""
    pages = []
    for name in names:
        page = pool.find(name)
        # Pages behind a missing one are of no use: their keys and values depend on all positions before them.
        if page is None:
            break
        pages.append(page)
    return tuple(pages)


V = TypeVar("V")


def replace_fields(value: V, **fields: object) -> V:
    """`dataclasses.replace` without calling `__init__`, in a tenth of the time, for classes that check nothing there.

    A step changes each sequence a few times, and all streams wait for a step.
    """
    assert fields.keys() <= value.__dict__.keys(), f"{type(value).__name__} has none of {sorted(fields)}"
    # Writes `__dict__` directly, as a frozen dataclass refuses `setattr`; so no `__post_init__` runs either.
    copy = object.__new__(type(value))
    copy.__dict__.update(value.__dict__)
    copy.__dict__.update(fields)
    return copy


@dataclass(frozen=True, kw_only=True)
class SequenceState:
    """A choice of a request, waiting or running.

    Attributes:
        id: the choice.
        request: its request.
        order: number of choices that arrived before it. Earlier ones are admitted first and preempted last.
        limit: maximum number of its tokens.
        generated: tokens that were read from the device.
        due: for each planned call that was not read, the maximum number of tokens it yields.
        slot: its row of `batch`; None while it waits.
        target: number of its tokens at admission: these are prefilled, later ones are decoded.
        shared: positions that were reused from another sequence.
        written: positions whose keys and values are in the cache once all planned calls have run.
        pages: its pages, in the order of positions.
        names: hashes of its full pages, as far as their tokens are known.
        sound: positions whose keys and values are in the cache and known to be finite, from calls that were read.
        named: number of its pages whose hash is in the pool.
        preempted: whether it ran before.
        load: the snapshot that its next chunk begins with.
    """

    id: ChoiceId
    request: Request
    order: int
    limit: int
    generated: tuple[int, ...] = ()
    due: tuple[int, ...] = ()
    slot: int | None = None
    target: int = 0
    shared: int = 0
    written: int = 0
    pages: tuple[int, ...] = ()
    names: tuple[bytes, ...] = ()
    sound: int = 0
    named: int = 0
    preempted: bool = False
    load: int | None = None

    @property
    def known(self) -> int:
        """Number of its known tokens, prompt included."""
        return len(self.request.tokens) + len(self.generated)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its known tokens, prompt included."""
        return self.request.tokens + self.generated

    @property
    def unplanned(self) -> int:
        """Number of tokens that may be planned in addition to those that are."""
        # Tokens in flight count as if all of them came; a row that ends early is removed when its call is read.
        return self.limit - len(self.generated) - sum(self.due)

    def sound_with(self, positions: int) -> int:
        """Number of positions that are known to be sound, if these of a call are.

        A preempted sequence that runs again may still receive results of calls from before. They hold for its tokens,
        as far as these are planned again.
        """
        # `written` restarts at the shared prefix when the sequence is admitted again.
        return max(self.sound, min(positions, self.written))

    @property
    def prefilling(self) -> bool:
        """Whether it runs and a part of its prompt was not planned yet."""
        return self.slot is not None and self.written < self.target


def count_shares(clients: Iterable[tuple[str, ...]]) -> "Counter[tuple[str, ...]]":
    """How often each client and each group of clients occurs: `("a", "1")` counts for itself and for `("a",)`."""
    counts: Counter[tuple[str, ...]] = Counter(clients)
    for client, count in list(counts.items()):
        for length in range(1, len(client)):
            counts[client[:length]] += count
    return counts


def client_share(client: tuple[str, ...], counts: "Counter[tuple[str, ...]]") -> tuple[int, ...]:
    """The counts of a client's groups and its own, the outermost first: who has the least is served next."""
    # A client without a name is its own group.
    return tuple(counts[client[: length + 1]] for length in range(max(1, len(client))))


@dataclass(frozen=True, kw_only=True)
class SchedulerState:
    """The sequences and the pages at one moment.

    Attributes:
        queue: waiting sequences, in order.
        rows: the sequence in each row of `batch`, or None.
        pools: the pages of each shard of the cache.
        arrived: number of choices that have arrived so far.
        released: rows whose sequences have ended since the last step.
    """

    queue: tuple[SequenceState, ...]
    rows: tuple[SequenceState | None, ...]
    pools: tuple[PagePool, ...]
    arrived: int = 0
    released: tuple[int, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether no sequence waits or runs."""
        return not self.queue and not any(self.rows)

    def shares(self, *, waiting: bool = False) -> "Counter[tuple[str, ...]]":
        """The number of running choices of each client, and of each group of clients.

        Args:
            waiting: whether to count choices that wait as well.
        """
        return count_shares(row.request.client for row in (*self.rows, *(self.queue if waiting else ())) if row)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of sequences that have never run."""
        return sum(len(row.request.tokens) for row in self.queue if not row.preempted)

    def find(self, id: ChoiceId) -> SequenceState | None:
        """The sequence of a choice; None if it neither waits nor runs."""
        # Running sequences first: they are few, and most events are about them.
        for row in self.rows:
            if row is not None and row.id == id:
                return row
        for row in self.queue:
            if row.id == id:
                return row
        return None

    def with_row(self, row: SequenceState) -> "SchedulerState":
        """The state with another value for a sequence."""
        if row.slot is None:
            return replace_fields(self, queue=tuple(row if other.id == row.id else other for other in self.queue))
        return replace_fields(self, rows=(*self.rows[: row.slot], row, *self.rows[row.slot + 1 :]))

    def read(self, id: ChoiceId, tokens: tuple[int, ...]) -> "SchedulerState":
        """The state when the tokens of a choice's oldest unread call are known; itself if the choice has ended.

        Args:
            id: the choice.
            tokens: the tokens of the call; fewer than planned if the row was done.
        """
        row = self.find(id)
        if row is None:
            return self
        # Calls are read in the order in which they were planned, so this is the first entry of `due`.
        assert row.due and len(tokens) <= row.due[0], f"{id}: {len(tokens)} tokens, {row.due} due"
        generated, sound = row.generated + tokens, row.sound
        # A preempted sequence has no pages of which anything could be known.
        if tokens and row.slot is not None:
            # The key and value of a token are written by the call that samples the next one.
            sound = row.sound_with(len(row.request.tokens) + len(generated) - 1)
        return self.with_row(replace_fields(row, generated=generated, due=row.due[1:], sound=sound))

    def read_part(self, id: ChoiceId, end: int) -> "SchedulerState":
        """The state when a call for a part of a choice's prompt was read and all of its activations were finite.

        Args:
            id: the choice; nothing changes if it has ended.
            end: number of its positions after that call.
        """
        row = self.find(id)
        if row is None or row.slot is None:
            return self
        return self.with_row(replace_fields(row, sound=row.sound_with(end)))


@dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """A chunk of one sequence's prompt in a prefill call.

    Attributes:
        id: the choice.
        slot: its row of `batch`.
        lane: its row of the call.
        start: position of the first token of the chunk.
        tokens: the tokens.
        fresh: whether it is the first chunk since the sequence was admitted.
        ends: whether it is the last one: the call samples the next token.
        remaining: number of tokens that the sequence may then still have, that one included.
        earlier: the ids before the chunk, as many as the model reads or the sequence has.
        load: the snapshot that it begins with, None if it begins with no state or with that of the chunk before.
        save: the snapshot that it writes at its end; None for none.
    """

    id: ChoiceId
    slot: int
    lane: int
    start: int
    tokens: tuple[int, ...]
    fresh: bool
    ends: bool
    remaining: int
    earlier: tuple[int, ...] = ()
    load: int | None = None
    save: int | None = None


@dataclass(frozen=True, kw_only=True)
class DecodeSlot:
    """A sequence that gets tokens in a decode call.

    Attributes:
        id: the choice.
        slot: its row of `batch`.
        start: position of the first token that is read, if all planned tokens are sampled.
        tokens: maximum number of new tokens.
    """

    id: ChoiceId
    slot: int
    start: int
    tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """The next calls of the device.

    Attributes:
        released: rows whose sequences have ended.
        bucket: rows and tokens of the prefill call; None for no call.
        prefill: the chunks of the prefill call.
        decode: the sequences of the decode call; none for no call.
        tables: int32 `[rows, pages of a row]`, the pages of each row, numbered within its shard, then `fill`.
        preempted: choices that were preempted.
        after: the state after these calls are planned.
    """

    released: tuple[int, ...]
    bucket: tuple[int, int] | None
    prefill: tuple[PrefillChunk, ...]
    decode: tuple[DecodeSlot, ...]
    tables: np.ndarray
    preempted: tuple[ChoiceId, ...]
    after: SchedulerState

    @property
    def empty(self) -> bool:
        """Whether the device has nothing to do."""
        return not self.prefill and not self.decode
