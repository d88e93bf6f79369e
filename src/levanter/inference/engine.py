"""`Engine`: requests in, tokens out, as many sequences at a time as the cache has room for.

Sequences are independent: when one ends, the next prompt takes its row, and none waits for another. `Schedule` plans
the next calls; the engine dispatches them before it reads the tokens of earlier calls, so that the devices work while
the host processes text. `DeviceRunner` holds the model, the cache and the state of the rows on the devices, and calls
the Programs. The devices know when a sequence has ended; the host learns it a call later, and discards nothing but rows
that sampled no token.
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
from levanter.inference.constraint import ConstraintError, Constraints
from levanter.inference.programs import GenerationPrograms
from levanter.inference.requests import ChoiceId, Event, Failed, Finished, Request, TextConstraint, Token
from levanter.inference.sampling import SlotSampling, host_params
from levanter.inference.scheduler import QueueFullError, Schedule
from levanter.inference.scheduler_state import DecodeSlot, PrefillChunk, SchedulerState, StepPlan
from levanter.layers.decode_state import NO_TOKEN

Masks: TypeAlias = Mapping[int, np.ndarray]
"""By row, the ids that it may sample next: uint32, a bit for each id, the lowest first."""

SampledArrays: TypeAlias = Mapping[str, jax.Array]
"""The arrays of `SampledSlots` by path; they may still be being computed."""


class Runner(Protocol):
    """The calls of a decode loop; see `DeviceRunner` for their arguments and results."""

    @property
    def programs(self) -> GenerationPrograms:
        """The Programs of the run."""
        ...

    def prefill(
        self,
        bucket: tuple[int, int],
        chunks: Sequence[PrefillChunk],
        tables: np.ndarray,
        sampling: Sequence[SlotSampling | None],
        masks: Masks | None = None,
    ) -> SampledArrays:
        """Prefills chunks of prompts."""
        ...

    def decode(
        self,
        rows: Sequence[DecodeSlot],
        tables: np.ndarray,
        sampling: Sequence[SlotSampling | None],
        masks: Masks | None = None,
    ) -> SampledArrays:
        """Samples the next tokens of rows."""
        ...

    def update(self, model: PyTree) -> None:
        """Takes other weights, and forgets the cache and the rows."""
        ...


class DeviceRunner:
    """Runs the Programs of a model on a mesh, and holds its cache and the state of its rows.

    Args:
        programs: the Programs.
        mesh: the devices.
        model: the model on them.
        jit: makes a Program callable.
    """

    def __init__(self, programs: GenerationPrograms, mesh: Mesh, model: PyTree, *, jit: Jit = Program.jit):
        self._programs = programs
        self._mesh, self._jit = mesh, jit
        # A single CPU reads host arrays in place, so inputs need not be copied to a device.
        self._on_host = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
        self._calls: dict[str, Callable[..., PyTree]] = {}
        # By Program: masks that allow every id. `_before` holds, by Program and input, the last host value and its copy
        # on the devices; `_params`, by number of rows, the last sampling parameters and their arrays.
        self._open: dict[str, Flat] = {}
        self._before: dict[tuple[str, str], tuple[np.ndarray | Mapping[str, np.ndarray], Flat]] = {}
        self._params: dict[int, tuple[list[SlotSampling | None], dict[str, np.ndarray]]] = {}
        # How many ids before the tokens of a call the model reads.
        self._earlier = programs.cache.earlier_token_ids
        self.update(model)

    def update(self, model: PyTree) -> None:
        """Takes other weights, and begins with an empty cache and unused rows.

        Keys and values of other weights mean nothing to these, so none is kept; the caller forgets which page had which
        tokens (`Engine.update`).

        Args:
            model: the model on the devices, of the same shapes and shardings.
        """
        # A call takes place for every token: the model, with hundreds of leaves, is flattened once instead of in each
        # call.
        self._flat_model = Flat.of(model)
        # The last cache is freed before the next one is allocated: both together are not planned.
        self._cache = self._state = Flat({})
        cache, state = self._call(self._programs.start)
        self._cache, self._state = Flat.of(cache), Flat.of(state)

    def release(self) -> None:
        """Frees the model, the cache and the rows on the devices; only `update` may be called next."""
        self._flat_model = self._cache = self._state = Flat({})

    @property
    def programs(self) -> GenerationPrograms:
        """The Programs of the run."""
        return self._programs

    def prefill(
        self,
        bucket: tuple[int, int],
        chunks: Sequence[PrefillChunk],
        tables: np.ndarray,
        sampling: Sequence[SlotSampling | None],
        masks: Masks | None = None,
    ) -> SampledArrays:
        """Prefills chunks of prompts.

        Args:
            bucket: rows and tokens of the call.
            chunks: chunks of different rows.
            tables: `[row, table]`, the pages of all rows, numbered within their shards.
            sampling: how each row is sampled; None for an unused row.
            masks: masks of constrained rows.

        Returns:
            The sampled tokens over the lanes of the call; only those of prompts that ended are meaningful.
        """
        rows, length = bucket
        # The order is that of `values` below; the Program finds its inputs by name.
        names = ("first", "count", "row", "fresh", "ends", "remaining", "prompt")
        inputs: dict[str, np.ndarray] = {name: np.zeros(rows, np.int32) for name in names}
        # Unused lanes point past the last row, where the Program's updates are dropped.
        inputs["row"][:] = self.programs.cache.rows
        inputs["tokens"] = np.zeros((rows, length), np.int32)
        inputs["tables"] = np.zeros((rows, tables.shape[1]), np.int32)
        if self.programs.cache.snapshots:
            inputs |= {name: np.full(rows, -1, np.int32) for name in ("load", "save")}
        if self._earlier:
            inputs["earlier"] = np.full((rows, self._earlier), NO_TOKEN, np.int32)
        # Sampling parameters are kept by slot; the prefill call wants them by lane, its own batch axis.
        lane_sampling: list[SlotSampling | None] = [None] * rows
        for chunk in chunks:
            slot_sampling = lane_sampling[chunk.lane] = sampling[chunk.slot]
            assert slot_sampling is not None, f"{chunk.id} has no parameters"
            inputs["tokens"][chunk.lane, : len(chunk.tokens)] = chunk.tokens
            inputs["tables"][chunk.lane] = tables[chunk.slot]
            for name, snapshot in (("load", chunk.load), ("save", chunk.save)):
                if snapshot is not None:
                    inputs[name][chunk.lane] = snapshot
            if chunk.earlier:
                # The oldest first; before the first token of a sequence is none.
                inputs["earlier"][chunk.lane, self._earlier - len(chunk.earlier) :] = chunk.earlier
            values = (
                chunk.start,
                len(chunk.tokens),
                chunk.slot,
                chunk.fresh,
                chunk.ends,
                chunk.remaining,
                slot_sampling.prompt_tokens,
            )
            for name, value in zip(names, values, strict=True):
                inputs[name][chunk.lane] = value
        # Masks too arrive by slot and leave by lane.
        lane_masks = {chunk.lane: masks[chunk.slot] for chunk in chunks if chunk.slot in masks} if masks else {}
        return self._step(self.programs.prefill[bucket], inputs, self._of_rows(lane_sampling), lane_masks)

    def decode(
        self,
        rows: Sequence[DecodeSlot],
        tables: np.ndarray,
        sampling: Sequence[SlotSampling | None],
        masks: Masks | None = None,
    ) -> SampledArrays:
        """Samples the next tokens of rows.

        Args:
            rows: the rows.
            tables, sampling, masks: see `prefill`. Rows with a mask get one token.

        Returns:
            The sampled tokens over all rows, with a leading axis `step`.
        """
        # 0: the row keeps its state, because it is empty, still being prefilled, or not planned in this step.
        inputs: dict[str, np.ndarray] = {"tables": tables, "going": np.zeros(len(sampling), np.int32)}
        inputs["going"][[row.slot for row in rows]] = 1
        # 2: one token only, because the mask holds for one.
        inputs["going"][list(masks or ())] = 2
        return self._step(self.programs.decode, inputs, self._of_rows(sampling), masks or {})

    def _of_rows(self, sampling: Sequence[SlotSampling | None]) -> dict[str, np.ndarray]:
        """`host_params` of rows; only the entries that changed since the last call of the same size are computed."""
        before = self._params.get(len(sampling))
        # The engine passes the same object for a sequence in every step, so identity tells what changed.
        if before is None or any(a is not b for a, b in zip(before[0], sampling, strict=True)):
            before = self._params[len(sampling)] = (list(sampling), host_params(sampling, before=before))
        return before[1]

    def _step(
        self, program: Program, inputs: Mapping[str, np.ndarray], params: Mapping[str, np.ndarray], masks: Masks
    ) -> SampledArrays:
        named: dict[str, np.ndarray | Mapping[str, np.ndarray]] = {"params": params, **inputs}
        # The first three inputs of a Program are the model, the cache and the state, which are passed below.
        values = [
            self._masks(program, one, masks) if one.name == "masks" else self._placed(program, one, named[one.name])
            for one in program.inputs[3:]
        ]
        outputs = self._call(program, self._flat_model, self._cache, self._state, *values)
        # The cache and the state were donated: the old ones must not be used again.
        self._cache, self._state, drawn = outputs.part("0"), outputs.part("1"), outputs.part("2").arrays
        if not self._on_host:
            # Starts the transfer now, behind the computation; `fetch` waits for it when the results are due.
            for array in drawn.values():
                array.copy_to_host_async()
        return drawn

    def _placed(self, program: Program, declared: Input, value: np.ndarray | Mapping[str, np.ndarray]) -> Flat:
        """An input on the devices; if it is the same as in the last call, that copy is reused.

        Copying takes longer than comparing: a call has more than a dozen small arrays, and few change between steps.
        """
        if self._on_host:
            return Flat(dict(value) if isinstance(value, Mapping) else {"": value})
        # Programs of different sizes have inputs of the same name: one copy is kept for each.
        key = (program.name, declared.name)
        before = self._before.get(key)
        if before is None or not _same(before[0], value):
            before = self._before[key] = (value, Flat.of(place(declared, value, self._mesh)))
        return before[1]

    def _masks(self, program: Program, declared: Input, masks: Masks) -> Flat:
        """The masks of a call's rows. The masks of a call without constraints are large and stay on the devices."""
        # A call with constraints needs new masks each time: they depend on the last token of each text.
        if masks or program.name not in self._open:
            placed = Flat.of(place(declared, expand_masks(declared.value.array.shape, masks), self._mesh))
            if masks:
                return placed
            self._open[program.name] = placed
        return self._open[program.name]

    def _call(self, program: Program, *values: PyTree) -> PyTree:
        # Compiled at the first call of a Program; later calls with other requests reuse it, as shapes do not change.
        if program.name not in self._calls:
            self._calls[program.name] = self._jit(program, self._mesh)
        return self._calls[program.name](*values)


