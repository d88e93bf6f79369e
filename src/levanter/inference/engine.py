"""`DeviceRunner`: the cache and the rows on the devices, and the two calls that change them.

Calls are dispatched in order and return at once, with arrays that are still being computed; whoever reads those waits.
So the next call can be on its way before the tokens of the last one are read: what it needs of them is on the devices.

`Engine`: requests come in, tokens come out, as many rows at a time as there is room for.

Rows are independent: one that ends makes room for the next prompt at once, and no row waits for another. What the next
calls are, `Schedule` says; the engine dispatches them before it reads the tokens of the calls before, so that the
devices work while the host looks at text. A row that ended is known to have ended on the devices; the host, which
learns of it a call later, drops nothing but what was never sampled.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.prefetch import place
from haliax_ext.program import Flat, Input, Jit, Program
from haliax_ext.pytree import PyTree
from levanter.inference.constraint import Constraint, ConstraintError, Constraints
from levanter.inference.programs import GenerationPrograms
from levanter.inference.requests import ChoiceId, Event, Failed, Finished, Request, Token
from levanter.inference.sampling import SlotSampling, host_params
from levanter.inference.scheduler import QueueFullError, Schedule
from levanter.inference.scheduler_state import DecodeSlot, PrefillChunk, SchedulerState, StepPlan

Masks: TypeAlias = Mapping[int, np.ndarray]
"""By row: which ids it may sample next, uint32, a bit each, lowest first."""

SampledArrays: TypeAlias = Mapping[str, jax.Array]
"""The arrays of `SampledRows` by path, maybe still being computed."""


class Runner(Protocol):
    """The two calls that move rows on; `DeviceRunner` says what they take and give."""

    @property
    def programs(self) -> GenerationPrograms:
        """What is run."""
        ...

    def prefill(
        self,
        bucket: tuple[int, int],
        parts: Sequence[PrefillChunk],
        tables: np.ndarray,
        sampling: Sequence[SlotSampling | None],
        masks: Masks | None = None,
    ) -> SampledArrays:
        """Takes parts of prompts."""
        ...

    def decode(
        self,
        rows: Sequence[DecodeSlot],
        tables: np.ndarray,
        sampling: Sequence[SlotSampling | None],
        masks: Masks | None = None,
    ) -> SampledArrays:
        """Gives rows their next tokens."""
        ...


class DeviceRunner:
    """The rows of one model on one mesh.

    Args:
        programs: what is run.
        mesh: the devices.
        model: the model on them.
        jit: makes a Program callable.
    """

    def __init__(self, programs: GenerationPrograms, mesh: Mesh, model: PyTree, *, jit: Jit = Program.jit):
        self._programs = programs
        self._mesh, self._model, self._jit = mesh, model, jit
        self._flat_model = Flat.of(model)
        # One CPU reads what is on the host where it is, so nothing has to be placed.
        self._on_host = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
        self._calls: dict[str, Callable[..., PyTree]] = {}
        self._open: dict[str, Flat] = {}
        self._before: dict[tuple[str, str], tuple[np.ndarray | Mapping[str, np.ndarray], Flat]] = {}
        self._params: dict[int, tuple[list[SlotSampling | None], dict[str, np.ndarray]]] = {}
        cache, state = self._call(programs.start)
        self._cache, self._state = Flat.of(cache), Flat.of(state)

    @property
    def programs(self) -> GenerationPrograms:
        """What is run."""
        return self._programs

    def prefill(
        self,
        bucket: tuple[int, int],
        parts: Sequence[PrefillChunk],
        tables: np.ndarray,
        sampling: Sequence[SlotSampling | None],
        masks: Masks | None = None,
    ) -> SampledArrays:
        """Takes parts of prompts.

        Args:
            bucket: rows and tokens of the call.
            parts: of different rows.
            tables: `[row, table]`, the pages of all rows, numbered within their shards.
            sampling: how each row is sampled; None for a row that nobody uses.
            masks: of the rows that may not sample any id.

        Returns:
            What was sampled, over the lanes of the call; it means something where a prompt ended.
        """
        rows, length = bucket
        names = ("first", "count", "row", "fresh", "ends", "left", "prompt")
        given: dict[str, np.ndarray] = {name: np.zeros(rows, np.int32) for name in names}
        given["row"][:] = self.programs.cache.rows
        given["tokens"] = np.zeros((rows, length), np.int32)
        given["tables"] = np.zeros((rows, tables.shape[1]), np.int32)
        of_lane: list[SlotSampling | None] = [None] * rows
        for part in parts:
            own = of_lane[part.lane] = sampling[part.place]
            assert own is not None, f"{part.id} has no parameters"
            given["tokens"][part.lane, : len(part.tokens)] = part.tokens
            given["tables"][part.lane] = tables[part.place]
            values = (part.start, len(part.tokens), part.place, part.fresh, part.ends, part.left, own.prompt_tokens)
            for name, value in zip(names, values, strict=True):
                given[name][part.lane] = value
        own = {part.lane: masks[part.place] for part in parts if part.place in masks} if masks else {}
        return self._step(self.programs.prefill[bucket], given, self._of_rows(of_lane), own)

    def decode(
        self,
        rows: Sequence[DecodeSlot],
        tables: np.ndarray,
        sampling: Sequence[SlotSampling | None],
        masks: Masks | None = None,
    ) -> SampledArrays:
        """Gives rows their next tokens.

        Args:
            rows: which.
            tables, sampling, masks: see `prefill`. Rows with a mask get one token.

        Returns:
            What was sampled, over all rows, with an axis `step` in front.
        """
        given: dict[str, np.ndarray] = {"tables": tables, "going": np.zeros(len(sampling), np.int32)}
        given["going"][[row.place for row in rows]] = 1
        given["going"][list(masks or ())] = 2
        return self._step(self.programs.decode, given, self._of_rows(sampling), masks or {})

    def _of_rows(self, sampling: Sequence[SlotSampling | None]) -> dict[str, np.ndarray]:
        """`host_params` of rows, made of those of the call before of as many."""
        before = self._params.get(len(sampling))
        if before is None or any(a is not b for a, b in zip(before[0], sampling, strict=True)):
            before = self._params[len(sampling)] = (list(sampling), host_params(sampling, before=before))
        return before[1]

    def _step(
        self, program: Program, given: Mapping[str, np.ndarray], params: Mapping[str, np.ndarray], masks: Masks
    ) -> SampledArrays:
        named: dict[str, np.ndarray | Mapping[str, np.ndarray]] = {"params": params, **given}
        values = [
            self._masks(program, one, masks) if one.name == "masks" else self._placed(program, one, named[one.name])
            for one in program.inputs[3:]
        ]
        found = self._call(program, self._flat_model, self._cache, self._state, *values)
        self._cache, self._state, drawn = found.part("0"), found.part("1"), found.part("2").arrays
        if not self._on_host:
            for array in drawn.values():
                array.copy_to_host_async()
        return drawn

    def _placed(self, program: Program, wanted: Input, value: np.ndarray | Mapping[str, np.ndarray]) -> Flat:
        """An input on the devices; what is the same as in the call before is there already. Placing takes longer than
        looking: there are more than a dozen small arrays in a call, and from step to step few of them change."""
        if self._on_host:
            return Flat(dict(value) if isinstance(value, Mapping) else {"": value})
        key = (program.name, wanted.name)
        before = self._before.get(key)
        if before is None or not _same(before[0], value):
            before = self._before[key] = (value, Flat.of(place(wanted, value, self._mesh)))
        return before[1]

    def _masks(self, program: Program, wanted: Input, masks: Masks) -> Flat:
        """The masks of a call's rows. Where nobody has one they are on the devices already: they are large."""
        if masks or program.name not in self._open:
            placed = Flat.of(place(wanted, expand_masks(wanted.value.array.shape, masks), self._mesh))
            if masks:
                return placed
            self._open[program.name] = placed
        return self._open[program.name]

    def _call(self, program: Program, *values: PyTree) -> PyTree:
        if program.name not in self._calls:
            self._calls[program.name] = self._jit(program, self._mesh)
        return self._calls[program.name](*values)


