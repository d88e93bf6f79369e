"""A stand-in for the device of a schedule, which only remembers which token was written where.

It writes tokens into pages as the plan says and, before anything reads a position, looks whether the page that the
table names holds exactly the row's token of that position after exactly the row's tokens before it.
"""

import dataclasses
from collections import deque
from dataclasses import dataclass, field

from levanter.inference.requests import ChoiceId, Request, SamplingParams
from levanter.inference.scheduler import Schedule
from levanter.inference.scheduler_state import (
    page_hashes,
)

LAST = 10_000
"""A token that ends a row."""
POISON = 20_000
"""A token from which on nothing in a row is a number."""


def request(id, tokens, *, n=1, max_tokens=4, **more):
    params = SamplingParams(n=n, max_tokens=max_tokens, **more)
    return Request(id=str(id), tokens=tuple(tokens), params=params, seed=0, stop_ids=(LAST,))


@dataclass
class Device:
    """The cache: (shard, page, slot) → the whole sequence up to there; and what rows and snapshots remember."""

    schedule: Schedule
    cache: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)
    memory: dict[int, tuple[int, ...]] = field(default_factory=dict)
    snapshots: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def remember(self, parts, texts):
        """A prefill call, for a model that remembers more than its pages: all lanes load before any of them saves."""
        shards = {part.slot: part.slot // self.schedule.rows_per_shard for part in parts}
        for part in parts:
            loaded = () if part.load is None else self.snapshots[shards[part.slot], part.load]
            before = loaded if part.fresh else self.memory[part.slot]
            assert part.fresh or part.load is None
            assert before == texts[part.id][: part.start], f"place {part.slot} begins with another memory"
            self.memory[part.slot] = before + part.tokens
        for part in parts:
            if part.save is not None:
                assert 0 <= part.save < self.schedule.snapshots
                self.snapshots[shards[part.slot], part.save] = self.memory[part.slot]

    def at(self, plan, place, position):
        page = int(plan.tables[place, position // self.schedule.page_size])
        assert 0 <= page < self.schedule.pages, f"position {position} of place {place} has no page"
        return place // self.schedule.rows_per_shard, page, position % self.schedule.page_size

    def check_read(self, plan, place, tokens):
        """Everything before the end of `tokens` must be there, written for this very sequence."""
        for position in range(len(tokens)):
            found = self.cache.get(self.at(plan, place, position))
            assert found == tokens[: position + 1], f"place {place} reads another sequence at {position}"

    def write(self, plan, place, tokens, start):
        for position in range(start, len(tokens)):
            self.cache[self.at(plan, place, position)] = tokens[: position + 1]


@dataclass
class Run:
    """A schedule, a device, and whoever reads its tokens a step late."""

    schedule: Schedule
    lengths: dict[ChoiceId, int]
    behind: int
    standing: object = None
    device: Device = None
    unread: deque = field(default_factory=deque)
    texts: dict[ChoiceId, tuple[int, ...]] = field(default_factory=dict)
    finished: set = field(default_factory=set)
    preempted: int = 0
    shared: int = 0
    lost: set = field(default_factory=set)
    done: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self):
        self.state = self.schedule.start()
        self.device = Device(self.schedule)

    def token(self, id, sequence):
        """What the model says next: by the sequence and the choice, so that a row that gave way says the same again."""
        made = len(sequence) - len(self.prompts[id.request])
        return LAST if made + 1 == self.lengths.get(id) else 1 + (hash((sequence, id.choice)) % 3)

    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    params: dict[str, SamplingParams] = field(default_factory=dict)

    def offer(self, made):
        self.prompts[made.id], self.params[made.id] = made.tokens, made.params
        self.state = self.schedule.offered(self.state, made)
        for n in range(made.params.n):
            self.texts[ChoiceId(made.id, n)] = made.tokens

    def step(self):
        before, ran = snapshot(self.state), {row.id for row in self.state.rows if row is not None}
        plan = self.schedule.step(self.state)
        assert snapshot(self.state) == before, "a step has changed what it was given"
        self.check_order(plan, ran)
        for place in plan.released:
            self.done[place] = True
        produced, parts = {}, []
        self.preempted += len(plan.preempted)
        assert len({part.slot for part in plan.prefill} | {row.slot for row in plan.decode}) == len(plan.prefill) + len(
            plan.decode
        ), "a row is prefilled and decoded in one step"
        ends = []
        for part in plan.prefill:
            rows, tokens = plan.bucket
            assert 0 <= part.lane < rows and 0 < len(part.tokens) <= tokens
            assert part.lane // (rows // self.schedule.shards) == part.slot // self.schedule.rows_per_shard
            sequence = self.texts[part.id]
            assert sequence[part.start : part.start + len(part.tokens)] == part.tokens
            self.device.check_read(plan, part.slot, sequence[: part.start])
            if part.fresh:
                self.shared += part.start
                params = self.params[part.id.request]
                assert part.start == 0 or (params.repetition_penalty == 1 and not params.echo)
                # Those that it made itself are counted as they are computed again.
                assert not params.counts_tokens or part.start <= len(self.prompts[part.id.request])
            ends.append((part, sequence[: part.start + len(part.tokens)]))
        if self.schedule.snapshots:
            self.device.remember(plan.prefill, self.texts)
        # The rows of one call run at the same time: none may depend on what another one writes.
        for part, sequence in ends:
            self.device.write(plan, part.slot, sequence, part.start)
        for part, sequence in ends:
            self.device.check_read(plan, part.slot, sequence)
            parts.append((part.id, len(sequence), part.ends, POISON not in part.tokens))
            if part.ends:
                assert sequence == self.texts[part.id]
                token = self.token(part.id, sequence)
                self.texts[part.id] += (token,)
                self.done[part.slot] = token == LAST or part.remaining == 1
                produced[part.id] = (token,)
        for row in plan.decode:
            assert self.done[row.slot] or self.generated(row.id) + row.tokens <= self.limits[row.id]
            made = []
            for _ in range(row.tokens):
                if self.done[row.slot]:
                    break
                sequence = self.texts[row.id]
                if self.schedule.snapshots:
                    assert self.device.memory[row.slot] == sequence[:-1]
                    self.device.memory[row.slot] = sequence
                self.device.check_read(plan, row.slot, sequence[:-1])
                self.device.write(plan, row.slot, sequence, len(sequence) - 1)
                token = self.token(row.id, sequence)
                self.texts[row.id] += (token,)
                made.append(token)
                self.done[row.slot] = token == LAST or self.generated(row.id) == self.limits[row.id]
            produced[row.id] = tuple(made)
        self.unread.append((parts, produced))
        self.state = plan.after
        while len(self.unread) > self.behind:
            self.read()
        self.check()
        return plan

    limits: dict[ChoiceId, int] = field(default_factory=dict)

    def generated(self, id):
        return len(self.texts[id]) - len(self.prompts[id.request])

    def check_order(self, plan, ran):
        """Who came first is admitted first, but for choices that wait for another one of their request."""
        if self.clients:
            self.check_fairness(plan)
            return
        running = {row.id.request for row in plan.after.rows if row is not None}
        waiting = [row.order for row in plan.after.queue if row.id.request not in running]
        admitted = [row.order for row in plan.after.rows if row is not None and row.id not in ran]
        assert not waiting or not admitted or max(admitted) < min(waiting), "somebody was overtaken"

    def check_fairness(self, plan):
        """No client is at one row while another one has three and a choice of the first waits for nothing but a row."""
        running = {row.id.request for row in plan.after.rows if row is not None}
        shares = plan.after.shares()
        full = all(row is not None for row in plan.after.rows)
        waiting = [row for row in plan.after.queue if not row.due and row.id.request not in running]
        if not (full and waiting) or self.schedule.shards > 1:
            return
        least = min(shares[row.request.client[:1]] for row in waiting)
        # One row changes hands in a step, and the pages of one need not be enough for another.
        if self.schedule.fixed and self.waited > 2 * self.schedule.rows:
            assert max(shares[client] for client in shares if len(client) == 1) < least + 2
        self.waited += 1

    waited: int = 0
    clients: bool = False

    def read(self):
        parts, produced = self.unread.popleft()
        for id, end, ends, sound in parts:
            if not sound and self.state.find(id) is not None:
                self.lost.add(id)
                self.end(id)
            elif not ends:
                self.state = self.state.read_part(id, end)
        for id, tokens in produced.items():
            row = self.state.find(id)
            self.state = self.state.read(id, tokens)
            if row is None:
                continue
            read = row.generated + tokens
            if (tokens and tokens[-1] == LAST) or len(read) == self.limits[id]:
                self.end(id)

    def end(self, id):
        self.state = self.schedule.ended(self.state, id)
        self.finished.add(id)

    def check(self):
        """No page is lost or held by other rows than those that have it."""
        schedule, standing = self.schedule, self.state
        for shard, pool in enumerate(standing.pools):
            pool.check()
            for name, page in pool._page_of.items():
                there = self.device.cache[shard, page, schedule.page_size - 1]
                assert page_hashes(there, schedule.page_size)[-1] == name, "a page has another name than contents"
                assert POISON not in there, "a row may begin with what is lost"
                if pool.has_snapshot(name):
                    assert self.device.snapshots[shard, pool._snapshot_of[name]] == there
            holders = {}
            for place in range(shard * schedule.rows_per_shard, (shard + 1) * schedule.rows_per_shard):
                row = standing.rows[place]
                if row is not None:
                    assert row.slot == place and len(set(row.pages)) == len(row.pages)
                    for page in row.pages:
                        holders[page] = holders.get(page, 0) + 1
            if not schedule.fixed:
                assert {page: pool.holders(page) for page in range(pool.size) if pool.holders(page)} == holders
            else:
                assert all(count == 1 for count in holders.values())
        assert [row.order for row in standing.queue] == sorted(row.order for row in standing.queue)

    def drain(self, most):
        """Steps until nobody is there; everybody must get there."""
        for n in range(most):
            if self.state.idle:
                while self.unread:
                    self.read()
                return n
            plan = self.step()
            if plan.empty and self.unread:
                self.read()
        raise AssertionError(f"after {most} steps there is still {self.state}")


def snapshot(standing):
    return dataclasses.replace(standing, pools=()), [
        (
            *(list(p._free), dict(p._holders), list(p._idle), dict(p._page_of), dict(p._name_of)),
            *(list(p._snapshot_of.items()), dict(p._loading)),
        )
        for p in standing.pools
    ]


def small(**changes):
    given = dict(rows=4, pages=8, page_size=4, context=32, buckets=((1, 8), (4, 4)))
    return Schedule(**(given | changes))


def started(schedule, *requests, ends=99, behind=0):
    run = Run(schedule, {}, behind)
    for one in requests:
        run.offer(one)
        for n in range(one.params.n):
            run.lengths[ChoiceId(one.id, n)] = ends
            run.limits[ChoiceId(one.id, n)] = one.new_tokens(schedule.context)
    return run
