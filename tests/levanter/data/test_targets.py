"""Targets are what stands behind a token in its row and segment, and nothing where that is none."""

import haliax as hax
import numpy as np
import pytest

from levanter.data import NO_TARGET, next_tokens
from levanter.models import scoring

pytestmark = pytest.mark.quick


def one_by_one(tokens: np.ndarray, segments: np.ndarray | None) -> np.ndarray:
    found = np.full(tokens.shape, -1)
    for row, t in np.ndindex(tokens.shape):
        if t + 1 < tokens.shape[1] and (segments is None or segments[row, t] == segments[row, t + 1]):
            found[row, t] = tokens[row, t + 1]
    return found


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("segmented", [False, True])
def test_targets_of_rows(length, segmented):
    random = np.random.default_rng(length)
    tokens = random.integers(0, 5, (4, length)).astype(np.uint16)  # id 0 is a token like any other
    segments = np.sort(random.integers(-1, 2, (4, length)), axis=1).astype(np.int32) if segmented else None
    found = next_tokens(tokens, segments)
    assert found.dtype == np.int32 and NO_TARGET == -1
    np.testing.assert_array_equal(found, one_by_one(tokens, segments))
    axes = (hax.Axis("batch", 4), hax.Axis("position", length))
    named = None if segments is None else hax.named(segments, axes)
    inside = scoring.next_tokens(hax.named(tokens.astype(np.int32), axes), named)
    assert inside.axes == axes and inside.dtype == np.int32
    np.testing.assert_array_equal(inside.array, found)