def _same(a: np.ndarray | Mapping[str, np.ndarray], b: np.ndarray | Mapping[str, np.ndarray]) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        # `_of_rows` returns the same mapping if no row changed, so the arrays are rarely compared.
        return a is b or all(np.array_equal(a[name], b[name]) for name in b)
    return np.array_equal(a, b)  # pyright: ignore[reportArgumentType]


def expand_masks(shape: tuple[int, ...], masks: Masks) -> np.ndarray:
    """Masks of all rows, boolean `[batch, vocab]`: all true without a mask, false after the end of a short mask."""
    every = np.ones(shape, np.bool_)
    for n, mask in masks.items():
        # Masks are bits in little-endian words, the first id lowest.
        bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little", count=min(32 * len(mask), shape[1]))
        # A mask may be shorter than the vocabulary: that of a constraint that failed is a single word.
        every[n] = False
        every[n, : len(bits)] = bits
    return every


@dataclass(frozen=True, kw_only=True)
class HostSamples:
    """`SampledSlots` on the host: each array is over rows, with a leading axis of steps in a decode call."""

    tokens: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    ok: np.ndarray
    active: np.ndarray
    finite: np.ndarray
    policy_logprobs: np.ndarray | None = None


def fetch(drawn: SampledArrays) -> HostSamples:
    """Copies the results of a call to this host, and waits for them."""
    # The results are replicated, so the first local shard is the whole.
    arrays = {path: np.asarray(x.addressable_data(0)) for path, x in drawn.items()}
    return HostSamples(**{path.removeprefix("sampled."): array for path, array in arrays.items()})


