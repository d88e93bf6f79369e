"""Serving report of a verdict: bytes, slots that fit, time to the first token, and decode rates by load.

Bytes and floors follow from the run's plan by arithmetic (`inference.capacity`); times are those of its compiled
Programs, and absent without a compiler. Every load has its *floor* (the roofline: a lower bound of the time), its
*share* (floor over time), and the resource that sets the floor.
"""

from collections import Counter
from dataclasses import dataclass, replace

from levanter.hardware import Accelerator
from levanter.inference.capacity import CONTEXTS, LOADS, DecodeCost, Roofline
from levanter.inference.kv_cache import KIND_NAMES
from levanter.plan.oom_report import decode_cost, decode_temporaries
from levanter.plan.step_time_model import StepTime
from levanter.plan.verdict import ProgramVerdict, Verdict

SHOWN_DTYPES = ("bfloat16", "int8")
"""Dtypes of keys and values in the table of rows that fit."""


@dataclass(frozen=True, kw_only=True)
class DecodeMemory:
    """Bytes on a device.

    Attributes:
        groups: bytes by use.
        temporaries: the most that a Program allocates in addition to its inputs.
        compiled: whether the temporaries are the compiler's figure.
        limit: memory of a device; None where that is not known.
        page: positions of a page, and its bytes on a device.
        repeated: bytes of the cache that other devices hold too.
    """

    groups: dict[str, int]
    temporaries: int
    compiled: bool
    limit: int | None
    page: tuple[int, int]
    repeated: int

    @property
    def used(self) -> int:
        """The sum of all groups and temporaries."""
        return sum(self.groups.values()) + self.temporaries

    @property
    def free(self) -> int | None:
        """The remaining bytes; negative where the sum exceeds the limit."""
        return None if self.limit is None else self.limit - self.used


@dataclass(frozen=True, kw_only=True)
class PrefillCall:
    """A prefill call, or the calls of one prompt.

    Attributes:
        name: the Program's name, or the length of the prompt.
        rows: number of prompts.
        tokens: of each prompt.
        calls: the number of calls of each Program.
        time: seconds, low, expected, high; None without a compiler.
        floor: lower bound of the time; None without a chip.
    """

    name: str
    rows: int
    tokens: int
    calls: dict[str, int]
    time: tuple[float, float, float] | None
    floor: Roofline | None


@dataclass(frozen=True, kw_only=True)
class DecodeLoad:
    """Decoding with a number of running rows.

    Attributes:
        rows: over all devices.
        program: that decodes their next tokens.
        time: seconds for one token of every row, low, expected, high; None without a compiler.
        floor: lower bound of the time.
        chips: that share the work.
    """

    rows: int
    program: str
    time: tuple[float, float, float] | None
    floor: Roofline
    chips: int

    @property
    def seconds(self) -> float:
        """The expected time, or the floor without a compiler."""
        return self.floor.seconds if self.time is None else self.time[1]

    @property
    def share(self) -> float | None:
        """The floor over the expected time."""
        return None if self.time is None else self.floor.seconds / self.time[1]

    @property
    def rate(self) -> float:
        """Tokens/s/chip."""
        return self.rows / self.seconds / self.chips


@dataclass(frozen=True, kw_only=True)
class StartupCost:
    """The time before the first token.

    Attributes:
        source_bytes: of weights in storage; None where nothing is read.
        seconds: modelled time of reading them.
        compiled: by Program, the seconds that tracing and compiling took.
        programs: the number of Programs.
    """

    source_bytes: int | None
    seconds: float | None
    compiled: dict[str, float]
    programs: int


@dataclass(frozen=True, kw_only=True)
class ServingReport:
    """The serving part of a verdict.

    Attributes:
        served: the model, its rows and its calls.
        memory: bytes on a device.
        contexts: by dtype, how many rows of the lengths of `CONTEXTS` fit; empty where memory is not known.
        buckets: the prefill Programs, one for each bucket of lengths.
        prompts: single prompts of several lengths.
        loads: decoding with several numbers of rows.
        start: the time before the first token.
        compute_bound: rows from which products take longer than reading the weights; None without a chip.
        repeated_window: bytes on a device that layers with a sliding window store beyond their windows.
    """

    served: DecodeCost
    memory: DecodeMemory
    contexts: dict[str, dict[str, int]]
    buckets: tuple[PrefillCall, ...]
    prompts: tuple[PrefillCall, ...]
    loads: tuple[DecodeLoad, ...]
    start: StartupCost
    compute_bound: int | None
    repeated_window: int


