"""Learning-rate schedules as arithmetic on the step: warmup, stable, decay, and cycles of them.

A run of `n` steps is cut into *cycles* (one, unless asked for more). A cycle is three *phases*: a linear warmup from
where the cycle before it ended (0 at first), a stable phase at the peak, and a decay by one of the *shapes* below. A
phase's length is a fraction of its cycle (at most 1) or a number of steps. Where no decay is given it takes all that
the warmup leaves; a shorter one leaves a stable phase before it, which is warmup-stable-decay (WSD).
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
    """What a shape knows of the phase it fills.

    Attributes:
        peak: the learning rate the phase starts from.
        floor: the learning rate it may not fall below.
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
    """The shape of a decay: a function of the steps since it began."""

    @abstractmethod
    def at(self, phase: Phase, since: jax.Array) -> jax.Array:
        """The learning rate `since` steps (float32) after the phase began."""


@LrSchedule.register_subclass("constant")
@dataclass(frozen=True, kw_only=True)
class ConstantLrSchedule(LrSchedule):
    """The peak throughout."""

    def at(self, phase: Phase, since: jax.Array) -> jax.Array:
        return jnp.full_like(since, phase.peak)


@LrSchedule.register_subclass("cosine")
@dataclass(frozen=True, kw_only=True)
class CosineLrSchedule(LrSchedule):
    """Half a cosine from peak to floor (Loshchilov & Hutter, arXiv:1608.03983), raised to a power.

    Attributes:
        exponent: of the cosine, before it is scaled.
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
        timescale: up to this step the peak is held.
    """

    timescale: PositiveFloat = 10_000.0

    def at(self, phase: Phase, since: jax.Array) -> jax.Array:
        step = jnp.maximum(since + phase.warmup_steps, 1)
        return jnp.maximum(phase.peak * jnp.minimum(1, jnp.sqrt(self.timescale / step)), phase.floor)


@LrSchedule.register_subclass("inv")
@dataclass(frozen=True, kw_only=True)
class InvLrSchedule(LrSchedule):
    """`peak / (1 + k·progress)` with `k` such that the end is the floor."""

    def at(self, phase: Phase, since: jax.Array) -> jax.Array:
        if phase.floor <= 0:
            raise ValueError("optimizer.lr_schedule inv decays to its floor, so min_lr_ratio must be positive")
        return phase.peak / (1 + (phase.peak / phase.floor - 1) * _progress(phase, since))


@LrSchedule.register_subclass("inv_sqrt_decay")
@dataclass(frozen=True, kw_only=True)
class InvSqrtDecayLrSchedule(LrSchedule):
    """`peak / √(1 + c·progress)`, at least the floor: its end does not depend on how long the run is.

    Attributes:
        decay_constant: `c`; at the end of the phase the peak is divided by `√(1 + c)`.
    """

    decay_constant: PositiveFloat = 28.6

    def at(self, phase: Phase, since: jax.Array) -> jax.Array:
        divisor = jnp.sqrt(1 + self.decay_constant * since / max(phase.steps, 1))
        return jnp.maximum(phase.peak / divisor, phase.floor)


@LrSchedule.register_subclass("power")
@dataclass(frozen=True, kw_only=True)
class PowerLrSchedule(LrSchedule):
    """`a · batch size · tokens^b`, at most the peak, where `tokens` counts from the phase's beginning.

    The shape of the power scheduler (Shen et al., arXiv:2408.13359), which does not know how long the run is. There
    is no floor.

    Attributes:
        batch_size: sequences a step.
        seq_length: tokens in a sequence.
        a: its amplitude.
        b: its exponent, negative.
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
        # Nothing to the power of a negative number is infinite, and the peak less.
        rate = self.a * self.batch_size * jnp.where(tokens > 0, tokens, 1.0) ** self.b
        return jnp.where(tokens > 0, jnp.minimum(phase.peak, rate), phase.peak)


def _progress(phase: Phase, since: jax.Array) -> jax.Array:
    return jnp.clip(since / max(phase.steps, 1), 0, 1)


def schedule_from_name(value: LrSchedule | str) -> LrSchedule:
    """The shape that a config value means: a block, or a name alone.

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
    """An amount of steps: a fraction of `total` up to 1 (an int 1 too, as upstream reads it), else whole steps.

    Raises:
        ValueError: negative, or a fraction above 1.

    >>> num_steps(0.1, 200, key="warmup"), num_steps(30, 200, key="warmup")
    (20, 30)
    """
    if amount < 0 or (amount > 1 and not float(amount).is_integer()):
        raise ValueError(f"{key} {amount}: expected a fraction from 0 to 1, or a whole number of steps")
    return int(amount * total) if amount <= 1 else int(amount)


