"""The cost of a job: hours, dollars, checkpoints, interruptions, host memory, input and storage.

Figures are *spans*: a low, an expected and a high value. The time of the work is that of the Programs; this module adds
what happens around them:

    busy = work + saves · blocked + exports · exporting
    total = start + busy / (1 − rate · (lost + again)) · (1 + rate · wait) + last save

*start* is reading the weights and compiling every Program once. *blocked* is the time for which the loop waits in one
save: the copy to the host, and the rest of the write before it, if that takes longer than the time between two saves.
*exporting* is the time of one export, for which the loop waits: a checkpoint is written completely before it, then one
host writes the weights.
*lost* is the work since the last checkpoint: half of the time between two saves, all of it in the high value.
*again* is compiling and reading the checkpoint, *wait* the time until the pod is back, in which nothing can be
interrupted; together they are a restart. In the low value nothing interrupts the run.

What a person has to tell is in `PlanOptions`. Prices have no default: without one, there are no dollars. The rates that
are assumed otherwise are below, with their sources.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from levanter.hardware import Accelerator
from levanter.plan.decode_roofline import DecodeLoad
from levanter.plan.load_budget import STORE_RATE
from levanter.plan.verdict import ProgramVerdict, Verdict
from levanter.runplan import OK, PlanOptions, TrainingJob

INTERRUPTIONS, INTERRUPTED_DEVICES, INTERRUPTED_DAYS = 419, 16_384, 54
"""Unexpected interruptions of one job in 54 days on 16,384 GPUs: Grattafiori et al., "The Llama 3 Herd of Models",
2024, table 5."""
STORE_RATES = (0.16, 9.3)
"""10⁹ bytes a second: the lowest and the highest rate of a single host that `load_budget.STORE_RATE` cites."""
LINK_SHARE = 0.5
"""The share of the published bandwidth of the link to the host that the slowest copy reaches. An assumption."""
TOKEN_BYTES = 4
"""Bytes of a token in a token store before compression (int32)."""
SPOT = "spot"
GB = 1e9
DAY = 86400.0
MONTH = 365.25 / 12 * DAY


@dataclass(frozen=True, kw_only=True)
class CostRange:
    """A low, an expected and a high value."""

    low: float
    expected: float
    high: float

    @classmethod
    def of(cls, value: float) -> "CostRange":
        """A value without uncertainty."""
        return cls(low=value, expected=value, high=value)

    def __add__(self, other: "CostRange") -> "CostRange":
        return CostRange(low=self.low + other.low, expected=self.expected + other.expected, high=self.high + other.high)

    def times(self, factor: float) -> "CostRange":
        """All three, multiplied by a positive factor."""
        return CostRange(low=self.low * factor, expected=self.expected * factor, high=self.high * factor)


ZERO = CostRange.of(0.0)


@dataclass(frozen=True, kw_only=True)
class Saves:
    """The checkpoints of a run.

    Attributes:
        count: saves during the run; None where its time is not known.
        between: seconds between two saves, as far as they are known; infinite where nothing is saved by time.
        host_bytes: bytes of one checkpoint that one host copies and writes.
        blocked: seconds for which the loop waits in one save; None where the link to the host has no published rate.
        writing: seconds of writing one checkpoint, in the background.
        share: of the time of steps and saves for which the loop waits; None where either is not known.
    """

    count: int | None
    between: float
    host_bytes: float
    blocked: CostRange | None
    writing: CostRange
    share: CostRange | None


@dataclass(frozen=True, kw_only=True)
class Exports:
    """The exports of a run.

    Attributes:
        count: the last one included.
        nbytes: of the weights of one.
        seconds: for which the loop waits in one.
    """

    count: int
    nbytes: int
    seconds: CostRange


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """Interruptions of a run.

    Attributes:
        per_day: of the whole pod.
        assumed: whether the rate is that of a published run.
        count: expected during the run.
        lost: seconds of work that one loses.
        restart: seconds until the run continues.
        goodput: share of the time that is spent in steps.
    """

    per_day: float
    assumed: bool
    count: float
    lost: CostRange
    restart: CostRange
    goodput: CostRange


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Bytes in storage and from it.

    Attributes:
        at_end: bytes of checkpoints and exports at the end of the run.
        at_most: bytes during it: one more checkpoint, since an old one is deleted after a new one is complete.
        read: bytes read during the run: weights, tokens, and checkpoints after interruptions.
    """

    at_end: int
    at_most: int
    read: float


