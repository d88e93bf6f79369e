"""Clipping by the global norm, against optax and NumPy; that its products stay where they are read."""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from levanter.optim import AdamConfig, MuonConfig, SgdConfig
from levanter.optim.transforms import clip_by_global_norm

RNG = np.random.default_rng(0)
GRADIENTS = {"a": RNG.standard_normal((8, 5)).astype(np.float32), "b": RNG.standard_normal(7).astype(np.float32)}


@pytest.mark.parametrize("largest", [0.5, 1e3], ids=["clipped", "as it was"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_optax_and_numpy(dtype, largest):
    given = jax.tree.map(lambda x: jnp.asarray(x, dtype), GRADIENTS)
    ours, theirs = clip_by_global_norm(largest), optax.clip_by_global_norm(largest)
    state = ours.init(given)  # pyright: ignore
    assert state == theirs.init(given)  # pyright: ignore
    (found, state), (expected, _) = jax.jit(ours.update)(given, state), theirs.update(given, state)
    exact = {name: np.asarray(x, np.float64) for name, x in given.items()}
    norm = np.sqrt(sum((x**2).sum() for x in exact.values()))
    assert 0.5 < norm < 1e3
    for name, x in found.items():
        assert x.dtype == expected[name].dtype == given[name].dtype
        tolerance = 1e-6 if dtype == "float32" else 2e-2
        mine = np.asarray(x, np.float64)
        np.testing.assert_allclose(mine, exact[name] * min(1, largest / norm), rtol=tolerance)
        np.testing.assert_allclose(mine, np.asarray(expected[name], np.float64), rtol=tolerance)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 0.0])
def test_what_has_no_usable_norm_is_what_optax_makes_of_it(wrong):
    """NaN throughout; zeros, and NaN for what is infinite; zeros."""
    given = {"a": np.float32([1.0, wrong]) if wrong else np.zeros(2, np.float32)}
    (found, _), (expected, _) = (
        each(1.0).update(given, optax.EmptyState()) for each in (clip_by_global_norm, optax.clip_by_global_norm)
    )
    np.testing.assert_array_equal(found["a"], expected["a"])


def test_no_array_is_divided():
    """Two averages of a clipped gradient, compiled here: only scalars are divided, so nothing has to be kept of it."""

    def averages(g, mu, nu):
        (g,), _ = clip_by_global_norm(1.0).update((g,), optax.EmptyState())
        return 0.1 * g + 0.9 * mu, 0.05 * g * g + 0.95 * nu

    text = jax.jit(averages).lower(*[jax.ShapeDtypeStruct((64, 32), jnp.float32)] * 3).compile().as_text()
    assert set(re.findall(r"= (\S+) divide\(", text)) == {"f32[]"}


@pytest.mark.parametrize("config", [SgdConfig, AdamConfig], ids=["sgd", "adam"])
def test_cpus_clip_by_a_product_and_others_as_optax(config):
    """Pods' figures were compiled with optax's; the states, and so checkpoints, are the same."""
    chosen = config(max_grad_norm=0.5, weight_decay=0.0)
    states = []
    for platform, clip in (("cpu", clip_by_global_norm), ("tpu", optax.clip_by_global_norm), (None, None)):
        whole = chosen.build(9, platform=platform)
        states.append(whole.init(GRADIENTS))
        first = chosen.stages(chosen.schedule(9), platform=platform)[0]
        expected = (clip or optax.clip_by_global_norm)(0.5)
        traced = [str(jax.make_jaxpr(each.update)(GRADIENTS, optax.EmptyState())) for each in (first, expected)]
        assert traced[0] == traced[1]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1]) == jax.tree.structure(states[2])


def test_no_norm_clips_nothing():
    for config in (SgdConfig(max_grad_norm=None), MuonConfig(max_grad_norm=None)):
        assert config.clipping("cpu").update(GRADIENTS, optax.EmptyState())[0] is GRADIENTS


def test_a_class_of_a_user_s_that_knows_no_platform_is_built_for_one():
    @dataclass(frozen=True, kw_only=True)
    class Older(AdamConfig):
        def stages(self, schedule):
            return [self.clipping(), *super().stages(schedule)[1:]]

    @dataclass(frozen=True, kw_only=True)
    class Oldest(AdamConfig):
        def build(self, num_train_steps):
            return optax.sgd(1 / num_train_steps)

    made = [config.build_for(4, "cpu").init({}) for config in (Older(), Oldest(), AdamConfig())]
    assert jax.tree.structure(made[0]) == jax.tree.structure(made[2])
    assert jax.tree.structure(made[1]) == jax.tree.structure(optax.sgd(0.25).init({}))
