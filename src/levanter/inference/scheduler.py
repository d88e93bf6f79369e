"""`Schedule`: which sequences run in the next call of the device. Pure: from a `SchedulerState` to a `StepPlan`.

- Rows are shared evenly among clients: the next free row is for the client that has the fewest, and a client with two
  rows more than one that waits gives one up. The choices of a client are admitted in the order of arrival, so none
  starves. The one exception: a choice waits while another one of its request computes the prompt that they share.
- Prompts are computed in chunks (*chunked prefill*), at most one call of them a step, next to the decoding of all other
  sequences. How a prompt is cut depends on its length alone: calls of other sizes round differently, and a text must
  not depend on what else runs.
- A sequence takes pages as it grows. If there are none, the youngest sequence of the client with the most rows is
  preempted: its pages are released at once, and it waits in its old order with its tokens, which are prefilled like a
  prompt later. The oldest sequence is never preempted, and a request that could not finish with all pages of a shard is
  refused on arrival: so the oldest sequence always finishes.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from levanter.inference.requests import ChoiceId, PromptTooLongError, Request
from levanter.inference.scheduler_state import (
    DecodeSlot,
    PagePool,
    PrefillChunk,
    SchedulerState,
    SequenceState,
    StepPlan,
    cached_pages,
    client_share,
    count_shares,
    page_hashes,
    replace_fields,
)


class RefusedError(ValueError):
    """A request that could never finish with this cache."""


class TooLongError(RefusedError, PromptTooLongError):
    """A prompt and its new tokens are more than the context or the cache."""


class QueueFullError(Exception):
    """Too many tokens wait; the same request may be accepted later."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Assigns rows, pages and calls to sequences.

    Attributes:
        rows: rows of `batch`, over all shards.
        pages: pages of a shard of the cache.
        page_size: positions in a page.
        context: maximum positions of a sequence.
        buckets: (rows, tokens) of the prefill calls.
        steps: maximum tokens that a decode call gives a sequence.
        max_queued_tokens: limit on tokens of prompts that wait; a single request may have more.
        shards: shards of the cache and of `batch`, each with its own pages and its own consecutive rows.
        fixed: each row owns its pages, an equal share of its shard's; no prefixes are shared, and nothing is preempted
            for want of pages.
        share_prefixes: whether sequences with the same first pages share them.
        earlier: number of ids before a chunk of a prompt that the model reads.
        snapshots: snapshots of a shard, for a model that remembers more than its pages. Prefixes are then shared up to
            the last snapshot; one is taken at each end of a chunk that is the end of a page, and a prompt is also cut
            at the end of its last page for one. 0 if pages hold all that the model remembers.
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
    earlier: int = 0
    snapshots: int = 0

    def __post_init__(self) -> None:
        assert self.rows % self.shards == 0, f"{self.rows} rows do not divide into {self.shards} shards"
        assert self.buckets and all(rows % self.shards == 0 and tokens > 0 for rows, tokens in self.buckets)
        assert min(self.rows, self.pages, self.page_size, self.context, self.steps) > 0
        assert not self.fixed or self.pages // self.rows_per_shard >= self.row_pages, (
            "a row has fewer pages than its longest sequence needs"
        )

    @property
    def rows_per_shard(self) -> int:
        """Rows of `batch` in a shard."""
        return self.rows // self.shards

    @property
    def row_pages(self) -> int:
        """Pages of a sequence that fills the context."""
        return -(-self.context // self.page_size)

    @property
    def fill(self) -> int:
        """The entry of tables where a row has no page: the index after the last one."""
        return self.pages

    def start(self) -> SchedulerState:
        """The state without sequences."""
        return SchedulerState(
            queue=(),
            rows=(None,) * self.rows,
            pools=tuple(PagePool(self.pages, self.snapshots) for _ in range(self.shards)),
        )

    def check(self, request: Request) -> None:
        """Refuses a request that could never finish.

        Raises:
            RefusedError: names the numbers that exceed each other.
        """
        # Checked against an empty shard: whatever else runs, preemption can free all of it for the oldest sequence.
        prompt, new = len(request.tokens), request.new_tokens(self.context)
        if not prompt:
            raise RefusedError("the prompt is empty; at least one token is required")
        if new < 1 or prompt + new > self.context:
            new_text = f"{new} new tokens (max_tokens)" if request.params.max_tokens is not None else "one new token"
            raise TooLongError(
                f"a prompt of {prompt} tokens and {new_text} are more than the context of {self.context} tokens"
            )
        # The last token is sampled and never read, so its key and value need no position.
        needed = self.pages_for(prompt + new - 1)
        if needed > self.pages:
            raise TooLongError(
                f"a prompt of {prompt} tokens and {new} new ones take {needed} pages of {self.page_size} positions, "
                f"and the cache has {self.pages}"
            )

    def offered(self, state: SchedulerState, request: Request, choices: Sequence[int] | None = None) -> SchedulerState:
        """The state with one more request in the queue.

        Args:
            state: the state.
            request: the request.
            choices: numbers of the choices that are put in, where the caller bounds the queue; None for all.

        Raises:
            RefusedError: it could never finish.
            QueueFullError: too many tokens wait; not with `choices`.
        """
        self.check(request)
        waiting, new = state.queued_tokens, len(request.tokens) * request.params.n
        # An empty queue takes a request of any size; otherwise one longer than the limit could never be accepted.
        if choices is None and waiting and waiting + new > self.max_queued_tokens:
            raise QueueFullError(
                f"{waiting} prompt tokens are queued; {new} more would exceed the limit of {self.max_queued_tokens}"
            )
        # The choices of a request are queued in order, each as a sequence of its own.
        limit = request.new_tokens(self.context)
        rows = tuple(
            SequenceState(id=ChoiceId(request.id, n), request=request, order=state.arrived + place, limit=limit)
            for place, n in enumerate(range(request.params.n) if choices is None else choices)
        )
        return replace_fields(state, queue=state.queue + rows, arrived=state.arrived + len(rows))

    def ended_request(self, state: SchedulerState, request: str) -> SchedulerState:
        """The state without the choices of a request; see `ended`."""
        state = replace_fields(state, queue=tuple(row for row in state.queue if row.id.request != request))
        for row in (row for row in state.rows if row is not None and row.id.request == request):
            state = self.ended(state, row.id)
        return state

    def ended(self, state: SchedulerState, id: ChoiceId) -> SchedulerState:
        """The state without a choice, whose pages are released at once; the same state if it has ended before.

        A call for it that still runs writes its pages before another sequence's call reads them, because the device
        runs calls in order.
        """
        row = state.find(id)
        if row is None:
            return state
        if row.slot is None:
            # A waiting sequence has neither a row nor pages to release.
            return replace_fields(state, queue=tuple(other for other in state.queue if other.id != id))
        work = _Work(self, state)
        work.vacate(row)
        return work.state()

    def step(self, state: SchedulerState) -> StepPlan:
        """Plans the next calls; `state` is not changed."""
        work = _Work(self, state)
        # Running sequences get their pages first. A step that had to preempt admits none: a new sequence would take
        # the pages that were just freed.
        preempted = work.preempt() or work.admit()
        # A sequence whose prompt ends in this step gets its first token there, and decodes from the next step on.
        # Decode is planned before prefill: `prefill` marks prompts as written, and `decode` would take them for
        # computed.
        decode = work.decode()
        bucket, prefill = work.prefill()
        work.name_pages()
        tables = self._tables(work.rows)
        # Each released row is reported by one plan only.
        released, work.released = tuple(work.released), []
        return StepPlan(
            released=released,
            bucket=bucket,
            prefill=prefill,
            decode=decode,
            tables=tables,
            preempted=preempted,
            after=work.state(),
        )

    def bucket_for(self, tokens: int) -> tuple[int, int]:
        """The prefill call for the next chunk of a prompt with so many tokens to go.

        The shortest that takes them all, unless half of it or more would be padding and there is a shorter one; for
        more tokens than any call takes, the longest.
        """
        # Sizes are compared only with the length of the prompt, never with what else waits: see the module docstring.
        sizes = {size: (rows, size) for rows, size in sorted(self.buckets)}
        below = [size for size in sizes if size <= tokens]
        above = [size for size in sizes if size >= tokens]
        if above and (2 * tokens > min(above) or not below):
            return sizes[min(above)]
        return sizes[max(below)]

    def next_cut(self, row: SequenceState) -> int:
        """The position up to which the chunks of a prompt are planned next: its end, or that of its last page."""
        # At least one token follows: it must be computed by those who share the pages.
        last = (row.target - 1) // self.page_size * self.page_size if self.snapshots else 0
        return last if row.written < last else row.target

    def pages_for(self, positions: int) -> int:
        """Number of pages for so many positions."""
        return -(-positions // self.page_size)

    def _tables(self, rows: Sequence[SequenceState | None]) -> np.ndarray:
        tables = np.full((self.rows, self.row_pages), self.fill, np.int32)
        for slot, row in enumerate(rows):
            if row is not None:
                # A row of tables has room for a sequence of full context.
                # Tables number the pages within a shard. Writes to `fill`, past the last page, are dropped.
                pages = row.pages[: self.row_pages]
                tables[slot, : len(pages)] = pages
        return tables


class _Work:
    """A state while it is changed; what does not change is shared with the state that it came from."""

    def __init__(self, schedule: Schedule, state: SchedulerState):
        self.schedule = schedule
        self.queue = list(state.queue)
        self.rows = list(state.rows)
        self.released = list(state.released)
        self._base = state
        # Copies of the pools that this step changes; the base state keeps the old ones, so a plan can be thrown away.
        self._pools: dict[int, PagePool] = {}

    def state(self) -> SchedulerState:
        pools = tuple(self._pools.get(n, pool) for n, pool in enumerate(self._base.pools))
        return replace_fields(
            self._base,
            queue=tuple(self.queue),
            rows=tuple(self.rows),
            pools=pools,
            released=tuple(self.released),
        )

    def pool(self, shard: int) -> PagePool:
        """The pages of a shard, to be changed: a copy, made at the first use."""
        if shard not in self._pools:
            self._pools[shard] = self._base.pools[shard].copy()
        return self._pools[shard]

    def look(self, shard: int) -> PagePool:
        """The pages of a shard, to be read."""
        return self._pools.get(shard, self._base.pools[shard])

    def shard_for_slot(self, slot: int) -> int:
        return slot // self.schedule.rows_per_shard

    def running(self) -> list[SequenceState]:
        """The running sequences, by order of arrival."""
        return sorted((row for row in self.rows if row is not None), key=lambda row: row.order)

    def put(self, row: SequenceState) -> None:
        assert row.slot is not None
        self.rows[row.slot] = row

    def vacate(self, row: SequenceState) -> None:
        """Removes a sequence from its row, and releases its pages."""
        assert row.slot is not None
        if not self.schedule.fixed:
            pool = self.pool(self.shard_for_slot(row.slot))
            # Named before they are released: full pages become idle with known content, and a later prompt may reuse
            # them.
            self._name(row, pool)
            pool.release(row.pages)
            if row.load is not None:
                pool.unpin_snapshot(row.load)
        self.rows[row.slot] = None
        self.released.append(row.slot)

    def preempt(self) -> tuple[ChoiceId, ...]:
        """Gives decoding sequences the pages of their next call; preempts others of the shard if there are none.

        A sequence may preempt itself.
        """
        preempted = []
        for row in self.running():
            # `running` is a list from before the loop: an earlier iteration may have preempted this sequence.
            if row.slot is None or self.rows[row.slot] is not row or not self._decodes(row):
                continue
            slot, shard = row.slot, self.shard_for_slot(row.slot)
            needed = self.schedule.pages_for(row.written + self._tokens(row))
            # Negative with a fixed cache, whose rows own all pages that they may need.
            missing = needed - len(row.pages)
            while missing > 0 and self.look(shard).available < missing and self.rows[slot] is not None:
                # Only sequences of the same shard have pages that help. The loop ends when enough are free, or when
                # this sequence was itself the youngest and gave up its row.
                victim = self._page_victim(shard)
                self._preempt(victim)
                preempted.append(victim.id)
            if missing > 0 and self.rows[slot] is not None:
                self.put(replace_fields(row, pages=row.pages + self.pool(shard).take(missing)))
        return tuple(preempted)

    def _page_victim(self, shard: int) -> SequenceState:
        """The sequence of a shard that gives up its pages: of the client with most rows, the youngest."""
        rows = [row for row in self.rows if row is not None and self.shard_for_slot(row.slot or 0) == shard]
        shares = count_shares(row.request.client for row in rows)
        oldest = min(rows, key=lambda row: row.order)
        # Never the oldest, unless it is alone.
        return max(rows, key=lambda row: (row is not oldest, client_share(row.request.client, shares), row.order))

    def _preempt(self, row: SequenceState) -> None:
        self.vacate(row)
        # `due` stays: the calls in flight still bring tokens, and it is not admitted before they are read.
        # What it wrote is given up. Its tokens (`generated`) stay, and are prefilled with the prompt when it runs
        # again.
        waits = replace_fields(
            row, slot=None, target=0, written=0, shared=0, pages=(), sound=0, named=0, preempted=True, load=None
        )
        self.queue = sorted([*self.queue, waits], key=lambda row: row.order)

    def _decodes(self, row: SequenceState) -> bool:
        # The mask of a constrained text depends on its last token, which must have been read.
        return not row.prefilling and row.unplanned > 0 and not (row.due and row.request.constraint is not None)

    def _tokens(self, row: SequenceState) -> int:
        """Maximum number of tokens that the next call gives a sequence."""
        return min(self.schedule.steps if row.request.constraint is None else 1, row.unplanned)

    def admit(self) -> tuple[ChoiceId, ...]:
        """Admits waiting sequences while there are rows and pages: of the client with the fewest rows first.

        A client that has two rows more than one that waits gives up its youngest.

        Returns:
            The choices that were preempted for that.
        """
        flows: dict[tuple[str, ...], deque[SequenceState]] = {}
        for row in self.queue:
            flows.setdefault(row.request.client, deque()).append(row)
        shares = count_shares(row.request.client for row in self.rows if row is not None)
        admitted: set[ChoiceId] = set()
        preempted: list[ChoiceId] = []
        while flows:
            client = min(flows, key=lambda one: (client_share(one, shares), flows[one][0].order))
            row = flows[client][0]
            if row.due:
                # It was preempted, and its last tokens, which it is prefilled with, have not been read yet. Those of
                # its client behind it wait too, to keep the order of arrival.
                del flows[client]
                continue
            names = self._shareable_names(row)
            # The prompt is computed once: the other choices of a request wait until its pages can be shared.
            if not self._sibling_prefills(row, names):
                shard = self._shard_for(row, names)
                if shard is None and (victim := self._overserved(client, shares, admitted)) is not None:
                    self._preempt(victim)
                    preempted.append(victim.id)
                    shares -= count_shares([victim.request.client])
                    shard = self._shard_for(row, names)
                # The first that does not fit blocks the rest: smaller ones behind it must not starve it.
                if shard is None:
                    break
                self._place(row, names, shard)
                admitted.add(row.id)
                shares += count_shares([client])
            flows[client].popleft()
            if not flows[client]:
                del flows[client]
        self.queue = [row for row in self.queue if row.id not in admitted]
        return tuple(preempted)

    def _overserved(
        self, client: tuple[str, ...], shares: "Counter[tuple[str, ...]]", admitted: Set[ChoiceId]
    ) -> SequenceState | None:
        """The sequence that gives up its row for a waiting client; None if no client has two rows more than that one.

        Afterwards that client has at least as many rows as the other, so they do not take turns. It keeps another row,
        and the sequence is its youngest: never the oldest of all.
        """
        mine = client_share(client, shares)
        victims = []
        for row in self.rows:
            if row is None or row.id in admitted:
                continue
            names = zip(client, row.request.client, mine, client_share(row.request.client, shares), strict=False)
            # Compared where their names differ: at the address, or at the calls of one address.
            counts = next(((count, others) for name, other, count, others in names if name != other), (0, 0))
            if counts[1] >= counts[0] + 2:
                victims.append(row)
        return max(victims, key=lambda row: (client_share(row.request.client, shares), row.order), default=None)

    def _shareable_names(self, row: SequenceState) -> tuple[bytes, ...]:
        """The hashes of the pages that a sequence could share: at least one token has to be computed."""
        schedule = self.schedule
        params = row.request.params
        # A prompt whose tokens are counted (repetition penalty) or scored (echo) has to be computed as a whole.
        if not schedule.share_prefixes or schedule.fixed or params.repetition_penalty != 1 or params.echo:
            return ()
        # At least one token is computed, because its activations give the next token.
        # Pages are shared as a whole, so this leaves the last page to be computed if the tokens fill it exactly.
        tokens = row.tokens[: row.known - 1]
        if params.counts_tokens:
            # Tokens that it generated before it was preempted are counted by being prefilled again.
            tokens = tokens[: len(row.request.tokens)]
        return page_hashes(tokens, schedule.page_size, row.names[: len(tokens) // schedule.page_size])

    def _sibling_prefills(self, row: SequenceState, names: Sequence[bytes]) -> bool:
        """Whether another choice of the request computes pages that this one could share."""
        # `named` of the other counts its published pages: wait while it can still publish one that this choice needs.
        return any(
            other is not None
            and other.id.request == row.id.request
            and other.named < min(len(names), other.target // self.schedule.page_size)
            for other in self.rows
        )

    def _shard_for(self, row: SequenceState, names: Sequence[bytes]) -> int | None:
        """The shard with most of a sequence's pages, then with most available pages; None if no shard can take it."""
        best = None
        for shard in range(self.schedule.shards):
            slots = range(shard * self.schedule.rows_per_shard, (shard + 1) * self.schedule.rows_per_shard)
            others = sum(self.rows[slot] is not None for slot in slots)
            # No row of this shard is free.
            if others == len(slots):
                continue
            pool = self.look(shard)
            shared = self._shared_pages(pool, names)
            remaining = pool.available - sum(pool.is_idle(page) for page in shared)
            # Idle pages that it would share are no longer available, and the others must be taken.
            remaining -= self.schedule.pages_for(row.known) - len(shared)
            # A spare page for each running sequence, so that a new one is not preempted at once.
            if not self.schedule.fixed and remaining < others:
                continue
            # Reuse first, then balance.
            score = (len(shared), remaining, -others)
            if best is None or score > best[0]:
                best = score, shard
        return None if best is None else best[1]

    def _place(self, row: SequenceState, names: tuple[bytes, ...], shard: int) -> None:
        schedule = self.schedule
        first = shard * schedule.rows_per_shard
        # `_shard_for` chose a shard with a free row.
        slot = next(n for n in range(first, first + schedule.rows_per_shard) if self.rows[n] is None)
        if schedule.fixed:
            # Page numbers are local to the shard: the k-th row of a shard owns the k-th equal share of its pages.
            pages_per_slot = schedule.pages // schedule.rows_per_shard
            pages: tuple[int, ...] = tuple(
                range((slot - first) * pages_per_slot, (slot - first) * pages_per_slot + schedule.row_pages)
            )
            shared: tuple[int, ...] = ()
            load = None
        else:
            pool = self.pool(shard)
            shared = self._shared_pages(pool, names)
            load = pool.pin_snapshot(names[len(shared) - 1]) if shared and schedule.snapshots else None
            # Shared pages are marked as used first: `take` may drop idle pages, and these may be idle.
            pool.share(shared)
            pages = shared + pool.take(schedule.pages_for(row.known) - len(shared))
        self.put(
            replace_fields(
                row,
                slot=slot,
                # All known tokens are prefilled; the shared prefix counts as written, finite and published.
                target=row.known,
                written=len(shared) * schedule.page_size,
                shared=len(shared) * schedule.page_size,
                pages=pages,
                names=names,
                sound=len(shared) * schedule.page_size,
                named=len(shared),
                load=load,
            )
        )

    def _shared_pages(self, pool: PagePool, names: Sequence[bytes]) -> tuple[int, ...]:
        """The pages that a sequence can begin with; with snapshots, up to the last page that has one."""
        pages = cached_pages(pool, names)
        while self.schedule.snapshots and pages and not pool.has_snapshot(names[len(pages) - 1]):
            pages = pages[:-1]
        return pages

    def decode(self) -> tuple[DecodeSlot, ...]:
        """Plans the decode call: every sequence whose prompt is computed and that may have more tokens."""
        planned = []
        for row in self.running():
            if not self._decodes(row) or row.slot is None:
                continue
            tokens = self._tokens(row)
            planned.append(DecodeSlot(id=row.id, slot=row.slot, start=row.written, tokens=tokens))
            # The plan assumes that every token is sampled. If the row ends earlier, `SchedulerState.read` gets fewer.
            self.put(replace_fields(row, written=row.written + tokens, due=(*row.due, tokens)))
        return tuple(sorted(planned, key=lambda planned_slot: planned_slot.slot))

    def prefill(self) -> tuple[tuple[int, int] | None, tuple[PrefillChunk, ...]]:
        """Plans the prefill call of the oldest sequence, which others join that need a call of the same size."""
        waiting = [
            (self.schedule.bucket_for(self.schedule.next_cut(row) - row.written), row)
            for row in self.running()
            if row.prefilling
        ]
        if not waiting:
            return None, ()
        # `running` is in order of arrival: the oldest sequence decides the size of the call.
        bucket = waiting[0][0]
        chunks = []
        for lane, row in sorted(self._lanes([row for call, row in waiting if call == bucket], bucket).items()):
            assert row.slot is not None
            # The last chunk of a prompt may be shorter than the call.
            end = min(self.schedule.next_cut(row), row.written + bucket[1])
            ends = end == row.target
            if row.load is not None:
                # Calls run in order: whatever overwrites the snapshot from now on comes after this one.
                self.pool(self.shard_for_slot(row.slot)).unpin_snapshot(row.load)
            chunk = PrefillChunk(
                id=row.id,
                slot=row.slot,
                lane=lane,
                start=row.written,
                tokens=row.tokens[row.written : end],
                # Only the first chunk starts where the shared prefix ends; the device then resets the counts of the
                # row.
                fresh=row.written == row.shared,
                ends=ends,
                remaining=row.unplanned,
                earlier=row.tokens[max(0, row.written - self.schedule.earlier) : row.written],
                load=row.load,
                save=self._snapshot_at(row, end),
            )
            chunks.append(chunk)
            # A chunk that ends the prompt samples one token; the others bring none, so nothing is due for them.
            self.put(replace_fields(row, written=end, due=(*row.due, 1) if ends else row.due, load=None))
        return bucket, tuple(chunks)

    def _snapshot_at(self, row: SequenceState, end: int) -> int | None:
        """The snapshot that a chunk writes at its end; None for none."""
        size = self.schedule.page_size
        if not self.schedule.snapshots or end % size or row.slot is None:
            return None
        pages = end // size
        name = page_hashes(row.tokens[:end], size, row.names[:pages])[-1]
        return self.pool(self.shard_for_slot(row.slot)).take_snapshot(name)

    def _lanes(self, waiting: Sequence[SequenceState], bucket: tuple[int, int]) -> Mapping[int, SequenceState]:
        """The sequences of a call by lane: each shard has its own consecutive lanes."""
        lanes_per_shard = bucket[0] // self.schedule.shards
        lanes: dict[int, SequenceState] = {}
        used = [0] * self.schedule.shards
        for row in waiting:
            shard = self.shard_for_slot(row.slot or 0)
            # Lanes are sharded like the rows: a sequence can only use a lane of the shard that has its pages.
            if used[shard] < lanes_per_shard:
                lanes[shard * lanes_per_shard + used[shard]] = row
                used[shard] += 1
        return lanes

    def name_pages(self) -> None:
        """Records the content of full pages in the pools, as far as it is known to be finite."""
        for row in self.rows:
            if row is None or row.slot is None or self.schedule.fixed:
                continue
            # Only pages with finite content are published: a sequence with NaN must not spoil others.
            if row.sound // self.schedule.page_size > row.named:
                self.put(self._name(row, self.pool(self.shard_for_slot(row.slot))))

    def _name(self, row: SequenceState, pool: PagePool) -> SequenceState:
        full = row.sound // self.schedule.page_size
        if not self.schedule.share_prefixes or full <= row.named:
            return row
        # Hashes that are known already are reused; only those of new full pages are computed.
        names = page_hashes(row.tokens[: full * self.schedule.page_size], self.schedule.page_size, row.names[:full])
        for page, name in zip(row.pages[row.named : full], names[row.named : full], strict=True):
            pool.name(page, name)
        return replace_fields(row, names=names, named=full)