@dataclass(frozen=True, kw_only=True)
class JobCost:
    """The cost of a job.

    Attributes:
        training: whether the run trains.
        work: seconds of its Programs; None where a time is not known.
        unknown: names of the Programs whose number of executions is unknown, and which are left out.
        loading: seconds of reading weights; None where nothing is read.
        compilation: seconds of compiling every Program once; None where nothing was compiled.
        total: seconds of the job; `high` is infinite where interruptions come faster than restarts.
        chips: of the pod.
        prices: dollars for a chip-hour, by kind of offer; empty where none is known.
        saves: its checkpoints; None for none.
        exports: None for none.
        interruptions: None for runs that do not train.
        host_bytes: peak memory of a host by cause.
        host_limit: memory of a host; None where it is not published.
        tokens_per_second: that the input delivers, all hosts together; None for runs that do not train.
        storage: None for runs that do not train.
    """

    training: bool
    work: CostRange | None
    unknown: tuple[str, ...]
    loading: CostRange | None
    compilation: CostRange | None
    total: CostRange | None
    chips: int
    prices: dict[str, float]
    saves: Saves | None
    exports: Exports | None
    interruptions: Interruptions | None
    host_bytes: dict[str, float]
    host_limit: int | None
    tokens_per_second: CostRange | None
    storage: Storage | None

    @property
    def chip_hours(self) -> CostRange | None:
        """Chip-hours of the whole job."""
        return None if self.total is None else self.total.times(self.chips / 3600)

    def dollars(self, kind: str) -> CostRange | None:
        """Dollars for the chips of the whole job, at the price of one kind of offer."""
        hours = self.chip_hours
        return None if hours is None else hours.times(self.prices[kind])


def job_cost(verdict: Verdict) -> JobCost | None:
    """The cost of a run; None for one that cannot run, and for devices that are not a pod."""
    plan, pod, options = verdict.plan, verdict.accelerator, verdict.options
    if plan is None or pod is None or verdict.exit_code != OK:
        return None
    # Training runs alone have a job: steps, checkpoints and a state to restore.
    job, rate = plan.job, store_rate(options)
    work, unknown = _work(verdict)
    # All hosts read at the same time, so the one that reads most sets the time.
    read = bytes_by_host(verdict)
    loading = _transfer(max(read), rate) if read else None
    compilation = _compilation(verdict)
    start = (loading or ZERO) + (compilation or ZERO)
    saves = None if job is None else _saves(job, pod, work, rate)
    exports = None if job is None or saves is None else _exports(job, saves, rate)
    total, interruptions = (None if work is None else start + work), None
    # Other runs keep no state: what an interruption costs them depends on the command, and is not modelled.
    if job is not None and work is not None and saves is not None:
        restart = CostRange.of(options.restart_wait.total_seconds()) + (compilation or ZERO)
        restart += _transfer(job.restored_host_bytes + job.reread_host_bytes, rate)
        exporting = ZERO if exports is None else exports.seconds.times(exports.count)
        total, interruptions = _interrupted(work, start, saves, exporting, restart, pod, options)
    return JobCost(
        training=job is not None,
        work=work,
        unknown=unknown,
        loading=loading,
        compilation=compilation,
        total=total,
        chips=pod.chips,
        prices=chip_hour_prices(options, pod),
        saves=saves,
        exports=exports,
        interruptions=interruptions,
        host_bytes=_host_bytes(verdict, pod, job),
        host_limit=_host_limit(pod),
        tokens_per_second=None if job is None else _tokens_per_second(verdict),
        storage=None if job is None else _storage(verdict, job, interruptions),
    )


def bytes_by_host(verdict: Verdict) -> list[int]:
    """Bytes of weights that each host reads before the first step, those of a second model included; empty for none."""
    second = None if verdict.plan is None else verdict.plan.second_load
    loads = [load.bytes_by_host for load in (verdict.load, second) if load is not None]
    return [sum(reads) for reads in zip(*loads, strict=True)]


def token_price(load: DecodeLoad, dollars: float) -> CostRange:
    """Dollars for a million tokens that are decoded under a load; its least value alone is known without a compiler.

    Args:
        load: the rows that decode at once.
        dollars: for a chip-hour.
    """
    low, expected, high = (load.floor.seconds,) * 3 if load.time is None else load.time
    # Every call makes one token of every row.
    return CostRange(low=low, expected=expected, high=high).times(load.chips * dollars / 3600 / load.rows * 1e6)


def chip_hour_prices(options: PlanOptions, pod: Accelerator) -> dict[str, float]:
    """Dollars for a chip-hour of a pod by kind of offer, `""` where a price has no kind."""
    prices = {} if options.chip_hour_price is None else {"": options.chip_hour_price}
    for key, dollars in options.price.items():
        # `v6e:spot` is a generation and a kind of offer, `v6e` a generation alone.
        name, _, kind = key.partition(":")
        if name in (pod.generation.name, *pod.generation.aliases):
            prices[kind] = dollars
    return prices


