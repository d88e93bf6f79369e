"""Learning-rate schedules as functions of the step: warmup, stable phase, decay, and cycles of them.

A run of `n` steps is divided into *cycles* (by default one). A cycle has three *phases*: a linear warmup from the end
of the previous cycle (from 0 in the first), a stable phase at the peak, and a decay with one of the *shapes* below. A
phase's length is a fraction of its cycle (at most 1) or a number of steps. By default the decay follows the warmup
immediately; a shorter decay is preceded by a stable phase, which is warmup-stable-decay (WSD).
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import draccus
import jax
import jax.numpy as jnp

from haliax_ext.errors import nearest
from levanter.config.validators import FiniteFloat, PositiveFloat, PositiveInt, Ranged

Schedule = Callable[[jax.Array], jax.Array]
"""Step (int32 scalar, from 0) → learning rate (float32 scalar)."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The parameters of a decay phase, for a shape.

    Attributes:
        peak: the learning rate at its start.
        floor: the lower limit of the learning rate.
        steps: its length.
        warmup_steps: steps of warmup before it, in its cycle.

    >>> phase = Phase(peak=1.0, floor=0.0, steps=100, warmup_steps=0)
    >>> shapes = [LinearLrSchedule(), CosineLrSchedule(), PolynomialLrSchedule(power=2.0)]
    >>> [round(float(shape.at(phase, jnp.float32(25))), 3) for shape in shapes]
    [0.75, 0.854, 0.562]
    """

    peak: float
    floor: float
    steps: int
    warmup_steps: int


@dataclass(frozen=True, kw_only=True)
class LrSchedule(Ranged, draccus.ChoiceRegistry):
    """The shape of a decay: a function of the steps since its start."""

    @abstractmethod
    def at(self, phase: Phase, since: jax.Array) -> jax.Array:
        """The learning rate `since` steps (float32) after the start of the phase."""


@LrSchedule.register_subclass("constant")
@dataclass(frozen=True, kw_only=True)
class ConstantLrSchedule(LrSchedule):
    """The peak in the whole phase."""

    def at(self, phase: Phase, since: jax.Array) -> jax.Array:
        return jnp.full_like(since, phase.peak)


@LrSchedule.register_subclass("cosine")
@dataclass(frozen=True, kw_only=True)
class CosineLrSchedule(LrSchedule):
    """Half a cosine from peak to floor (Loshchilov & Hutter, arXiv:1608.03983), raised to a power.

    Attributes:
        exponent: exponent of the cosine, before it is scaled.
    """

    exponent: PositiveFloat = 1.0

    def at(self, phase: Phase, since: jax.Array) -> jax.Array:
        cosine = 0.5 * (1 + jnp.cos(jnp.pi * _progress(phase, since)))
        return phase.floor + (phase.peak - phase.floor) * cosine**self.exponent


@LrSchedule.register_subclass("linear")
@dataclass(frozen=True, kw_only=True)
class LinearLrSchedule(LrSchedule):
    """A line from peak to floor."""

    def at(self, phase: Phase, since: jax.Array) -> jax.Array:
        return phase.peak + (phase.floor - phase.peak) * _progress(phase, since)


@LrSchedule.register_subclass("polynomial")
@dataclass(frozen=True, kw_only=True)
class PolynomialLrSchedule(LrSchedule):
    """`(1 − progress)^power` from peak to floor.

    Attributes:
        power: 1 is linear.
    """

    power: PositiveFloat = 2.0

    def at(self, phase: Phase, since: jax.Array) -> jax.Array:
        return phase.floor + (phase.peak - phase.floor) * (1 - _progress(phase, since)) ** self.power


@LrSchedule.register_subclass("inv_sqrt")
@dataclass(frozen=True, kw_only=True)
class InvSqrtLrSchedule(LrSchedule):
    """`peak · √(timescale / steps since the cycle began)`, at most the peak (Vaswani et al., arXiv:1706.03762).

    Attributes:
        timescale: the step up to which the rate is the peak.
    """

    timescale: PositiveFloat = 10_000.0

    def at(self, phase: Phase, since: jax.Array) -> jax.Array:
        # Counted from the start of the cycle, warmup included, as in upstream.
        step = jnp.maximum(since + phase.warmup_steps, 1)
        return jnp.maximum(phase.peak * jnp.minimum(1, jnp.sqrt(self.timescale / step)), phase.floor)


@LrSchedule.register_subclass("inv")
@dataclass(frozen=True, kw_only=True)
class InvLrSchedule(LrSchedule):
    """`peak / (1 + k·progress)` with `k` such that the end is the floor."""

    def at(self, phase: Phase, since: jax.Array) -> jax.Array:
        if phase.floor <= 0:
            raise ValueError("optimizer.lr_schedule inv decays to its floor, so min_lr_ratio must be positive")
        # At progress 1 the divisor is peak / floor, so the rate ends at the floor.
        return phase.peak / (1 + (phase.peak / phase.floor - 1) * _progress(phase, since))


@LrSchedule.register_subclass("inv_sqrt_decay")
@dataclass(frozen=True, kw_only=True)
class InvSqrtDecayLrSchedule(LrSchedule):
    """`peak / √(1 + c·progress)`, at least the floor; the final value does not depend on the length of the run.

    Attributes:
        decay_constant: `c`; at the end of the phase the peak is divided by `√(1 + c)`.
    """

    decay_constant: PositiveFloat = 28.6

    def at(self, phase: Phase, since: jax.Array) -> jax.Array:
        # Not clipped at the end of the phase: the rate keeps falling if the run goes on.
        divisor = jnp.sqrt(1 + self.decay_constant * since / max(phase.steps, 1))
        return jnp.maximum(phase.peak / divisor, phase.floor)


@LrSchedule.register_subclass("power")
@dataclass(frozen=True, kw_only=True)
class PowerLrSchedule(LrSchedule):
    """`a · batch size · tokens^b`, at most the peak, where `tokens` counts from the start of the phase.

    The shape of the power scheduler (Shen et al., arXiv:2408.13359), which does not depend on the length of the run.
    It has no floor.

    Attributes:
        batch_size: sequences per step.
        seq_length: tokens per sequence.
        a: the amplitude.
        b: the exponent, negative.
    """

    batch_size: PositiveInt
    seq_length: PositiveInt
    a: PositiveFloat = 4.6
    b: FiniteFloat = -0.51

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.b >= 0:
            raise ValueError(f"b: must be negative, got {self.b}")

    def at(self, phase: Phase, since: jax.Array) -> jax.Array:
        tokens = jnp.maximum(since, 0) * float(self.batch_size * self.seq_length)
        # 0 tokens to a negative power is infinite, so the minimum is the peak; the `where` keeps it finite.
        rate = self.a * self.batch_size * jnp.where(tokens > 0, tokens, 1.0) ** self.b
        return jnp.where(tokens > 0, jnp.minimum(phase.peak, rate), phase.peak)


def _progress(phase: Phase, since: jax.Array) -> jax.Array:
    # Clipped: schedules are evaluated for all steps, and `jnp.where` selects the segment afterwards.
    return jnp.clip(since / max(phase.steps, 1), 0, 1)


def schedule_from_name(value: LrSchedule | str) -> LrSchedule:
    """The shape for a config value: a block, or only a name.

    Raises:
        ValueError: an unknown name.

    >>> schedule_from_name("linear")
    LinearLrSchedule()
    """
    if isinstance(value, LrSchedule):
        return value
    known = LrSchedule.get_known_choices()
    if value not in known:
        close = nearest(value, known)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise ValueError(f"optimizer.lr_schedule {value!r} is not one of {', '.join(sorted(known))}{hint}")
    return known[value]()


def num_steps(amount: int | float, total: int, *, key: str) -> int:
    """A number of steps: up to 1 a fraction of `total` (the integer 1 too, as in upstream), above that whole steps.

    Raises:
        ValueError: negative, or a fraction above 1.

    >>> num_steps(0.1, 200, key="warmup"), num_steps(30, 200, key="warmup")
    (20, 30)
    """
    if amount < 0 or (amount > 1 and not float(amount).is_integer()):
        raise ValueError(f"{key} {amount}: expected a fraction from 0 to 1, or a whole number of steps")
    # `1` is ambiguous; upstream reads it as the whole, not as one step.
    return int(amount * total) if amount <= 1 else int(amount)


def cycle_ends(
    total: int, *, cycle_length: int | float | Sequence[int] | None, cycles: int | Sequence[int] | None
) -> tuple[int, ...]:
    """The step at which each cycle ends; the last is `total`.

    Args:
        total: steps of the run.
        cycle_length: length of every cycle (a fraction or steps; the last cycle has the rest), or a list of lengths.
        cycles: number of cycles of equal length, or the steps at which they end.

    Raises:
        ValueError: both are given, or the ends do not increase within the run.

    >>> cycle_ends(100, cycle_length=None, cycles=4)
    (25, 50, 75, 100)
    >>> cycle_ends(100, cycle_length=30, cycles=None)
    (30, 60, 90, 100)
    """
    if cycle_length is not None and cycles is not None:
        raise ValueError("optimizer.cycle_length and optimizer.cycles are alternatives; give only one of them")
    ends: list[int] = []
    key = "optimizer.cycles" if cycle_length is None else "optimizer.cycle_length"
    if isinstance(cycle_length, int | float):
        length = num_steps(cycle_length, total, key=key)
        if not 1 <= length <= total:
            raise ValueError(
                f"{key} {cycle_length}: a cycle of a run of {total} steps has from 1 to {total} steps, not {length}"
            )
        # The end of the last, possibly shorter cycle is appended below.
        ends = list(range(length, total, length))
    elif cycle_length is not None:
        # Lengths to ends: running sums.
        ends = [sum(cycle_length[: n + 1]) for n in range(len(cycle_length))]
    elif isinstance(cycles, int):
        if not 1 <= cycles <= total:
            raise ValueError(f"{key} {cycles}: a run of {total} steps has from 1 to {total} cycles")
        # Integer division distributes the remainder over the cycles, and the last one ends at `total`.
        ends = [total * (n + 1) // cycles for n in range(cycles)]
    elif cycles is not None:
        ends = list(cycles)
    # Lists may omit the end of the last cycle, which is that of the run.
    if not ends or ends[-1] != total:
        ends.append(total)
    if any(b <= a for a, b in zip([0, *ends], ends, strict=False)):
        raise ValueError(f"{key}: cycles end at steps {ends}, which must rise from above 0 to the run's {total}")
    return tuple(ends)


@dataclass(frozen=True, kw_only=True)
class _Segment:
    start: int
    rate: Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """The division of one cycle; the stable phase is between warmup and decay.

    Attributes:
        start: its first step.
        end: the step after its last.
        rising: steps of warmup.
        falling: steps of decay.
        adjusted: messages about configured lengths that do not fit; empty if all fit.
    """

    start: int
    end: int
    rising: int
    falling: int
    adjusted: tuple[str, ...] = ()


def divide(
    *,
    total: int,
    warmup: int | float,
    decay: int | float | None,
    rewarmup: int | float = 0,
    ends: Sequence[int] | None = None,
) -> tuple[Cycle, ...]:
    """Divides a run into cycles and phases. Too long a warmup is truncated to its cycle, too long a decay to the rest.

    Args:
        total: steps of the run.
        warmup: of the first cycle, a fraction of it or steps.
        decay: of each cycle, in the same units; None for the whole cycle after the warmup.
        rewarmup: warmup of every cycle except the first.
        ends: from `cycle_ends`; one cycle if None.

    Raises:
        ValueError: a negative amount, or a fraction above 1.

    >>> (cycle,) = divide(total=100, warmup=0.1, decay=0.2)
    >>> cycle.rising, cycle.falling
    (10, 20)
    >>> divide(total=100, warmup=120, decay=None)[0].adjusted
    ('warmup 120 is truncated: the run has 100 steps, and ends before its peak is reached',)
    """
    cycles, start = [], 0
    for number, end in enumerate(ends or (total,)):
        # Fractions refer to the cycle, not to the run.
        steps = end - start
        key, amount = ("warmup", warmup) if number == 0 else ("rewarmup", rewarmup)
        requested = num_steps(amount, steps, key=f"optimizer.{key}")
        # The warmup takes precedence: the decay gets what remains of the cycle.
        rising = min(requested, steps)
        requested_decay = steps - rising if decay is None else num_steps(decay, steps, key="optimizer.decay")
        falling = min(requested_decay, steps - rising)
        whole = f"the run has {total} steps" if steps == total else f"the cycle from step {start} has {steps} steps"
        adjusted = []
        if rising < requested:
            adjusted.append(f"{key} {amount} is truncated: {whole}, and ends before its peak is reached")
        if falling < requested_decay:
            note = f", of which {key} takes {rising}" if rising else ""
            adjusted.append(f"decay {decay} is shortened to {falling} steps: {whole}{note}")
        cycles.append(Cycle(start=start, end=end, rising=rising, falling=falling, adjusted=tuple(adjusted)))
        start = end
    return tuple(cycles)


def build_schedule(*, peak: float, min_ratio: float, shape: LrSchedule, cycles: Sequence[Cycle]) -> Schedule:
    """The schedule of a run.

    Args:
        peak: the learning rate after warmup.
        min_ratio: the floor, as a fraction of `peak`.
        shape: of the decay.
        cycles: from `divide`.

    >>> cycles = divide(total=110, warmup=10, decay=None)
    >>> schedule = build_schedule(peak=0.5, min_ratio=0.0, shape=LinearLrSchedule(), cycles=cycles)
    >>> tuple(float(schedule(jnp.int32(step))) for step in (0, 5, 10, 60, 110))
    (0.0, 0.25, 0.5, 0.25, 0.0)
    """
    segments: list[_Segment] = []
    reached, floor = 0.0, peak * min_ratio
    for cycle in cycles:
        rising, falling = cycle.rising, cycle.falling
        if rising:
            segments.append(_Segment(start=cycle.start, rate=_line(reached, peak, rising)))
        # Without a stable phase, the decay's segment starts where the warmup's ends.
        if cycle.end - cycle.start - rising - falling:
            segments.append(_Segment(start=cycle.start + rising, rate=_line(peak, peak, 1)))
        phase = Phase(peak=peak, floor=floor, steps=falling, warmup_steps=rising)
        segments.append(_Segment(start=cycle.end - falling, rate=_decay(shape, phase)))
        if cycle is not cycles[-1]:
            # The next warmup starts where this decay ends. Evaluating the shape compiles, so it is skipped for the last
            # cycle. It is a constant of the schedule, hence the evaluation at compile time even inside a trace.
            with jax.ensure_compile_time_eval():
                reached = float(shape.at(phase, jnp.float32(falling)))

    # Every segment is evaluated at every step, and the last one that has started wins: scalars cost nothing.
    def schedule(step: jax.Array) -> jax.Array:
        rate = segments[0].rate(step.astype(jnp.float32))
        for segment in segments[1:]:
            since = (step - segment.start).astype(jnp.float32)
            rate = jnp.where(step >= segment.start, segment.rate(since), rate)
        return rate

    return schedule


def _line(a: float, b: float, steps: int) -> Callable[[jax.Array], jax.Array]:
    # Clipped like `_progress`: segments are evaluated at all steps.
    return lambda since: a + (b - a) * jnp.clip(since / steps, 0, 1)


def _decay(shape: LrSchedule, phase: Phase) -> Callable[[jax.Array], jax.Array]:
    return lambda since: shape.at(phase, jnp.maximum(since, 0))
