"""Where new scales of an int8 cache are written, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter.layers.attention.cache_positions import update_scales_slice

pytestmark = pytest.mark.quick

LAYERS, KV_HEADS, PAGES, SLOTS, COUNT = 3, 2, 5, 24, 8


@pytest.mark.parametrize("first", [0, 3, 16, 17, 23])
@pytest.mark.parametrize("count", [0, 1, 5, COUNT])
def test_a_slice_of_scales_is_written_at_its_positions(first, count):
    """Invalid entries and those without a slot are dropped, and nothing else changes; a slice may exceed its page."""
    generator = np.random.default_rng(first + 100 * count)
    held = generator.normal(size=(LAYERS, KV_HEADS, 2, PAGES, SLOTS)).astype(np.float32)
    values = generator.normal(size=(2, 1, COUNT, KV_HEADS)).astype(np.float32)
    layer, page = 1, 4
    expected = held.copy()
    for n in range(min(count, SLOTS - first)):
        expected[layer, :, :, page, first + n] = values[:, 0, n].T
    index = np.arange(COUNT)
    present = index < count
    positions = np.where(present, first + index, 0).astype(np.int32)[None]
    # As in `NewPositions` and the cache: nothing is valid beyond the last slot.
    found = jax.jit(update_scales_slice)(
        jnp.asarray(held), jnp.int32(layer), jnp.asarray(values), jnp.asarray([[page]], jnp.int32), positions,
        present[None],
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(found), expected)