def store_rate(options: PlanOptions) -> CostRange:
    """10⁹ bytes a second that a host reads and writes; a given rate has no span."""
    if options.store_rate is not None:
        return CostRange.of(options.store_rate)
    return CostRange(low=STORE_RATES[0], expected=STORE_RATE, high=STORE_RATES[1])


def _transfer(nbytes: float, rate: CostRange) -> CostRange:
    """Seconds for bytes of one host: the high rate gives the low time."""
    return CostRange(low=nbytes / GB / rate.high, expected=nbytes / GB / rate.expected, high=nbytes / GB / rate.low)


def _work(verdict: Verdict) -> tuple[CostRange | None, tuple[str, ...]]:
    """Seconds of all Programs with a workload, and those whose number of executions is unknown."""
    working = [p for p in verdict.programs if p.workload is not None]
    counted = [p for p in working if p.workload is not None and p.workload.executions is not None]
    unknown = tuple(p.name for p in working if p not in counted)
    # One unknown time makes the whole unknown: the sum of the others would read like the time of the job.
    if not counted or any(p.time is None for p in counted):
        return None, unknown
    return sum((_program_seconds(program) for program in counted), ZERO), unknown


def _program_seconds(program: ProgramVerdict) -> CostRange:
    assert program.time is not None and program.workload is not None and program.workload.executions is not None
    time = program.time
    return CostRange(low=time.low, expected=time.expected, high=time.high).times(program.workload.executions)


def _compilation(verdict: Verdict) -> CostRange | None:
    """Seconds of tracing and compiling, as measured here: between the longest Program and all of them in turn."""
    seconds = [
        program.outcome.lower_seconds + program.outcome.compile_seconds
        for program in verdict.programs
        if program.outcome is not None
    ]
    return CostRange(low=max(seconds), expected=sum(seconds), high=sum(seconds)) if seconds else None


def _saves(job: TrainingJob, pod: Accelerator, work: CostRange | None, rate: CostRange) -> Saves:
    # Whichever comes first: the timer of temporary checkpoints, a permanent one, or the end of the run.
    spacings = [math.inf if job.save_seconds is None else job.save_seconds]
    count = None
    if work is not None:
        spacings.append(work.expected)
        if job.permanent_every is not None:
            spacings.append(work.expected * job.permanent_every / job.steps)
        # The timer restarts at every save, so this counts a few saves too many where permanent ones are frequent.
        temporary = 0 if job.save_seconds is None else int(work.expected / job.save_seconds)
        count = job.permanent_checkpoints + temporary
    # Each host writes an equal part: arrays with copies are sliced over the devices that hold them.
    between, host_bytes = min(spacings), job.checkpoint_bytes / pod.hosts
    writing, link = _transfer(host_bytes, rate), pod.generation.host_link_bandwidth
    blocked = share = None
    if link is not None:
        copy = host_bytes / (link * pod.chips_per_host)
        # A save first waits for the write before it, which only delays it where that is not complete yet.
        pause = between if count is None or count > 1 else math.inf
        blocked = CostRange(
            low=copy + max(writing.low - pause, 0.0),
            expected=copy + max(writing.expected - pause, 0.0),
            high=copy / LINK_SHARE + max(writing.high - pause, 0.0),
        )
    if blocked is not None and work is not None and count is not None:
        # The largest share is that of the longest saves in the shortest run.
        share = CostRange(
            low=_share(count * blocked.low, work.high),
            expected=_share(count * blocked.expected, work.expected),
            high=_share(count * blocked.high, work.low),
        )
    return Saves(count=count, between=between, host_bytes=host_bytes, blocked=blocked, writing=writing, share=share)


def _exports(job: TrainingJob, saves: Saves, rate: CostRange) -> Exports | None:
    if not job.exports:
        return None
    # Process 0 writes; the others wait for it, and so does the loop.
    return Exports(
        count=job.exports, nbytes=job.export_bytes, seconds=saves.writing + _transfer(job.export_bytes, rate)
    )


def _share(part: float, rest: float) -> float:
    return part / (part + rest) if part + rest > 0 else 0.0