def serving_report(verdict: Verdict) -> ServingReport | None:
    """The serving report of a verdict; None for runs that generate no text."""
    cost = decode_cost(verdict.plan)
    if cost is None:
        return None
    memory, pod = _decode_memory(verdict, cost), verdict.accelerator
    prompts = sorted({min(tokens, cost.context) for tokens in (128, 2048, cost.context)})
    loads = sorted({min(rows, cost.rows) for rows in (*LOADS, cost.rows)})
    # The cache stores whole rows in every layer; a layer with a window reads (`seen`) the window alone.
    window = cost.bytes_per_row(cost.context) - cost.bytes_per_row(cost.context, seen=True)
    return ServingReport(
        served=cost,
        memory=memory,
        contexts={} if memory.limit is None else _contexts(cost, memory.limit, memory.temporaries),
        buckets=tuple(_bucket(verdict, cost, name) for name in cost.prefill),
        prompts=tuple(_prompt(verdict, cost, tokens) for tokens in prompts),
        loads=() if pod is None else tuple(_load(verdict, cost, rows, pod) for rows in loads),
        start=_start(verdict, cost),
        compute_bound=None if pod is None else cost.compute_bound_rows(**_chip(pod)),
        repeated_window=window * -(-cost.rows // cost.shards),
    )


def _chip(pod: Accelerator) -> dict[str, float]:
    return {"bandwidth": pod.hbm_bandwidth, "peak": pod.peak_flops()}


def _program(verdict: Verdict, name: str) -> ProgramVerdict | None:
    return next((program for program in verdict.programs if program.name == name), None)


def _decode_memory(verdict: Verdict, served: DecodeCost) -> DecodeMemory:
    assert verdict.plan is not None
    weights, plan = served.weights, verdict.plan
    temporaries = decode_temporaries(served, (program.outcome for program in verdict.programs))
    groups = {
        "int8 weights": weights.integers,
        "scales": weights.scales,
        "other weights": weights.others,
        "embedding table": weights.table,
        "cache": served.cache_bytes,
        **{KIND_NAMES[kind]: nbytes for kind, nbytes in served.row_bytes.items()},
        "rows' state": served.state_bytes * -(-served.rows // served.shards),
    }
    limit = verdict.budget.hbm_bytes if verdict.budget is not None else None
    return DecodeMemory(
        groups={name: nbytes for name, nbytes in groups.items() if nbytes},
        temporaries=served.temp_bytes if temporaries is None else temporaries,
        compiled=temporaries is not None,
        limit=plan.target.limit_bytes if limit is None else limit,
        page=(served.page, served.cache_bytes * served.shards // served.pages),
        # `served.repeated` devices hold the same pages where kv heads are fewer
        # than the shards of tensor parallelism.
        repeated=served.cache_bytes - served.cache_bytes // served.repeated,
    )


def _contexts(served: DecodeCost, limit: int, temporaries: int) -> dict[str, dict[str, int]]:
    dtypes = dict.fromkeys((*SHOWN_DTYPES, served.dtype))
    return {
        dtype: {name: served.fitting(limit, length, dtype, temp_bytes=temporaries) for name, length in CONTEXTS.items()}
        for dtype in dtypes
    }


def _time(verdict: ProgramVerdict | None) -> StepTime | None:
    return None if verdict is None else verdict.time


def _ends(time: StepTime | None) -> tuple[float, float, float] | None:
    return None if time is None else (time.low, time.expected, time.high)


def _busy(time: StepTime | None) -> float:
    return 0.0 if time is None else max((link.busy for link in time.links), default=0.0)


def _bucket(verdict: Verdict, served: DecodeCost, name: str) -> PrefillCall:
    rows, tokens = served.prefill[name]
    time, pod = _time(_program(verdict, name)), verdict.accelerator
    floor = None if pod is None else served.prefill_floor(rows, tokens, links=_busy(time), **_chip(pod))
    return PrefillCall(name=name, rows=rows, tokens=tokens, calls={name: 1}, time=_ends(time), floor=floor)


def _prompt(verdict: Verdict, served: DecodeCost, tokens: int) -> PrefillCall:
    """A single prompt, from its first call to its first token."""
    calls, pod = Counter(served.calls_of_prompt(tokens)), verdict.accelerator
    times = {name: _time(_program(verdict, name)) for name in calls}
    ranges = {name: ends for name, time in times.items() if (ends := _ends(time)) is not None}
    time = None
    if len(ranges) == len(calls):
        # The calls of one prompt run one after another, so their ranges add up;
        # one unknown call leaves the sum unknown.
        low, expected, high = (sum(ranges[name][n] * count for name, count in calls.items()) for n in range(3))
        time = (low, expected, high)
    floor = None
    if pod is not None:
        links = sum(_busy(times[name]) * count for name, count in calls.items())
        floor = served.prefill_floor(1, tokens, links=links, **_chip(pod))
        # Each call of a chunked prompt reads all weights again; the floor counts one reading.
        floor = replace(floor, weights=floor.weights * calls.total())
    return PrefillCall(name=f"{tokens:,} tokens", rows=1, tokens=tokens, calls=dict(calls), time=time, floor=floor)


def _load(verdict: Verdict, served: DecodeCost, rows: int, pod: Accelerator) -> DecodeLoad:
    name = served.decoding(rows)
    time = _time(_program(verdict, name))
    ends = _ends(time)
    # A call decodes up to `steps` tokens in a loop. Where the compiler states no trip count (the loop may end early),
    # the figures have one iteration already.
    if time is not None and ends is not None and not any("trip count" in line for line in time.unknown):
        ends = (ends[0] / served.steps, ends[1] / served.steps, ends[2] / served.steps)
    return DecodeLoad(
        rows=rows,
        program=name,
        time=ends,
        floor=served.decode_floor(rows, served.context, links=_busy(time), **_chip(pod)),
        chips=pod.chips,
    )


def _start(verdict: Verdict, served: DecodeCost) -> StartupCost:
    names = {*served.decode.values(), *served.prefill}
    compiled = {
        program.name: program.outcome.lower_seconds + program.outcome.compile_seconds
        for program in verdict.programs
        if program.outcome is not None and program.name in names
    }
    load = verdict.load
    return StartupCost(
        source_bytes=None if load is None else load.source_bytes,
        seconds=None if load is None else load.seconds,
        compiled=compiled,
        programs=len(names) + 1,
    )