def _same(a: np.ndarray | Mapping[str, np.ndarray], b: np.ndarray | Mapping[str, np.ndarray]) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a is b or all(np.array_equal(a[name], b[name]) for name in b)
    return np.array_equal(a, b)  # pyright: ignore[reportArgumentType]


def expand_masks(shape: tuple[int, ...], masks: Masks) -> np.ndarray:
    """Masks of all rows, boolean `[batch, vocab]`: everything where there is none, nothing behind one that is short."""
    every = np.ones(shape, np.bool_)
    for n, mask in masks.items():
        bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little", count=min(32 * len(mask), shape[1]))
        every[n] = False
        every[n, : len(bits)] = bits
    return every


@dataclass(frozen=True, kw_only=True)
class HostSamples:
    """`SampledRows` on the host, by array: each is over rows, behind steps where there are several."""

    tokens: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    ok: np.ndarray
    there: np.ndarray
    finite: np.ndarray


def fetch(drawn: SampledArrays) -> HostSamples:
    """What was drawn, on this host; waits for it."""
    own = {path: np.asarray(x.addressable_data(0)) for path, x in drawn.items()}
    sampled = {name: own[f"sampled.{name}"] for name in ("tokens", "logprobs", "top_ids", "top_logprobs", "ok")}
    return HostSamples(**sampled, there=own["there"], finite=own["finite"])


