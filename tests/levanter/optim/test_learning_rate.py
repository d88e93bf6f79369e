"""Division by −1 / learning rate, against optax; that an update is written once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from levanter.optim import AdamConfig
from levanter.optim.transforms import scale_by_learning_rate

pytestmark = pytest.mark.quick

RNG = np.random.default_rng(0)
UPDATES = {"a": RNG.standard_normal((8, 5)).astype(np.float32), "b": RNG.standard_normal(7).astype(np.float32)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_optax(dtype):
    """Warmup from 0, so the first rate is 0, and a decay."""
    schedule = AdamConfig(learning_rate=3e-3, warmup=2, lr_schedule="linear").schedule(8)
    given = jax.tree.map(lambda x: jnp.asarray(x, dtype), UPDATES)
    ours, theirs = scale_by_learning_rate(schedule), optax.scale_by_learning_rate(schedule)  # pyright: ignore
    mine, expected = ours.init(given), theirs.init(given)  # pyright: ignore
    assert mine == expected
    for n in range(8):
        (found, mine), (wanted, expected) = jax.jit(ours.update)(given, mine), theirs.update(given, expected)
        assert mine == expected and int(mine.count) == n + 1  # pyright: ignore
        for name, x in found.items():
            assert x.dtype == wanted[name].dtype == given[name].dtype
            tolerance = 1e-6 if dtype == "float32" else 2e-2
            np.testing.assert_allclose(np.float64(x), np.float64(wanted[name]), rtol=tolerance)
            assert (n > 0) == bool(np.any(np.float64(x)))


@pytest.mark.parametrize("rate", ["constant", "cosine"])
def test_an_update_is_written_once_for_its_norm_and_its_parameter(rate):
    """Two matrices alike, compiled here: what is written of their size are two updates and two parameters."""
    scale = scale_by_learning_rate(AdamConfig(learning_rate=3e-3, warmup=0, lr_schedule=rate).schedule(8))
    shape = (2048, 512)

    def step(params, mu, nu, state):
        updates = jax.tree.map(lambda p, m, n: m / (jnp.sqrt(n) + 1e-8) + 0.1 * p, params, mu, nu)
        updates, state = scale.update(updates, state)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(u)) for u in updates))
        after = jnp.where(norm == -1.0, 0.0, 1.0)
        return [p + u * after for p, u in zip(params, updates, strict=True)], norm, state

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2
    lowered = jax.jit(step, donate_argnums=0).lower(arrays, arrays, arrays, jax.eval_shape(scale.init, arrays))
    entry = lowered.compile().as_text().split("\nENTRY ")[1]
    written = [line for line in entry.splitlines() if f" = f32[{shape[0]},{shape[1]}]" in line]
    assert sum("parameter(" not in line for line in written) == 4, "\n".join(written)


def test_cpus_divide_and_others_multiply():
    """Pods' figures were compiled with optax's; the states, and so checkpoints, are the same."""
    config = AdamConfig(max_grad_norm=None, weight_decay=0.0)
    built = {platform: config.build(9, platform=platform) for platform in ("cpu", "tpu", None)}
    states = {platform: each.init(UPDATES) for platform, each in built.items()}
    assert len({jax.tree.structure(state) for state in states.values()}) == 1
    traced = {p: str(jax.make_jaxpr(each.update)(UPDATES, states[p], UPDATES)) for p, each in built.items()}
    assert traced["tpu"] == traced[None] != traced["cpu"]
