"""Checkpoints with FP8 weights in blocks: values and scales of matrices, and the numbers they mean, block by block.

Written from the format's description alone; nothing of the reader under test is used.
"""

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

LARGEST = 448.0
"""Of float8_e4m3fn."""


def blocks(shape: tuple[int, ...], block: tuple[int, int]):
    """The blocks of a matrix: position among the scales, and rows and columns."""
    for i, row in enumerate(range(0, shape[0], block[0])):
        for j, column in enumerate(range(0, shape[1], block[1])):
            yield (i, j), (slice(row, row + block[0]), slice(column, column + block[1]))


def quantized(
    matrix: np.ndarray, block: tuple[int, int], dtype: DTypeLike = np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """FP8 values, and for each block the scale that makes its largest value the largest of FP8."""
    values = np.empty(matrix.shape, ml_dtypes.float8_e4m3fn)
    scales = np.empty(tuple(-(-n // size) for n, size in zip(matrix.shape, block, strict=True)), dtype)
    for at, part in blocks(matrix.shape, block):
        scales[at] = np.abs(matrix[part]).max() / LARGEST
        values[part] = (matrix[part] / np.float32(scales[at])).astype(ml_dtypes.float8_e4m3fn)
    return values, scales


def dequantized(values: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The numbers of a whole matrix."""
    exact = values.astype(np.float32)
    for at, part in blocks(values.shape, block):
        exact[part] *= np.float32(scales[at])
    return exact


def fp8_tensors(
    tensors: dict[str, np.ndarray], block: tuple[int, int], *, dtype: DTypeLike = np.float32, kept: tuple[str, ...] = ()
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What a file stores for tensors of which the matrices are FP8, and the numbers that this means.

    Args:
        tensors: floating.
        block: rows and columns that share a scale.
        dtype: of the scales.
        kept: matrices that are stored as they are.
    """
    stored, exact = {}, {}
    for name, x in tensors.items():
        if x.ndim == 2 and name not in kept:
            stored[name], scales = quantized(x.astype(np.float32), block, dtype)
            stored[f"{name}_scale_inv"] = scales
            exact[name] = dequantized(stored[name], scales, block)
        else:
            stored[name] = exact[name] = x
    return stored, exact
