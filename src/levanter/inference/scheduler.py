"""`Schedule`: who runs in the next call of the device. Pure: from one `SchedulerState` to a `StepPlan` and the next
one.

- Who came first is admitted first; nobody overtakes, so nobody starves. The one exception: a choice waits while another
  one of its request computes the prompt that they share.
- Prompts are computed in parts (*chunked prefill*), at most one call of them a step, beside the decoding of all others.
  How a prompt is cut depends on its length alone: in calls of other sizes the last bits of numbers are others, and what
  a text is must not depend on who else is there.
- A row takes pages as it grows. If there are none, the youngest row gives way: its pages go at once, and it waits in
  its old order with the tokens that it has, which are prefilled like a prompt later. The oldest row never gives way,
  and whoever could not finish with all pages of a shard is refused at the door: so the oldest row always finishes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from levanter.inference.requests import ChoiceId, Request
from levanter.inference.scheduler_state import (
    DecodeSlot,
    PagePool,
    PrefillChunk,
    SchedulerState,
    SequenceState,
    StepPlan,
    cached_pages,
    page_hashes,
    replace_fields,
)


class RefusedError(ValueError):
    """A request that could never finish here."""


class QueueFullError(Exception):
    """Too much is waiting; the same request may be accepted later."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How rows, pages and calls are shared out.

    Attributes:
        rows: places of `batch`, over all shards.
        pages: pages of a shard of the cache.
        page_size: positions in a page.
        context: positions of a sequence at most.
        buckets: (rows, tokens) of the prefill calls that there are.
        steps: tokens that a decode call gives a row at most.
        max_queued_tokens: of prompts that wait; a single request may have more.
        shards: of the cache and of `batch`, each with its own pages and its own run of places.
        fixed: each place owns its pages, an equal share of its shard's; nothing is shared and nobody gives way.
        share_prefixes: rows with the same first pages share them.
    """

    rows: int
    pages: int
    page_size: int
    context: int
    buckets: tuple[tuple[int, int], ...]
    steps: int = 1
    max_queued_tokens: int = 1 << 20
    shards: int = 1
    fixed: bool = False
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        assert self.rows % self.shards == 0, f"{self.rows} rows do not divide into {self.shards} shards"
        assert self.buckets and all(rows % self.shards == 0 and tokens > 0 for rows, tokens in self.buckets)
        assert min(self.rows, self.pages, self.page_size, self.context, self.steps) > 0
        assert not self.fixed or self.pages // self.places >= self.row_pages, "a place has fewer pages than a row needs"

    @property
    def places(self) -> int:
        """Places of `batch` in a shard."""
        return self.rows // self.shards

    @property
    def row_pages(self) -> int:
        """Pages of a row that fills the context."""
        return -(-self.context // self.page_size)

    @property
    def fill(self) -> int:
        """What stands in tables where a row has no page: the index behind the last one."""
        return self.pages

    def start(self) -> SchedulerState:
        """Nobody there."""
        return SchedulerState(
            queue=(), rows=(None,) * self.rows, pools=tuple(PagePool(self.pages) for _ in range(self.shards))
        )

    def check(self, request: Request) -> None:
        """Refuses what could never finish.

        Raises:
            RefusedError: with the numbers that do not go together.
        """
        prompt, new = len(request.tokens), request.new_tokens(self.context)
        if not prompt:
            raise RefusedError("the prompt is empty; a text needs at least one token to begin with")
        if new < 1 or prompt + new > self.context:
            said = f"{new} new tokens (max_tokens)" if request.params.max_tokens is not None else "one new token"
            raise RefusedError(
                f"a prompt of {prompt} tokens and {said} are more than the context of {self.context} tokens"
            )
        needed = self.pages_for(prompt + new - 1)
        if needed > self.pages:
            raise RefusedError(
                f"a prompt of {prompt} tokens and {new} new ones take {needed} pages of {self.page_size} positions, "
                f"and the cache has {self.pages}"
            )

    def offered(self, standing: SchedulerState, request: Request) -> SchedulerState:
        """The standing with one more request in the queue.

        Raises:
            RefusedError: it could never finish.
            QueueFullError: too many tokens wait.
        """
        self.check(request)
        waiting, new = standing.queued_tokens, len(request.tokens) * request.params.n
        if waiting and waiting + new > self.max_queued_tokens:
            raise QueueFullError(
                f"{waiting} tokens wait, {new} more would be over the {self.max_queued_tokens} of the queue"
            )
        limit = request.new_tokens(self.context)
        rows = tuple(
            SequenceState(id=ChoiceId(request.id, n), request=request, order=standing.arrived + n, limit=limit)
            for n in range(request.params.n)
        )
        return replace_fields(standing, queue=standing.queue + rows, arrived=standing.arrived + len(rows))

    def ended(self, standing: SchedulerState, id: ChoiceId) -> SchedulerState:
        """The standing without a choice, whose pages are free at once; itself if it has ended before.

        A call that still runs for it writes its pages before anybody else's call reads them, because the device runs
        calls in order.
        """
        row = standing.find(id)
        if row is None:
            return standing
        if row.place is None:
            return replace_fields(standing, queue=tuple(each for each in standing.queue if each.id != id))
        work = _Work(self, standing)
        work.vacate(row)
        return work.standing()

    def step(self, standing: SchedulerState) -> StepPlan:
        """Plans the next call. The standing that is given stays what it is."""
        work = _Work(self, standing)
        gave_way = work.make_room()
        if not gave_way:
            work.admit()
        # Who ends its prompt in this step decodes from the next one on.
        decode = work.decode()
        bucket, prefill = work.prefill()
        work.name_pages()
        tables = self._tables(work.rows)
        released, work.released = tuple(work.released), []
        return StepPlan(
            released=released,
            bucket=bucket,
            prefill=prefill,
            decode=decode,
            tables=tables,
            gave_way=gave_way,
            after=work.standing(),
        )

    def bucket_for(self, tokens: int) -> tuple[int, int]:
        """The call that takes the next part of a prompt of which so many tokens are left.

        The shortest that takes them all, unless half of it or more would be empty and there is a shorter one; for more
        tokens than any call takes, the longest.
        """
        sizes = {size: (rows, size) for rows, size in sorted(self.buckets)}
        below = [size for size in sizes if size <= tokens]
        above = [size for size in sizes if size >= tokens]
        if above and (2 * tokens > min(above) or not below):
            return sizes[min(above)]
        return sizes[max(below)]

    def pages_for(self, positions: int) -> int:
        """How many pages so many positions take."""
        return -(-positions // self.page_size)

    def _tables(self, rows: Sequence[SequenceState | None]) -> np.ndarray:
        tables = np.full((self.rows, self.row_pages), self.fill, np.int32)
        for place, row in enumerate(rows):
            if row is not None:
                pages = row.pages[: self.row_pages]
                tables[place, : len(pages)] = pages
        return tables


class _Work:
    """A standing while it is changed; what is not changed is shared with the one it came from."""

    def __init__(self, schedule: Schedule, standing: SchedulerState):
        self.schedule = schedule
        self.queue = list(standing.queue)
        self.rows = list(standing.rows)
        self.released = list(standing.released)
        self._given = standing
        self._pools: dict[int, PagePool] = {}

    def standing(self) -> SchedulerState:
        pools = tuple(self._pools.get(n, pool) for n, pool in enumerate(self._given.pools))
        return replace_fields(
            self._given,
            queue=tuple(self.queue),
            rows=tuple(self.rows),
            pools=pools,
            released=tuple(self.released),
        )

    def pool(self, shard: int) -> PagePool:
        """The pages of a shard, to be changed."""
        if shard not in self._pools:
            self._pools[shard] = self._given.pools[shard].copy()
        return self._pools[shard]

    def look(self, shard: int) -> PagePool:
        """The pages of a shard, not to be changed."""
        return self._pools.get(shard, self._given.pools[shard])

    def shard_of(self, place: int) -> int:
        return place // self.schedule.places

    def running(self) -> list[SequenceState]:
        """The rows that run, those that came first first."""
        return sorted((row for row in self.rows if row is not None), key=lambda row: row.order)

    def put(self, row: SequenceState) -> None:
        assert row.place is not None
        self.rows[row.place] = row

    def vacate(self, row: SequenceState) -> None:
        """Takes a row from its place, and its pages back."""
        assert row.place is not None
        if not self.schedule.fixed:
            pool = self.pool(self.shard_of(row.place))
            self._name(row, pool)
            pool.give_back(row.pages)
        self.rows[row.place] = None
        self.released.append(row.place)

    def make_room(self) -> tuple[ChoiceId, ...]:
        """Gives every row that decodes the pages of its next call; the youngest ones give way where there are none."""
        gave_way = []
        for row in self.running():
            if row.place is None or self.rows[row.place] is not row or not self._decodes(row):
                continue
            place, shard = row.place, self.shard_of(row.place)
            wanted = self.schedule.pages_for(row.written + self._tokens(row))
            missing = wanted - len(row.pages)
            while missing > 0 and self.look(shard).available < missing and self.rows[place] is not None:
                youngest = max(
                    (each for each in self.rows if each is not None and self.shard_of(each.place or 0) == shard),
                    key=lambda each: each.order,
                )
                self._give_way(youngest)
                gave_way.append(youngest.id)
            if missing > 0 and self.rows[place] is not None:
                self.put(replace_fields(row, pages=row.pages + self.pool(shard).take(missing)))
        return tuple(gave_way)

    def _give_way(self, row: SequenceState) -> None:
        self.vacate(row)
        waits = replace_fields(
            row, place=None, target=0, written=0, shared=0, pages=(), sound=0, named=0, gave_way=True
        )
        self.queue = sorted([*self.queue, waits], key=lambda each: each.order)

    def _decodes(self, row: SequenceState) -> bool:
        # What may come next in a text that conforms to something depends on what came last.
        return not row.prefilling and row.left > 0 and not (row.due and row.request.constraint is not None)

    def _tokens(self, row: SequenceState) -> int:
        """How many tokens the next call gives a row at most."""
        return min(self.schedule.steps if row.request.constraint is None else 1, row.left)

    def admit(self) -> None:
        """Gives places to those that wait, in their order, while there are places and pages."""
        waiting = []
        for n, row in enumerate(self.queue):
            if row.due:
                # It gave way, and its last tokens have not been read yet.
                waiting += self.queue[n:]
                break
            names = self._shareable_names(row)
            if self._sibling_prefills(row, names):
                waiting.append(row)
                continue
            shard = self._shard_for(row, names)
            if shard is None:
                waiting += self.queue[n:]
                break
            self._place(row, names, shard)
        self.queue = waiting

    def _shareable_names(self, row: SequenceState) -> tuple[bytes, ...]:
        """The names of the pages that a row could share: at least one token has to be computed."""
        schedule = self.schedule
        params = row.request.params
        # A prompt whose tokens are counted or scored has to be gone through.
        if not schedule.share_prefixes or schedule.fixed or params.repetition_penalty != 1 or params.echo:
            return ()
        tokens = row.tokens[: row.known - 1]
        if params.counts_tokens:
            # So have those that it made before it gave way.
            tokens = tokens[: len(row.request.tokens)]
        return page_hashes(tokens, schedule.page_size, row.names[: len(tokens) // schedule.page_size])

    def _sibling_prefills(self, row: SequenceState, names: Sequence[bytes]) -> bool:
        """Whether another choice of the request is about to have pages that this one could share."""
        return any(
            other is not None
            and other.id.request == row.id.request
            and other.named < min(len(names), other.target // self.schedule.page_size)
            for other in self.rows
        )

    def _shard_for(self, row: SequenceState, names: Sequence[bytes]) -> int | None:
        """The shard that a row goes to: where most of its pages are, then where most are left; None for none."""
        best = None
        for shard in range(self.schedule.shards):
            places = range(shard * self.schedule.places, (shard + 1) * self.schedule.places)
            others = sum(self.rows[place] is not None for place in places)
            if others == len(places):
                continue
            pool = self.look(shard)
            shared = cached_pages(pool, names)
            left = pool.available - sum(pool.is_idle(page) for page in shared)
            left -= self.schedule.pages_for(row.known) - len(shared)
            # A page for each row that runs, so that who comes in does not have to give way at once.
            if not self.schedule.fixed and left < others:
                continue
            score = (len(shared), left, -others)
            if best is None or score > best[0]:
                best = score, shard
        return None if best is None else best[1]

    def _place(self, row: SequenceState, names: tuple[bytes, ...], shard: int) -> None:
        schedule = self.schedule
        first = shard * schedule.places
        place = next(n for n in range(first, first + schedule.places) if self.rows[n] is None)
        if schedule.fixed:
            own = schedule.pages // schedule.places
            pages: tuple[int, ...] = tuple(range((place - first) * own, (place - first) * own + schedule.row_pages))
            shared: tuple[int, ...] = ()
        else:
            pool = self.pool(shard)
            shared = cached_pages(pool, names)
            pool.share(shared)
            pages = shared + pool.take(schedule.pages_for(row.known) - len(shared))
        self.put(
            replace_fields(
                row,
                place=place,
                target=row.known,
                written=len(shared) * schedule.page_size,
                shared=len(shared) * schedule.page_size,
                pages=pages,
                names=names,
                sound=len(shared) * schedule.page_size,
                named=len(shared),
            )
        )

    def decode(self) -> tuple[DecodeSlot, ...]:
        """Plans the decode call: every row whose prompt is computed and that may have more tokens."""
        planned = []
        for row in self.running():
            if not self._decodes(row) or row.place is None:
                continue
            tokens = self._tokens(row)
            planned.append(DecodeSlot(id=row.id, place=row.place, start=row.written, tokens=tokens))
            self.put(replace_fields(row, written=row.written + tokens, due=(*row.due, tokens)))
        return tuple(sorted(planned, key=lambda each: each.place))

    def prefill(self) -> tuple[tuple[int, int] | None, tuple[PrefillChunk, ...]]:
        """Plans the prefill call: the one of the row that came first, and of those that need the same."""
        waiting = [
            (self.schedule.bucket_for(row.target - row.written), row) for row in self.running() if row.prefilling
        ]
        if not waiting:
            return None, ()
        bucket = waiting[0][0]
        parts = []
        for lane, row in sorted(self._lanes([row for own, row in waiting if own == bucket], bucket).items()):
            assert row.place is not None
            end = min(row.target, row.written + bucket[1])
            ends = end == row.target
            part = PrefillChunk(
                id=row.id,
                place=row.place,
                lane=lane,
                start=row.written,
                tokens=row.tokens[row.written : end],
                fresh=row.written == row.shared,
                ends=ends,
                left=row.left,
            )
            parts.append(part)
            self.put(replace_fields(row, written=end, due=(*row.due, 1) if ends else row.due))
        return bucket, tuple(parts)

    def _lanes(self, waiting: Sequence[SequenceState], bucket: tuple[int, int]) -> Mapping[int, SequenceState]:
        """Which rows would be in a call, by lane: each shard has its own lanes."""
        each = bucket[0] // self.schedule.shards
        lanes: dict[int, SequenceState] = {}
        used = [0] * self.schedule.shards
        for row in waiting:
            shard = self.shard_of(row.place or 0)
            if used[shard] < each:
                lanes[shard * each + used[shard]] = row
                used[shard] += 1
        return lanes

    def name_pages(self) -> None:
        """Tells the pools what those full pages hold that are known to be sound."""
        for row in self.rows:
            if row is None or row.place is None or self.schedule.fixed:
                continue
            if row.sound // self.schedule.page_size > row.named:
                self.put(self._name(row, self.pool(self.shard_of(row.place))))

    def _name(self, row: SequenceState, pool: PagePool) -> SequenceState:
        full = row.sound // self.schedule.page_size
        if not self.schedule.share_prefixes or full <= row.named:
            return row
        names = page_hashes(row.tokens[: full * self.schedule.page_size], self.schedule.page_size, row.names[:full])
        for page, name in zip(row.pages[row.named : full], names[row.named : full], strict=True):
            pool.name(page, name)
        return replace_fields(row, names=names, named=full)