def make_schedule(
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
class _InflightCall:
    """A dispatched call: whom it is about, and what comes of it."""

    parts: tuple[PrefillChunk, ...] = ()
    rows: tuple[DecodeSlot, ...] = ()
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
    _calls: "deque[tuple[_InflightCall, ...]]" = field(default_factory=deque, init=False)
    """Of each step that is not read yet."""
    _conforming: dict[ChoiceId, Constraint] = field(default_factory=dict, init=False)
    _lost: dict[ChoiceId, str] = field(default_factory=dict, init=False)
    _sampled: dict[ChoiceId, SlotSampling] = field(default_factory=dict, init=False)

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

    def _dispatch(self, plan: StepPlan) -> tuple[_InflightCall, ...]:
        """Sends a step's calls. Rows first that have text: who ends a prompt in this step goes on in the next one."""
        sampling, calls = self._sampling_of(plan), []
        if plan.decode:
            masks = self._masks([(row.id, row.place) for row in plan.decode], plan)
            drawn = self.device.decode(plan.decode, plan.tables, sampling, masks)
            calls.append(_InflightCall(rows=plan.decode, drawn=drawn))
        if plan.bucket is not None:
            masks = self._masks([(part.id, part.place) for part in plan.prefill if part.ends], plan)
            drawn = self.device.prefill(plan.bucket, plan.prefill, plan.tables, sampling, masks)
            calls.append(_InflightCall(parts=plan.prefill, drawn=drawn))
        return tuple(calls)

    def _sampling_of(self, plan: StepPlan) -> list[SlotSampling | None]:
        """How each row is sampled: the same object in every step, so that who has seen it need not look again."""
        known, self._sampled = self._sampled, {}
        found: list[SlotSampling | None] = []
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
        for of, slot in chosen:
            row = plan.after.rows[slot]
            if row is None or row.request.constraint is None:
                continue
            assert self.constraints is not None, f"{of} has to conform to something, and nobody follows it"
            try:
                if of not in self._conforming:
                    self._conforming[of] = self.constraints.start(row.request.constraint)
                masks[slot] = self._conforming[of].mask()
            except ConstraintError as error:
                # Nothing may be sampled, which ends the row.
                self._lost[of] = str(error)
                masks[slot] = np.zeros(1, np.uint32)
        return masks

    def _read(self, call: _InflightCall) -> Iterator[Event]:
        """Waits for a call's tokens and gives them."""
        drawn = fetch(call.drawn)
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

    def _tokens(self, of: ChoiceId, drawn: HostSamples, places: list[tuple[int, ...]]) -> Iterator[Event]:
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


def _sampling(request: Request, of: ChoiceId) -> SlotSampling:
    return SlotSampling(
        params=request.params,
        seed=request.seed,
        choice=of.choice,
        prompt_tokens=len(request.tokens),
        stop_ids=request.stop_ids,
    )
