"""Zigzag order against natural order, compiled as a run is: last bits of sums depend on how loops are fused."""

import numpy as np
import pytest
from helpers.long_context import MASKS, config, mappings_of, mesh_of, run

pytestmark = [pytest.mark.optimized, pytest.mark.slow]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("exchange", ["gather", "ring", "ring × heads"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_changes_nothing(devices, seed, exchange, mask):
    """Beyond 1e-6 of the loss and of the largest log-probability and gradient of each leaf."""
    model = config(**MASKS[mask], attn_backend="reference")
    natural, zigzag = (
        run(model, mask, mesh_of(1, 4, 2, exchange), mappings_of(exchange, order), devices, seed=seed)
        for order in ("natural", "zigzag")
    )
    assert abs(zigzag[0] - natural[0]) <= 1e-6 * abs(natural[0])
    assert np.abs(zigzag[1] - natural[1]).max() <= 1e-6 * np.abs(natural[1]).max()
    off = {path: np.abs(zigzag[2][path] - each).max() / np.abs(each).max() for path, each in natural[2].items()}
    assert max(off.values()) <= 1e-6, off
