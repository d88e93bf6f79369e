"""Checks that weights are finite while they are read and in a core's cache, without another pass over memory.

Without its sign bit, the bits of a floating-point number grow with its magnitude; infinity and NaN are the largest. Two
maxima therefore find them, each a vector operation: of the bits as signed integers (positive numbers stay positive) and
as unsigned ones (negative numbers are the largest). Where a cast to a narrower format follows, numbers that would
overflow count too: the bound is then the least magnitude that becomes infinite.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
import functools
import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """Weights of one tensor that are not finite, or would not be in the dtype that they are loaded in.

    Attributes:
        path: the leaf that they belong to.
        tensor: the source tensor.
        nan: how many are not a number.
        infinite: how many are infinite.
        overflowing: how many are finite and become infinite in the leaf's dtype.
    """

    path: str
    tensor: str
    nan: int = 0
    infinite: int = 0
    overflowing: int = 0

    @property
    def count(self) -> int:
        """How many there are."""
        return self.nan + self.infinite + self.overflowing

    def __add__(self, other: "NotFinite") -> "NotFinite":
        return NotFinite(
            path=self.path,
            tensor=self.tensor,
            nan=self.nan + other.nan,
            infinite=self.infinite + other.infinite,
            overflowing=self.overflowing + other.overflowing,
        )

    def __str__(self) -> str:
        kinds = {
            "NaN": self.nan,
            "infinite": self.infinite,
            "too large for the dtype they are loaded in": self.overflowing,
        }
        listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)
        return f"{self.path} ({self.tensor}): {listed}"


@dataclass(frozen=True)
class _Bound:
    """The least bits, without a sign, of a number that is not finite, and the integers to read them as."""

    signed: np.dtype
    unsigned: np.dtype
    positive: int
    negative: int
    magnitude: float


def all_finite(values: np.ndarray, loaded: np.dtype) -> bool:
    """Whether numbers are finite, and stay so when they are cast.

    Args:
        values: as they were read, of any shape; what is no floating-point number is finite.
        loaded: the dtype that they are cast to.

    >>> all_finite(np.array([1.0, 65504.0], np.float32), np.dtype(np.float16))
    True
    >>> all_finite(np.array([1.0, 65520.0], np.float32), np.dtype(np.float16))
    False
    """
    bound = _bound(values.dtype, np.dtype(loaded))
    if bound is None or not values.size:
        return True
    # As signed integers, negative numbers are negative and cannot reach the bound: this is the test of positive
    # numbers. As unsigned integers, negative numbers are above all positive ones: this is the test of negative numbers.
    return bool(values.view(bound.signed).max() < bound.positive and values.view(bound.unsigned).max() < bound.negative)


def not_finite(values: np.ndarray, loaded: np.dtype, *, path: str, tensor: str) -> NotFinite:
    """Counts the numbers that are not finite; call it where `all_finite` is false."""
    bound = _bound(values.dtype, np.dtype(loaded))
    assert bound is not None, "numbers that are not floating-point are finite"
    nan, infinite = np.isnan(values), np.isinf(values)
    # In float64 the comparison with the bound is exact for every narrower format.
    beyond = np.abs(values.astype(np.float64)) >= bound.magnitude
    return NotFinite(
        path=path,
        tensor=tensor,
        nan=int(nan.sum()),
        infinite=int(infinite.sum()),
        overflowing=int((beyond & ~nan & ~infinite).sum()),
    )


@functools.cache
def _bound(stored: np.dtype, loaded: np.dtype) -> _Bound | None:
    if not _is_floating(stored) or stored.itemsize not in (1, 2, 4, 8):
        return None
    signed, unsigned = np.dtype(f"i{stored.itemsize}"), np.dtype(f"u{stored.itemsize}")
    magnitude = math.inf
    # Casting integers, or to a dtype without a range of its own, adds no bound: only infinities and NaNs count.
    if _is_floating(loaded):
        limits = ml_dtypes.finfo(loaded)
        largest = float(limits.max)
        if largest < float(ml_dtypes.finfo(stored).max):
            # Half a unit in the last place above the largest number is rounded up, to infinity.
            magnitude = largest + math.ldexp(0.5, math.floor(math.log2(largest)) - int(limits.nmant))
    # Formats without infinity have NaN there.
    bits = int(np.asarray([magnitude]).astype(stored).view(unsigned)[0])
    # The sign bit: as an unsigned integer, a negative number is its magnitude's bits plus this.
    sign = 1 << (8 * stored.itemsize - 1)
    return _Bound(signed=signed, unsigned=unsigned, positive=bits, negative=bits | sign, magnitude=magnitude)


def _is_floating(dtype: np.dtype) -> bool:
    # Formats that NumPy itself does not know are of several kinds.
    return dtype.kind in "fV" and dtype.name.startswith(("bfloat", "float"))
