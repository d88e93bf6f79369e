"""`Engine`: requests come in, tokens come out, as many rows at a time as there is room for.

Rows are independent: one that ends makes room for the next prompt at once, and no row waits for another. What the next
calls are, `Schedule` says; the engine dispatches them before it reads the tokens of the calls before, so that the
devices work while the host looks at text. A row that ended is known to have ended on the devices; the host, which
learns of it a call later, drops nothing but what was never sampled.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from levanter.inference.constraint import Constraint, ConstraintError, Constraints
from levanter.inference.generation import GenerationPrograms
from levanter.inference.requests import ChoiceId, Event, Failed, Finished, Request, Token
from levanter.inference.runner import RowsOnHost, Runner, SampledArrays, fetched
from levanter.inference.sampling_arrays import RowSampling
from levanter.inference.scheduler import QueueFullError, Schedule
from levanter.inference.scheduler_state import SchedulerState
from levanter.inference.step_plan import DecodeRow, PrefillPart, StepPlan


def schedule_of(
    programs: GenerationPrograms, *, share_prefixes: bool = False, max_queued_tokens: int = 1 << 20
) -> Schedule:
    """What shares a run's Programs out among rows.

    Args:
        programs: the run's.
        share_prefixes: whether rows that begin alike share pages.
        max_queued_tokens: of prompts that wait.
    """
    cache = programs.cache
    return Schedule(
        rows=cache.rows,
        pages=cache.pages // cache.shards,
        page_size=cache.slots,
        context=cache.max_seq_len,
        buckets=tuple(programs.prefill),
        steps=programs.steps,
        shards=cache.shards,
        fixed=cache.allocation == "fixed",
        share_prefixes=share_prefixes,
        max_queued_tokens=max_queued_tokens,
    )


NOT_FINITE = (
    "the model's activations are not finite: a token has no probability, or the model overflowed; try a wider compute "
    "dtype (trainer.mp: f32)"
)
"""What is said of a row that cannot go on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    """A dispatched call: whom it is about, and what comes of it."""

    parts: tuple[PrefillPart, ...] = ()
    rows: tuple[DecodeRow, ...] = ()
    drawn: SampledArrays