def _interrupted(
    work: CostRange,
    start: CostRange,
    saves: Saves,
    exporting: CostRange,
    restart: CostRange,
    pod: Accelerator,
    options: PlanOptions,
) -> tuple[CostRange, Interruptions]:
    """The time of the whole run with interruptions, and these."""
    assumed = options.interruptions_per_day is None
    # Failures of single devices add up: twice the devices stop twice as often.
    published = INTERRUPTIONS / INTERRUPTED_DAYS / INTERRUPTED_DEVICES * pod.chips
    per_day = published if options.interruptions_per_day is None else options.interruptions_per_day
    # An interruption is equally likely at any moment between two saves.
    lost = CostRange(low=0.0, expected=saves.between / 2, high=saves.between)
    blocked = (saves.blocked or ZERO).times(saves.count or 0) + exporting
    rate, wait = per_day / DAY, options.restart_wait.total_seconds()
    again = restart + CostRange.of(-wait)
    # Writing the last checkpoint has no steps to hide behind.
    around = start + saves.writing

    def total(steps: CostRange) -> CostRange:
        busy = steps + blocked
        # In the low value nothing interrupts the run.
        return around + CostRange(
            low=busy.low,
            expected=_stretched(busy.expected, rate * (lost.expected + again.expected)) * (1 + rate * wait),
            high=_stretched(busy.high, rate * (lost.high + again.high)) * (1 + rate * wait),
        )

    # The same work in all three, so that goodput does not depend on the uncertainty of the step time.
    same = total(CostRange.of(work.expected))
    goodput = CostRange(
        low=work.expected / same.high, expected=work.expected / same.expected, high=work.expected / same.low
    )
    whole = total(work)
    return whole, Interruptions(
        per_day=per_day,
        assumed=assumed,
        # Only a pod that is there can be interrupted.
        count=rate * (whole.expected - around.expected) / (1 + rate * wait),
        lost=lost,
        restart=restart,
        goodput=goodput,
    )


def _stretched(seconds: float, lost_share: float) -> float:
    """Time with interruptions, which take `lost_share` of it; infinite where they leave none."""
    return seconds / (1 - lost_share) if lost_share < 1 else math.inf


def _host_bytes(verdict: Verdict, pod: Accelerator, job: TrainingJob | None) -> dict[str, float]:
    causes: dict[str, float] = {}
    if verdict.load is not None:
        causes["loading"] = verdict.load.host_peak
    if job is not None:
        # The devices continue while the host holds a copy of its part of the state.
        causes["saving"] = job.checkpoint_bytes / pod.hosts
    offloaded = max((p.offloaded.host_bytes for p in verdict.programs if p.offloaded is not None), default=0)
    if offloaded:
        causes["activations"] = offloaded
    return causes


def _host_limit(pod: Accelerator) -> int | None:
    limit = pod.generation.host_bytes
    # A host with fewer chips is a part of a full one.
    return None if limit is None else limit * pod.chips_per_host // pod.generation.chips_per_host


def _trained(verdict: Verdict) -> Iterator[ProgramVerdict]:
    """The train steps, one for each batch size."""
    for program in verdict.programs:
        if program.workload is not None and program.name.startswith("train_step"):
            yield program


def _tokens_per_second(verdict: Verdict) -> CostRange | None:
    """Tokens a second of the fastest train step."""
    spans = []
    for program in _trained(verdict):
        work, time = program.workload, program.time
        if work is not None and time is not None and time.low > 0:
            # The slowest step needs the fewest tokens a second.
            tokens = work.tokens
            spans.append(CostRange(low=tokens / time.high, expected=tokens / time.expected, high=tokens / time.low))
    # The input has to keep up with the fastest batch size of a schedule.
    return max(spans, key=lambda span: span.expected, default=None)


def _storage(verdict: Verdict, job: TrainingJob, interruptions: Interruptions | None) -> Storage:
    hosts = verdict.plan.target.hosts if verdict.plan is not None else 1
    # The last temporary checkpoints of a finished run are not deleted.
    kept = job.permanent_checkpoints + (job.temporary_checkpoints if job.save_seconds is not None else 0)
    # Exports are never deleted.
    exported = job.exports * job.export_bytes
    tokens = sum(p.workload.tokens * (p.workload.executions or 0) for p in _trained(verdict) if p.workload is not None)
    weights = sum(bytes_by_host(verdict))
    again = (job.restored_host_bytes + job.reread_host_bytes) * hosts
    # A run without an end reads without an end; it has other problems than storage.
    restarts = 0.0 if interruptions is None or not math.isfinite(interruptions.count) else interruptions.count
    return Storage(
        at_end=kept * job.checkpoint_bytes + exported,
        at_most=(kept + 1) * job.checkpoint_bytes + exported,
        read=weights + tokens * TOKEN_BYTES + restarts * again,
    )
