"""Where new scales of an int8 cache are written, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter.layers.attention.cache_positions import put_in_one_piece

pytestmark = pytest.mark.quick

LAYERS, KV_HEADS, PAGES, SLOTS, COUNT = 3, 2, 5, 24, 8


@pytest.mark.parametrize("first", [0, 3, 16, 17, 23])
@pytest.mark.parametrize("there", [0, 1, 5, COUNT])
def test_a_piece_is_written_where_its_positions_lie(first, there):
    """What is not there, or has no slot, is dropped, and nothing else changes: a piece may reach beyond its page."""
    generator = np.random.default_rng(first + 100 * there)
    held = generator.normal(size=(LAYERS, KV_HEADS, 2, PAGES, SLOTS)).astype(np.float32)
    values = generator.normal(size=(2, 1, COUNT, KV_HEADS)).astype(np.float32)
    layer, page = 1, 4
    expected = held.copy()
    for n in range(min(there, SLOTS - first)):
        expected[layer, :, :, page, first + n] = values[:, 0, n].T
    index = np.arange(COUNT)
    present = index < there
    positions = np.where(present, first + index, 0).astype(np.int32)[None]
    # As `NewPositions` and the cache have it: beyond the last slot nothing is there.
    found = jax.jit(put_in_one_piece)(
        jnp.asarray(held), jnp.int32(layer), jnp.asarray(values), jnp.asarray([[page]], jnp.int32), positions,
        present[None],
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(found), expected)
