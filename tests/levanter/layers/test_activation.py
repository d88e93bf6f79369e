"""Activations against transformers, and those whose derivative is written by hand against closed forms in float64."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter.layers.activation import ACTIVATIONS

POINTS = np.array([-1e4, -200.0, -100.0, -88.8, -20.0, -1.3, -1e-3, 0.0, 1e-3, 0.7, 20.0, 88.8, 100.0, 1e4])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_silu_and_its_slope(dtype):
    x = jnp.asarray(POINTS, dtype)
    exact = np.asarray(x, np.float64)
    with np.errstate(over="ignore"):
        share = 1 / (1 + np.exp(-exact))
    Point = hax.Axis("point", len(POINTS))

    def silu(values):
        return ACTIVATIONS["silu"](hax.named(values, Point)).array

    slope = jax.grad(lambda values: silu(values).astype(jnp.float32).sum())(x)
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if dtype == jnp.float32 else {"rtol": 4e-3, "atol": 1e-6}
    np.testing.assert_allclose(np.asarray(silu(x), np.float64), exact * share, **tolerance)
    np.testing.assert_allclose(np.asarray(slope, np.float64), share * (1 + exact * (1 - share)), **tolerance)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_name_means_what_it_means_to_transformers(name):
    torch = pytest.importorskip("torch")
    from transformers.activations import ACT2FN

    x = np.linspace(-12, 15, 500).astype(np.float32)
    found = ACTIVATIONS[name](hax.named(x, hax.Axis("point", 500))).array
    np.testing.assert_allclose(found, ACT2FN[name](torch.from_numpy(x)).numpy(), rtol=2e-6, atol=2e-6)
