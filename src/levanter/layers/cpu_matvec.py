"""`MatrixFirst`: a matrix as a product of a few rows on a CPU reads it best.

Libraries of products lay the second operand out anew, in panels, and read the first one where it lies. XLA makes the
matrix the second one; where there are few rows, laying it out takes longer than multiplying. Here it is the first, with
its contracted axes last, as files have it, and the rows are laid out.
"""

import math

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

from levanter.layers.linear import Dense, Operand

FEW_ROWS = 32
"""Rows up to which the matrix comes first. From 64 on it is as fast or slower (docs/performance.md)."""


class MatrixFirst(Operand):
    """A matrix that is the first operand of products with few rows.

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
        # Of two axes: with more of them XLA would lay the matrix out anew.
        matrix = self.array.rearrange((*Out, *axis)).array.reshape(math.prod(axis_.size for axis_ in Out), -1)
        rows = x.rearrange((*Rows, *axis)).array.reshape(math.prod(axis_.size for axis_ in Rows), -1)
        product = _product(rows, matrix, dtype)
        return hax.named(product.reshape([axis_.size for axis_ in (*Rows, *Out)]), (*Rows, *Out))

    def ragged_dot(self, x: NamedArray, axis: str, sizes: NamedArray) -> NamedArray:
        return Dense(self.array).ragged_dot(x, axis, sizes)

    def rows(self, ids: NamedArray, axis: str) -> NamedArray:
        return Dense(self.array).rows(ids, axis)


def _product(rows: jax.Array, matrix: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    """The products of the rows of two matrices, `[rows, out]`."""
    if matrix.dtype == jnp.bfloat16:
        # Libraries sum in float32, or XLA converts the matrix; and they leave products with one row to it.
        sums = _in_order(jnp.pad(rows, ((0, 1), (0, 0))) if len(rows) == 1 else rows, matrix, jnp.float32)
        return sums[: len(rows)].astype(jnp.bfloat16 if dtype is None else dtype)
    return _in_order(rows, matrix, dtype)


def _in_order(rows: jax.Array, matrix: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    """The same; few rows are the second operand."""
    if len(rows) > FEW_ROWS:
        return _dot(rows, matrix, dtype)
    product = _dot(matrix, rows, dtype)
    if len(rows) > 1:
        # Or the compiler exchanges the operands to spare the transposition.
        product = jax.lax.optimization_barrier(product)
    return product.T


def _dot(a: jax.Array, b: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
