"""Weights that are not finite are found by their bits; the oracle is NumPy's cast and `isfinite`, bit by bit."""

import ml_dtypes
import numpy as np
import pytest

from haliax_ext.nonfinite import NotFinite, all_finite, not_finite

SMALL = [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
LARGE = [np.float32, np.float64]


def every_pattern(dtype: np.dtype) -> np.ndarray:
    """All numbers of a small dtype; of a large one, those around every bound, and their neighbours."""
    dtype = np.dtype(dtype)
    bits = np.dtype(f"u{dtype.itemsize}")
    if dtype.itemsize <= 2:
        return np.arange(2 ** (8 * dtype.itemsize), dtype=np.int64).astype(bits).view(dtype)
    edges = [0.0, 1.0, 65504.0, 65520.0, 3.3895314e38, 3.3961776e38, 3.4028235e38, 3.4028236e38, 1e300, np.inf, np.nan]
    with np.errstate(over="ignore"):
        around = np.asarray(edges, dtype).view(bits)
    values = np.concatenate([around - 1, around, around + 1]).view(dtype)
    return np.concatenate([values, -values])


def really_finite(values: np.ndarray, loaded: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.isfinite(values.astype(loaded).astype(np.float64)) & np.isfinite(values.astype(np.float64))


@pytest.mark.parametrize("loaded", [ml_dtypes.bfloat16, np.float16, np.float32], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("stored", [*SMALL, *LARGE], ids=lambda d: np.dtype(d).name)
def test_every_number_alone(stored, loaded):
    values = every_pattern(stored)
    found = np.asarray([all_finite(values[n : n + 1], np.dtype(loaded)) for n in range(len(values))])
    expected = really_finite(values, np.dtype(loaded))
    wrong = values[found != expected].astype(np.float64)
    assert not len(wrong), wrong[:8]


@pytest.mark.parametrize("stored", [*SMALL, *LARGE], ids=lambda d: np.dtype(d).name)
def test_one_among_many(stored):
    random = np.random.default_rng(0)
    weights = (random.normal(size=(64, 33)) * 4).astype(stored)
    assert all_finite(weights, weights.dtype) and all_finite(weights[::3, 1::2], weights.dtype)
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        damaged = weights.copy()
        damaged[17, 5] = bad
        assert not all_finite(damaged, damaged.dtype) and all_finite(damaged[18:], damaged.dtype)


def test_what_is_no_number_with_a_point_is_finite():
    assert all_finite(np.arange(-5, 5), np.dtype(np.float32)) and all_finite(np.zeros((0, 3)), np.dtype(np.float32))
    assert all_finite(np.ones(3, bool), np.dtype(np.float32))


def test_they_are_counted_by_kind():
    values = np.asarray([1.0, np.nan, -np.inf, np.inf, 70_000.0, -1e30, np.nan], np.float32)
    found = not_finite(values, np.dtype(np.float16), path="model.x", tensor="x.weight")
    assert found == NotFinite(path="model.x", tensor="x.weight", nan=2, infinite=2, overflowing=2)
    said = "model.x (x.weight): 2 NaN, 2 infinite, 2 too large for the dtype they are loaded in"
    assert str(found) == said and found.count == 6 and (found + found).nan == 4
