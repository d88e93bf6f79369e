"""Learning rates against closed forms in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter.optim import AdamConfig
from levanter.optim.schedules import (
    CosineLrSchedule,
    InvSqrtDecayLrSchedule,
    InvSqrtLrSchedule,
    PolynomialLrSchedule,
    PowerLrSchedule,
    cycle_ends,
    num_steps,
)

pytestmark = pytest.mark.quick


def rates(total: int, **settings) -> np.ndarray:
    schedule = AdamConfig(**{"learning_rate": 1e-3, **settings}).schedule(total)
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(total + 1, dtype=jnp.int32)), np.float64)


def expect(found: np.ndarray, formula) -> None:
    np.testing.assert_allclose(found, [formula(t) for t in range(len(found))], rtol=2e-6, atol=1e-12)


def test_cosine_with_warmup_as_a_fraction():
    def formula(t):
        if t < 10:
            return 1e-3 * t / 10
        return 1e-4 + 9e-4 * (1 + math.cos(math.pi * (t - 10) / 190)) / 2

    expect(rates(200, warmup=0.05), formula)


def test_linear_with_warmup_in_steps():
    expect(
        rates(100, warmup=20, lr_schedule="linear", min_lr_ratio=0.0),
        lambda t: 1e-3 * (t / 20 if t < 20 else 1 - (t - 20) / 80),
    )


def test_constant_without_warmup_begins_at_the_peak():
    expect(rates(10, warmup=0, lr_schedule="constant"), lambda t: 1e-3)


def test_warmup_stable_decay():
    def formula(t):
        if t < 10:
            return 1e-3 * t / 10
        return 1e-3 if t < 80 else 1e-3 - 9e-4 * (t - 80) / 20

    expect(rates(100, warmup=0.1, decay=0.2, lr_schedule="linear"), formula)
    expect(rates(100, warmup=10, decay=20, lr_schedule="linear"), formula)


def test_inverse_square_root_counts_the_warmup_and_stops_at_the_floor():
    def formula(t):
        return 1e-3 * t / 10 if t < 10 else max(1e-3 * min(1, math.sqrt(40 / t)), 2e-4)

    settings = {"warmup": 10, "min_lr_ratio": 0.2, "lr_schedule": InvSqrtLrSchedule(timescale=40)}
    expect(rates(2000, **settings), formula)


def test_inverse_ends_at_the_floor():
    expect(rates(50, warmup=0, lr_schedule="inv"), lambda t: 1e-3 / (1 + 9 * t / 50))


def test_polynomial_and_cosine_exponent():
    expect(rates(40, warmup=0, lr_schedule=PolynomialLrSchedule(power=3)), lambda t: 1e-4 + 9e-4 * (1 - t / 40) ** 3)
    expect(
        rates(40, warmup=0, lr_schedule=CosineLrSchedule(exponent=2)),
        lambda t: 1e-4 + 9e-4 * ((1 + math.cos(math.pi * t / 40)) / 2) ** 2,
    )


def test_shapes_that_do_not_know_where_the_run_ends():
    expect(
        rates(40, warmup=0, min_lr_ratio=0.25, lr_schedule=InvSqrtDecayLrSchedule(decay_constant=24.0)),
        lambda t: max(1e-3 / math.sqrt(1 + 24 * t / 40), 2.5e-4),
    )
    power = PowerLrSchedule(batch_size=8, seq_length=16, a=0.01, b=-0.5)
    expect(
        rates(400, warmup=20, lr_schedule=power),
        lambda t: 1e-3 * t / 20 if t < 20 else min(1e-3, 8 * 0.01 * (128 * (t - 20)) ** -0.5 if t > 20 else 1),
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PolynomialLrSchedule(power=-1), "power: must be positive"),
        (lambda: InvSqrtLrSchedule(timescale=0), "timescale: must be positive"),
        (lambda: PowerLrSchedule(batch_size=1, seq_length=1, b=0.5), "b: must be negative"),
    ],
)
def test_shapes_that_are_senseless(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_cycles_warm_up_again_from_where_the_last_one_ended():
    def formula(t):
        start, rising, low = (0, 10, 0.0) if t < 100 else (100, 20, 1e-4)
        since = t - start
        if since < rising:
            return low + (1e-3 - low) * since / rising
        return 1e-3 - 9e-4 * (since - rising) / (100 - rising)

    settings = {"warmup": 10, "rewarmup": 20, "lr_schedule": "linear"}
    found = [rates(200, **settings, **given) for given in ({"cycles": 2}, {"cycle_length": 100}, {"haps": [100]})]
    for each in found:
        expect(each, formula)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"cycle_length": 30, "cycles": None}, (30, 60, 90, 100)),
        ({"cycle_length": 0.5, "cycles": None}, (50, 100)),
        ({"cycle_length": [20, 30], "cycles": None}, (20, 50, 100)),
        ({"cycle_length": None, "cycles": 4}, (25, 50, 75, 100)),
        ({"cycle_length": None, "cycles": [70]}, (70, 100)),
        ({"cycle_length": None, "cycles": None}, (100,)),
    ],
)
def test_cycle_ends(given, expected):
    assert cycle_ends(100, **given) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cycles": [60, 40]}, "must rise"),
        ({"cycles": 2, "cycle_length": 50}, "give only one of them"),
        ({"warmup": 1.5}, "a fraction from 0 to 1, or a whole number"),
        ({"cycles": 101}, "optimizer.cycles 101: a run of 100 steps has from 1 to 100 cycles"),
        ({"cycle_length": 200}, "optimizer.cycle_length 200: a cycle of a run of 100 steps has from 1 to 100 steps"),
        ({"cycle_length": [60, 60]}, "must rise"),
    ],
)
def test_what_does_not_fit_in_the_run_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AdamConfig(**settings).schedule(100)


def test_a_warmup_that_is_longer_than_the_run_is_cut():
    expect(rates(50, warmup=80), lambda t: 1e-3 * min(t / 50, 1))
    assert AdamConfig(warmup=80).adjusted(50) == (
        "warmup 80 is truncated: the run has 50 steps, and ends before its peak is reached",
    )


def test_a_decay_takes_what_the_warmup_leaves():
    def formula(t):
        return 1e-3 * t / 80 if t < 80 else 1e-3 - 9e-4 * (t - 80) / 20

    settings = {"warmup": 80, "decay": 40, "lr_schedule": "linear"}
    expect(rates(100, **settings), formula)
    assert AdamConfig(**settings).adjusted(100) == (
        "decay 40 is shortened to 20 steps: the run has 100 steps, of which warmup takes 80",
    )
    assert AdamConfig(warmup=0.8, decay=0.2).adjusted(100) == ()
    assert AdamConfig(warmup=0, decay=200).adjusted(100) == (
        "decay 200 is shortened to 100 steps: the run has 100 steps",
    )
    assert len(AdamConfig(cycles=4, rewarmup=30).adjusted(100)) == 3


def test_unknown_shape_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean cosine"):
        AdamConfig(lr_schedule="cosin")


def test_steps_of():
    assert num_steps(0.25, 1000, key="k") == 250
    assert num_steps(250, 1000, key="k") == 250
    assert num_steps(1, 1000, key="k") == 1000  # upstream reads 1 as all of it
