"""`LowRank`: a matrix plus a product of two thin ones, as what a projection multiplies by.

`y = W x + s · B (A x)` with `A: [low_rank, *In]`, `B: [*Out, low_rank]` (Hu et al., arXiv:2106.09685). W may be in any
representation. The sum W + s · B A is never made: what is computed beside `W x` is as thin as the rank. Everything is
linear in the operand's arrays, so a device's own parts of A and B give that part of the result, as operands must.
"""

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

from levanter.layers.linear import Operand, as_operand

RANK = "low_rank"
"""The axis between the two factors."""


class LowRank(Operand):
    """W + s · B A.

    Attributes:
        base: W, `[*Out, *In]`.
        a: A, `[low_rank, *In]`; with the axes that count copies of the matrix.
        b: B, `[*Out, low_rank]`; likewise.
        scale: s.
        dropout: of what A is multiplied by, the share that is left out; where there is a key.
        key: random bits of that, uint32; None where nothing is left out. What is multiplied by groups of rows is whole.
    """

    base: NamedArray | Operand
    a: NamedArray
    b: NamedArray
    scale: float = eqx.field(static=True)
    dropout: float = eqx.field(static=True, default=0.0)
    key: NamedArray | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        return as_operand(self.base).axes

    def dot(self, x: NamedArray, axis: tuple[str, ...], *, dtype: DTypeLike | None = None) -> NamedArray:
        whole = as_operand(self.base).dot(x, axis, dtype=dtype)
        # Copies that are contracted (`expert`) are in both factors, and contracted with the second one.
        copies = tuple(name for name in axis if any(axis_.name == name for axis_ in self.b.axes))
        inner = tuple(name for name in axis if name not in copies)
        thin = hax.dot(self._dropped(x), self.a, axis=inner) * self.scale
        added = hax.dot(thin.astype(x.dtype), self.b, axis=(*copies, RANK), preferred_element_type=dtype)
        return whole + added.astype(whole.dtype).rearrange(whole.axes)

    def _dropped(self, x: NamedArray) -> NamedArray:
        """What is left of `x`, as large as it was on average: the same on every mesh, and whenever it is made again."""
        if self.key is None or self.dropout == 0:
            return x
        kept = hax.random.bernoulli(self.key.array, x.axes, 1 - self.dropout)
        return hax.where(kept, x / (1 - self.dropout), 0.0).astype(x.dtype)

    def ragged_dot(self, x: NamedArray, axis: str, sizes: NamedArray) -> NamedArray:
        whole = as_operand(self.base).ragged_dot(x, axis, sizes)
        (Token,) = (axis_ for axis_ in x.axes if axis_.name != axis)
        thin = as_operand(self.a).ragged_dot(x, axis, sizes) * self.scale
        # What lies behind the last group is not defined, and must not come into a product.
        thin = hax.where(hax.arange(Token) < jnp.sum(sizes.array), thin, 0.0).rearrange(thin.axes)
        return whole + as_operand(self.b).ragged_dot(thin.astype(x.dtype), RANK, sizes).rearrange(whole.axes)

    def rows(self, ids: NamedArray, axis: str) -> NamedArray:
        whole = as_operand(self.base).rows(ids, axis)
        of_rows = any(axis_.name == axis for axis_ in self.b.axes)
        a, b = (self.a, self.b.take(axis, ids)) if of_rows else (self.a.take(axis, ids), self.b)
        return whole + (hax.dot(a, b, axis=RANK) * self.scale).astype(whole.dtype).rearrange(whole.axes)