def make_schedule(
    programs: GenerationPrograms, *, share_prefixes: bool = False, max_queued_tokens: int = 1 << 20
) -> Schedule:
    """The schedule for a run's Programs.

    Args:
        programs: the Programs.
        share_prefixes: whether sequences with a common prefix share pages, if the model's state is in pages only.
        max_queued_tokens: limit on tokens of prompts that wait.
    """
    cache = programs.cache
    # The schedule plans within shards: it takes the pages of one shard, and the rows of all.
    return Schedule(
        earlier=cache.earlier_token_ids,
        rows=cache.rows,
        pages=cache.pages // cache.shards,
        page_size=cache.page_size,
        context=cache.max_seq_len,
        buckets=tuple(programs.prefill),
        steps=programs.steps,
        shards=cache.shards,
        fixed=cache.allocation == "fixed",
        share_prefixes=share_prefixes and cache.shares_prefixes,
        snapshots=cache.snapshots // cache.shards if share_prefixes else 0,
        max_queued_tokens=max_queued_tokens,
    )


NOT_FINITE = (
    "the model's activations are not finite: a token has no probability, or the model overflowed; try a wider compute "
    "dtype (trainer.mp: f32)"
)
"""The error of a choice whose logits are not finite."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _InflightCall:
    """A dispatched call: its sequences and its results."""

    chunks: tuple[PrefillChunk, ...] = ()
    rows: tuple[DecodeSlot, ...] = ()
    drawn: SampledArrays


@dataclass(eq=False)
class Engine:
    """The decode loop.

    Attributes:
        device: calls the Programs.
        schedule: plans the calls.
        max_inflight: steps that are dispatched before the results of the first are read, so that sequences get their
            tokens evenly, whether or not a prompt is computed meanwhile; none while a sequence has a constraint, as its
            next call depends on its last token.
        constraints: makes masks for constrained texts; None if no request has a constraint.
        computed_tokens: prompt tokens that were computed so far; those of preempted sequences count each time.
        shared_tokens: prompt tokens that were reused from the cache of another sequence.
    """

    device: Runner
    schedule: Schedule
    max_inflight: int = 2
    constraints: Constraints | None = None
    computed_tokens: int = field(default=0, init=False)
    shared_tokens: int = field(default=0, init=False)
    _state: SchedulerState = field(init=False)
    _calls: "deque[tuple[_InflightCall, ...]]" = field(default_factory=deque, init=False)
    """The calls of each step that was not read yet."""
    _conforming: dict[ChoiceId, TextConstraint] = field(default_factory=dict, init=False)
    _lost: dict[ChoiceId, str] = field(default_factory=dict, init=False)
    _sampled: dict[ChoiceId, SlotSampling] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._state = self.schedule.start()

    @property
    def state(self) -> SchedulerState:
        """The waiting and running sequences."""
        return self._state

    @property
    def idle(self) -> bool:
        """Whether no sequence waits or runs, and no call is in flight."""
        return self._state.idle and not self._calls

    def run(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Generates the choices of all requests; yields events in the order in which they happen.

        Requests are read from `requests` as the queue has room for them.

        Raises:
            RefusedError: a request could never finish; see `Schedule.check`.
        """
        source, waits = iter(requests), None
        while True:
            # A full batch of waiting choices is enough to refill every row: more would only hold prompts in memory.
            while len(self._state.queue) < self.schedule.rows and (waits := waits or next(source, None)) is not None:
                try:
                    self.offer(waits)
                # Nothing is lost: the request stays in `waits` and is offered again after the step.
                except QueueFullError:
                    break
                waits = None
            yield from self.step()
            if self.idle and waits is None:
                return

    def update(self, model: PyTree) -> None:
        """Continues with other weights: forgets all pages, and the prefixes that were found in them.

        Args:
            model: the model on the devices, of the same shapes and shardings.
        """
        assert self.idle, "the weights of an engine change between texts, not within one"
        self.device.update(model)
        # A page of the last weights that were found for a prefix would give the text of a model that is gone.
        self._state = self.schedule.start()
        self._conforming, self._lost, self._sampled = {}, {}, {}

    def offer(self, request: Request, choices: Sequence[int] | None = None) -> None:
        """Puts a request into the queue.

        Args:
            request: the request.
            choices: numbers of the choices that are put in, where the caller bounds the queue; None for all.

        Raises:
            RefusedError: it could never finish; see `Schedule.check`.
            QueueFullError: too many tokens wait; not with `choices`.
        """
        self._state = self.schedule.offered(self._state, request, choices)

    def step(self) -> Iterator[Event]:
        """Dispatches the next calls, reads those that are due, and yields their events.

        The step is complete only when the iterator is exhausted.
        """
        plan = self.schedule.step(self._state)
        self._state = plan.after
        self.computed_tokens += sum(len(chunk.tokens) for chunk in plan.prefill)
        # The first chunk of a sequence starts after the pages that it shares.
        self.shared_tokens += sum(chunk.start for chunk in plan.prefill if chunk.fresh)
        # Dispatch first: the devices get the next calls before this thread waits for results.
        if calls := self._dispatch(plan):
            self._calls.append(calls)
        # The mask of the next call depends on the token of this one, so that call cannot be dispatched before it is
        # read.
        constrained = any(row is not None and row.request.constraint for row in plan.after.rows)
        # With nothing to dispatch, or with a constraint, results are read at once.
        while self._calls and (len(self._calls) > self.max_inflight or plan.empty or constrained):
            for call in self._calls.popleft():
                yield from self._read(call)
            # One step is enough: the tokens that it brings may make the next plan nonempty.
            if plan.empty:
                break

    def cancel(self, of: ChoiceId) -> None:
        """Ends a choice; its further tokens are dropped."""
        # A call in flight may still bring tokens of it; `_tokens` drops them, as the state no longer knows the choice.
        self._conforming.pop(of, None)
        self._lost.pop(of, None)
        self._state = self.schedule.ended(self._state, of)

    def cancel_request(self, request: str) -> None:
        """Ends all choices of a request."""
        for known in (self._conforming, self._lost):
            for of in [of for of in known if of.request == request]:
                del known[of]
        self._state = self.schedule.ended_request(self._state, request)

    def _dispatch(self, plan: StepPlan) -> tuple[_InflightCall, ...]:
        """Dispatches a step's calls: the decode call first, as running sequences should not wait for prompts."""
        sampling, calls = self._slot_sampling(plan), []
        if plan.decode:
            masks = self._masks([(row.id, row.slot) for row in plan.decode], plan)
            drawn = self.device.decode(plan.decode, plan.tables, sampling, masks)
            calls.append(_InflightCall(rows=plan.decode, drawn=drawn))
        if plan.bucket is not None:
            # Only the last chunk of a prompt samples a token, so only its row needs a mask.
            masks = self._masks([(chunk.id, chunk.slot) for chunk in plan.prefill if chunk.ends], plan)
            drawn = self.device.prefill(plan.bucket, plan.prefill, plan.tables, sampling, masks)
            calls.append(_InflightCall(chunks=plan.prefill, drawn=drawn))
        return tuple(calls)

    def _slot_sampling(self, plan: StepPlan) -> list[SlotSampling | None]:
        """How each row is sampled: the same object in every step, so that the runner compares identities."""
        # Rebuilt from the running rows, so that entries of ended choices do not accumulate.
        known, self._sampled = self._sampled, {}
        samplings: list[SlotSampling | None] = []
        for row in plan.after.rows:
            if row is None:
                samplings.append(None)
                continue
            sampling = known.get(row.id)
            sampling = self._sampled[row.id] = _sampling(row.request, row.id) if sampling is None else sampling
            samplings.append(sampling)
        return samplings

    def _masks(self, chosen: list[tuple[ChoiceId, int]], plan: StepPlan) -> dict[int, np.ndarray]:
        """The masks of constrained sequences, by row."""
        masks = {}
        for of, slot in chosen:
            row = plan.after.rows[slot]
            if row is None or row.request.constraint is None:
                continue
            try:
                # A matcher starts at the first sampled token. A preempted choice keeps it, as it has read its tokens
                # already.
                if of not in self._conforming:
                    self._conforming[of] = self._start(row.request)
                masks[slot] = self._conforming[of].mask()
            except ConstraintError as error:
                # An empty mask allows no token, which ends the row.
                self._lost[of] = str(error)
                masks[slot] = np.zeros(1, np.uint32)
        return masks

    def _start(self, request: Request) -> TextConstraint:
        """A constraint at the beginning of a text."""
        if request.compiled is not None:
            return request.compiled.copy()
        assert self.constraints is not None and request.constraint is not None, f"{request.id}: no `constraints`"
        return self.constraints.start(request.constraint)

    def _read(self, call: _InflightCall) -> Iterator[Event]:
        """Waits for the results of a call, and yields their events."""
        drawn = fetch(call.drawn)
        for chunk in call.chunks:
            at = (chunk.lane,)
            # Chunks in the middle of a prompt sample nothing, but after a NaN in one of them the text means nothing.
            if not drawn.finite[at]:
                yield from self._lose(chunk.id)
            elif chunk.ends:
                yield from self._tokens(chunk.id, drawn, [at])
            else:
                self._state = self._state.read_part(chunk.id, chunk.start + len(chunk.tokens))
        active: list[list[bool]] = drawn.active.tolist() if call.rows else []
        for row in call.rows:
            # A row that ended within the call was inactive in its later steps: these indices hold nothing of it.
            indices = [(step, row.slot) for step, rows in enumerate(active) if rows[row.slot]]
            yield from self._tokens(row.id, drawn, indices)

    def _tokens(self, of: ChoiceId, drawn: HostSamples, indices: list[tuple[int, ...]]) -> Iterator[Event]:
        # The choice was cancelled while the call was in flight.
        row = self._state.find(of)
        if row is None:
            return
        good = [at for at in indices if drawn.ok[at]]
        ids = tuple(int(drawn.tokens[at]) for at in good)
        # All tokens of the call are recorded before the first event: the caller may cancel at any `yield`.
        self._state = self._state.read(of, ids)
        request, generated = row.request, len(row.generated)
        count = request.params.logprobs
        for at, id_ in zip(good, ids, strict=True):
            generated += 1
            # The device applied the same rule, so it has marked the row as done as well.
            is_end = id_ in request.stop_ids
            if of in self._conforming and not is_end:
                try:
                    self._conforming[of].accept(id_)
                except ConstraintError as error:
                    # llguidance has limits of its own; only this choice fails.
                    self._lost[of] = str(error)
                    yield from self._lose(of)
                    return
            if is_end or generated >= row.limit:
                # Before the event is yielded: a caller that cancels the choice on it must find it ended.
                self.cancel(of)
            policy = None if drawn.policy_logprobs is None else float(drawn.policy_logprobs[at])
            logprob = None if count is None else float(drawn.logprobs[at])
            top = zip(*(x[at][: count or 0].tolist() for x in (drawn.top_ids, drawn.top_logprobs)), strict=True)
            yield Token(of=of, id=id_, logprob=logprob, top=tuple(top), policy_logprob=policy)
            # A stop id wins over the limit if both hold at this token.
            if is_end or generated >= row.limit:
                yield Finished(of=of, reason="stop" if is_end else "length", matched=id_ if is_end else None)
            # Ended above, or cancelled by the caller while it handled the event.
            if self._state.find(of) is None:
                return
        # A row that was active and could not sample has failed.
        if len(good) < len(indices):
            yield from self._lose(of)

    def _lose(self, of: ChoiceId) -> Iterator[Event]:
        # Pages that were known to be sound before remain available for prefix reuse.
        if self._state.find(of) is not None:
            failed = Failed(of=of, error=self._lost.get(of, NOT_FINITE), is_invalid=of in self._lost)
            self.cancel(of)
            yield failed


def _sampling(request: Request, of: ChoiceId) -> SlotSampling:
    return SlotSampling(
        params=request.params,
        seed=request.seed,
        choice=of.choice,
        prompt_tokens=len(request.tokens),
        stop_ids=request.stop_ids,
    )
