"""What integers stand for is within half a scale of what they are made of, whatever its size."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from levanter.layers.attention.cache_int8 import SCALE_DTYPE, int8_vectors


@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-38, 38),
    spread=st.sampled_from([0.0, 0.1, 3.0]),
    dtype=st.sampled_from([np.float32, jnp.bfloat16]),
)
def test_an_element_is_off_by_half_a_scale_at_most(seed, exponent, spread, dtype):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (5, 3, 16)) * 10.0**exponent * np.exp(spread * rng.standard_normal((5, 3, 1)))
    x = np.asarray(np.clip(x, -3e38, 3e38).astype(dtype).astype(np.float32))
    q, scale = (np.asarray(y) for y in int8_vectors(jnp.asarray(x).astype(dtype)))
    assert q.dtype == np.int8 and q.shape == x.shape and np.abs(q.astype(int)).max() <= 127
    assert scale.dtype == SCALE_DTYPE and scale.shape == x.shape[:-1]
    by = scale.astype(np.float64)[..., None]
    assert np.isfinite(by).all()
    # Nothing is lost but what is smaller than a scale that is a normal number.
    half = np.where(by > 0, by / 2 * (1 + 1e-6), 127.5 * 1.2e-38)
    assert (np.abs(x - q * by) <= half).all()


@pytest.mark.parametrize("value", [0.0, 1e-44])
def test_nothing_to_speak_of_is_zero(value):
    q, scale = int8_vectors(jnp.full((2, 8), value, jnp.float32))
    assert not np.asarray(q).any() and not np.asarray(scale, np.float32).any()