@dataclass(eq=False)
class Engine:
    """The loop.

    Attributes:
        device: the rows on the devices.
        schedule: who runs next.
        behind: steps whose calls are in flight before those of the first are read, all of them at once, so that rows
            get their tokens evenly, whether or not a prompt is computed beside them; none while a text has to conform
            to something, whose next call depends on the last one.
        constraints: follows texts that have to conform to something; None where no request asks for that.
        computed_tokens: of prompts, computed so far; those of rows that gave way count each time.
        shared_tokens: of prompts, that nobody had to compute, since another row had.
    """

    device: Runner
    schedule: Schedule
    behind: int = 2
    constraints: Constraints | None = None
    computed_tokens: int = field(default=0, init=False)
    shared_tokens: int = field(default=0, init=False)
    _standing: SchedulerState = field(init=False)
    _calls: "deque[tuple[_Call, ...]]" = field(default_factory=deque, init=False)
    """Of each step that is not read yet."""
    _conforming: dict[ChoiceId, Constraint] = field(default_factory=dict, init=False)
    _lost: dict[ChoiceId, str] = field(default_factory=dict, init=False)
    _sampled: dict[ChoiceId, RowSampling] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._standing = self.schedule.start()

    @property
    def standing(self) -> SchedulerState:
        """Who waits and who runs now."""
        return self._standing

    @property
    def idle(self) -> bool:
        """Whether nobody waits, nobody runs, and no call is in flight."""
        return self._standing.idle and not self._calls

    def run(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Goes on with each prompt until it ends; events in the order in which they come.

        Requests are taken as there is room for them.

        Raises:
            RefusedError: a request that could never finish; see `Schedule.check`.
        """
        source, waits = iter(requests), None
        while True:
            while len(self._standing.queue) < self.schedule.rows and (waits := waits or next(source, None)) is not None:
                try:
                    self.offer(waits)
                except QueueFullError:
                    break
                waits = None
            yield from self.step()
            if self.idle and waits is None:
                return

    def offer(self, request: Request) -> None:
        """Takes a request into the queue.

        Raises:
            RefusedError: it could never finish; see `Schedule.check`.
            QueueFullError: too many tokens wait.
        """
        self._standing = self.schedule.offered(self._standing, request)

    def step(self) -> Iterator[Event]:
        """Dispatches the next calls and reads those that are due: what came of them. All of it has to be read."""
        plan = self.schedule.step(self._standing)
        self._standing = plan.after
        self.computed_tokens += sum(len(part.tokens) for part in plan.prefill)
        self.shared_tokens += sum(part.start for part in plan.prefill if part.fresh)
        if calls := self._dispatch(plan):
            self._calls.append(calls)
        constrained = any(row is not None and row.request.constraint for row in plan.after.rows)
        while self._calls and (len(self._calls) > self.behind or plan.empty or constrained):
            for call in self._calls.popleft():
                yield from self._read(call)
            if plan.empty:
                break

    def give_up(self, of: ChoiceId) -> None:
        """Ends a choice; what comes of it from here on is dropped."""
        self._conforming.pop(of, None)
        self._lost.pop(of, None)
        self._standing = self.schedule.ended(self._standing, of)

    def _dispatch(self, plan: StepPlan) -> tuple[_Call, ...]:
        """Sends a step's calls. Rows first that have text: who ends a prompt in this step goes on in the next one."""
        sampling, calls = self._sampling_of(plan), []
        if plan.decode:
            masks = self._masks([(row.id, row.place) for row in plan.decode], plan)
            drawn = self.device.decode(plan.decode, plan.tables, sampling, masks)
            calls.append(_Call(rows=plan.decode, drawn=drawn))
        if plan.bucket is not None:
            masks = self._masks([(part.id, part.place) for part in plan.prefill if part.ends], plan)
            drawn = self.device.prefill(plan.bucket, plan.prefill, plan.tables, sampling, masks)
            calls.append(_Call(parts=plan.prefill, drawn=drawn))
        return tuple(calls)

    def _sampling_of(self, plan: StepPlan) -> list[RowSampling | None]:
        """How each row is sampled: the same object in every step, so that who has seen it need not look again."""
        known, self._sampled = self._sampled, {}
        found: list[RowSampling | None] = []
        for row in plan.after.rows:
            if row is None:
                found.append(None)
                continue
            own = known.get(row.id)
            own = self._sampled[row.id] = _sampling(row.request, row.id) if own is None else own
            found.append(own)
        return found

    def _masks(self, chosen: list[tuple[ChoiceId, int]], plan: StepPlan) -> dict[int, np.ndarray]:
        """Which ids rows may sample next, by place, of those whose texts have to conform to something."""
        masks = {}
        for of, place in chosen:
            row = plan.after.rows[place]
            if row is None or row.request.constraint is None:
                continue
            assert self.constraints is not None, f"{of} has to conform to something, and nobody follows it"
            try:
                if of not in self._conforming:
                    self._conforming[of] = self.constraints.start(row.request.constraint)
                masks[place] = self._conforming[of].mask()
            except ConstraintError as error:
                # Nothing may be sampled, which ends the row.
                self._lost[of] = str(error)
                masks[place] = np.zeros(1, np.uint32)
        return masks

    def _read(self, call: _Call) -> Iterator[Event]:
        """Waits for a call's tokens and gives them."""
        drawn = fetched(call.drawn)
        for part in call.parts:
            at = (part.lane,)
            if not drawn.finite[at]:
                yield from self._lose(part.id)
            elif part.ends:
                yield from self._tokens(part.id, drawn, [at])
            else:
                self._standing = self._standing.read_part(part.id, part.start + len(part.tokens))
        there: list[list[bool]] = drawn.there.tolist() if call.rows else []
        for row in call.rows:
            places = [(step, row.place) for step, rows in enumerate(there) if rows[row.place]]
            yield from self._tokens(row.id, drawn, places)

    def _tokens(self, of: ChoiceId, drawn: RowsOnHost, places: list[tuple[int, ...]]) -> Iterator[Event]:
        row = self._standing.find(of)
        if row is None:
            return
        good = [at for at in places if drawn.ok[at]]
        ids = tuple(int(drawn.tokens[at]) for at in good)
        self._standing = self._standing.read(of, ids)
        request, made = row.request, len(row.made)
        count = request.params.logprobs
        for at, id_ in zip(good, ids, strict=True):
            made += 1
            is_end = id_ in request.stop_ids
            if of in self._conforming and not is_end:
                try:
                    self._conforming[of].accept(id_)
                except ConstraintError as error:
                    # What follows the text has a limit of its own; only this row ends by it.
                    self._lost[of] = str(error)
                    yield from self._lose(of)
                    return
            if is_end or made >= row.limit:
                # Before anybody hears of it, so that who gives up the choice now does no more than that.
                self.give_up(of)
            if count is None:
                yield Token(of=of, id=id_)
            else:
                top = zip(drawn.top_ids[at][:count].tolist(), drawn.top_logprobs[at][:count].tolist(), strict=True)
                yield Token(of=of, id=id_, logprob=float(drawn.logprobs[at]), top=tuple(top))
            if is_end or made >= row.limit:
                yield Finished(of=of, reason="stop" if is_end else "length", matched=id_ if is_end else None)
            if self._standing.find(of) is None:
                return
        if len(good) < len(places):
            yield from self._lose(of)

    def _lose(self, of: ChoiceId) -> Iterator[Event]:
        # Others may begin with those of its pages that were found sound before.
        if self._standing.find(of) is not None:
            error = self._lost.pop(of, NOT_FINITE)
            self.give_up(of)
            yield Failed(of=of, error=error)


def _sampling(request: Request, of: ChoiceId) -> RowSampling:
    return RowSampling(
        params=request.params,
        seed=request.seed,
        choice=of.choice,
        prompt_tokens=len(request.tokens),
        stop_ids=request.stop_ids,
    )