def cycle_ends(
    total: int, *, cycle_length: int | float | Sequence[int] | None, cycles: int | Sequence[int] | None
) -> tuple[int, ...]:
    """The step at which each cycle ends; the last is `total`.

    Args:
        total: steps of the run.
        cycle_length: of every cycle (a fraction or steps; the last one takes what is left), or of each in turn.
        cycles: how many, equally long, or the steps at which they end.

    Raises:
        ValueError: both are given, or the ends do not rise within the run.

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
        ends = list(range(length, total, length))
    elif cycle_length is not None:
        ends = [sum(cycle_length[: n + 1]) for n in range(len(cycle_length))]
    elif isinstance(cycles, int):
        if not 1 <= cycles <= total:
            raise ValueError(f"{key} {cycles}: a run of {total} steps has from 1 to {total} cycles")
        ends = [total * (n + 1) // cycles for n in range(cycles)]
    elif cycles is not None:
        ends = list(cycles)
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
    """How one cycle is divided; its stable phase is what lies between.

    Attributes:
        start: its first step.
        end: the step behind its last.
        rising: steps of warmup.
        falling: steps of decay.
        adjusted: what was asked for and does not fit, in words; empty where everything does.
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
    """The phases of a run. A warmup that is longer than its cycle takes all of it, a decay what the warmup leaves.

    Args:
        total: steps of the run.
        warmup: of the first cycle, a fraction of it or steps.
        decay: of each cycle, likewise; None takes all that the warmup leaves.
        rewarmup: warmup of every cycle but the first.
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
        steps = end - start
        key, amount = ("warmup", warmup) if number == 0 else ("rewarmup", rewarmup)
        requested = num_steps(amount, steps, key=f"optimizer.{key}")
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
        min_ratio: the floor, as a part of `peak`.
        shape: of the decay.
        cycles: from `divide`.

    >>> cycles = divide(total=110, warmup=10, decay=None)
    >>> schedule = build_schedule(peak=0.5, min_ratio=0.0, shape=LinearLrSchedule(), cycles=cycles)
    >>> [float(schedule(jnp.int32(step))) for step in (0, 5, 10, 60, 110)]
    [0.0, 0.25, 0.5, 0.25, 0.0]
    """
    segments: list[_Segment] = []
    reached, floor = 0.0, peak * min_ratio
    for cycle in cycles:
        rising, falling = cycle.rising, cycle.falling
        if rising:
            segments.append(_Segment(start=cycle.start, rate=_line(reached, peak, rising)))
        if cycle.end - cycle.start - rising - falling:
            segments.append(_Segment(start=cycle.start + rising, rate=_line(peak, peak, 1)))
        phase = Phase(peak=peak, floor=floor, steps=falling, warmup_steps=rising)
        segments.append(_Segment(start=cycle.end - falling, rate=_decay(shape, phase)))
        if cycle is not cycles[-1]:
            # Compiles a little, so it is done only where a cycle begins from it.
            with jax.ensure_compile_time_eval():
                reached = float(shape.at(phase, jnp.float32(falling)))

    def schedule(step: jax.Array) -> jax.Array:
        rate = segments[0].rate(step.astype(jnp.float32))
        for segment in segments[1:]:
            since = (step - segment.start).astype(jnp.float32)
            rate = jnp.where(step >= segment.start, segment.rate(since), rate)
        return rate

    return schedule


def _line(a: float, b: float, steps: int) -> Callable[[jax.Array], jax.Array]:
    return lambda since: a + (b - a) * jnp.clip(since / steps, 0, 1)


def _decay(shape: LrSchedule, phase: Phase) -> Callable[[jax.Array], jax.Array]:
    return lambda since: shape.at(phase, jnp.maximum(since, 0))
