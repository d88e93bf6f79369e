"""Averages of parameters: those of NumPy, of the parameters that steps leave; in plans, checkpoints and refusals."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.train_steps import mesh_setup

from haliax_ext.abstract import leaves
from levanter.models.precision import Precision
from levanter.trainer.averaging import averaged, begin, check_averaging
from levanter.trainer.config_blocks import EmaDecaySqrtConfig, EmaModelAveragingConfig

EMA = EmaModelAveragingConfig(beta=0.75)
SQRT = EmaDecaySqrtConfig(beta=0.75, switch_step=3, decay_steps=4)
STEPS = 9


@pytest.fixture(scope="module")
def walked() -> list[dict[str, np.ndarray]]:
    """Parameters before the first step and behind each."""
    random = np.random.default_rng(0)
    return [{"a": random.normal(size=(3, 2)), "b": random.normal(size=5)} for _ in range(STEPS + 1)]


def followed(rule, walked) -> list[dict[str, np.ndarray]]:
    """The average behind each step."""
    single = [jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), each) for each in walked]
    average, found = begin(rule, single[0]), []
    for step, model in enumerate(single[1:]):
        average = jax.jit(averaged, static_argnums=0)(rule, average, model, jnp.int32(step))
        found.append(jax.device_get(average.parameters))
    return found


def test_an_exponential_average_is_a_sum_of_powers(walked):
    for step, found in enumerate(followed(EMA, walked), 1):
        for name in ("a", "b"):
            expected = 0.75**step * walked[0][name]
            expected = expected + sum(0.25 * 0.75 ** (step - n) * walked[n][name] for n in range(1, step + 1))
            np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)


def test_a_falling_weight_is_a_weighted_mean(walked):
    weights = [0.25] * 3 + [1 - math.sqrt(x) for x in (0, 0.25, 0.5, 0.75, 1, 1)]
    for step, found in enumerate(followed(SQRT, walked), 1):
        total = sum(weights[:step])
        for name in ("a", "b"):
            expected = sum(w * walked[n + 1][name] for n, w in enumerate(weights[:step])) / total
            np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)
    last = followed(SQRT, walked)[-2:]
    assert all((last[0][name] == last[1][name]).all() for name in ("a", "b"))


def test_sixteen_bits_are_refused():
    check_averaging(EMA, Precision.parse("p=f32,c=bfloat16"))
    check_averaging(None, Precision.parse("bfloat16"))
    with pytest.raises(ValueError, match=r"trainer\.model_averaging: .*bfloat16 rounds its steps away"):
        check_averaging(EMA, Precision.parse("bfloat16"))


@pytest.mark.parametrize("rule", [EMA, pytest.param(SQRT, marks=pytest.mark.slow)])
def test_a_step_carries_it_beside_training_that_does_not_see_it(rule, devices):
    """On a mesh, sharded like the parameters; losses and parameters are those without it, bit for bit."""
    plain, averaging = mesh_setup(4, 2), mesh_setup(4, 2, more=(("averaging", rule),))
    mesh = averaging.spec.build(devices)
    plan, _, program = averaging.programs()
    placed = {each.leaf.path: each for each in plan.whole.leaves}
    for leaf in plan.parameters.leaves:
        assert placed[f"average.parameters.{leaf.leaf.path}"].shard_shape == leaf.shard_shape
    sizes = plan.bytes_by_group
    assert sizes["average"] == sizes["gradients"] + (4 if rule is SQRT else 0)
    step, state, seen = program.jit(mesh), averaging.start(mesh), []
    seen.append(jax.device_get(state.model))
    losses = []
    for n in range(2):
        state, metrics = step(state, None, averaging.batch(n, mesh))
        seen.append(jax.device_get(state.model))
        losses.append(float(metrics.loss))
    weights = [0.75**2, 0.25 * 0.75, 0.25] if rule is EMA else [0, 0.5, 0.5]
    for leaf, found in zip(leaves(state.eval_params), jax.tree.leaves(jax.device_get(state.eval_params)), strict=True):
        each = [dict(zip([x.path for x in leaves(m)], jax.tree.leaves(m), strict=True))[leaf.path] for m in seen]
        expected = sum(w * np.asarray(x, np.float64) for w, x in zip(weights, each, strict=True))
        np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=leaf.path)
    if rule is EMA:
        return  # the comparison below compiles the step once more
    bare, state_without = plain.programs()[2].jit(mesh), plain.start(mesh)
    for n in range(2):
        state_without, metrics = bare(state_without, None, plain.batch(n, mesh))
        assert float(metrics.loss) == losses[n]
    for a, b in zip(jax.tree.leaves(state.model), jax.tree.leaves(state_without.model), strict=True):
        assert (np.asarray(a) == np.asarray(b)).all()
    assert dataclasses.replace(state, average=None).eval_params is state.model
