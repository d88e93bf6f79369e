"""`MatrixFirst`: an operand for fast products with few rows on CPUs.

GEMM libraries repack the second operand into panels and read the first one in place. XLA passes the matrix as the
second operand; with few rows, repacking it takes longer than multiplying. Here the matrix is the first operand, with
its contracted axes last, as checkpoint files store it, and the rows are repacked instead.
"""

import math

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

from levanter.layers.linear import Dense, Operand

FEW_ROWS = 32
"""Rows up to which the matrix is the first operand. From 64 rows on this is not faster (docs/performance.md)."""


class MatrixFirst(Operand):
    """A matrix that becomes the first operand of products with few rows.

    Attributes:
        array: `[*Out, *In]`, on one device.
    """

    array: NamedArray

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.array.axes

    def dot(self, x: NamedArray, axis: tuple[str, ...], *, dtype: DTypeLike | None = None) -> NamedArray:
        Out = tuple(axis_ for axis_ in self.axes if axis_.name not in axis)
        Rows = tuple(axis_ for axis_ in x.axes if axis_.name not in axis)
        assert not {axis_.name for axis_ in Out} & {axis_.name for axis_ in Rows}, f"{x.axes} and {self.axes}: copies"
        # Flattened to two dimensions: with more, XLA transposes the matrix into another layout first.
        matrix = self.array.rearrange((*Out, *axis)).array.reshape(math.prod(axis_.size for axis_ in Out), -1)
        rows = x.rearrange((*Rows, *axis)).array.reshape(math.prod(axis_.size for axis_ in Rows), -1)
        product = _product(rows, matrix, dtype)
        return hax.named(product.reshape([axis_.size for axis_ in (*Rows, *Out)]), (*Rows, *Out))

    def ragged_dot(self, x: NamedArray, axis: str, sizes: NamedArray) -> NamedArray:
        return Dense(self.array).ragged_dot(x, axis, sizes)

    def rows(self, ids: NamedArray, axis: str) -> NamedArray:
        return Dense(self.array).rows(ids, axis)


def _product(rows: jax.Array, matrix: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    """`rows · matrixᵀ`, `[rows, out]`."""
    if matrix.dtype == jnp.bfloat16:
        # Unless the result is float32, XLA converts the whole matrix instead of calling the library. The library also
        # leaves products with a single row to XLA, so a second row is padded and dropped.
        sums = _in_order(jnp.pad(rows, ((0, 1), (0, 0))) if len(rows) == 1 else rows, matrix, jnp.float32)
        return sums[: len(rows)].astype(jnp.bfloat16 if dtype is None else dtype)
    return _in_order(rows, matrix, dtype)


def _in_order(rows: jax.Array, matrix: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    """As `_product`; few rows become the second operand."""
    if len(rows) > FEW_ROWS:
        return _dot(rows, matrix, dtype)
    product = _dot(matrix, rows, dtype)
    if len(rows) > 1:
        # Without the barrier the compiler swaps the operands back to avoid the transposition.
        product = jax.lax.optimization_barrier(product)
    return product.T


def _dot(a: jax.Array, b: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    # Contracts the last axis of both: `[m, k] · [n, k] → [m, n]`.
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
