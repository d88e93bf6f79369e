"""`LowRank`: an operand that is a matrix plus a product of two low-rank factors (LoRA).

`y = W x + s · B (A x)` with `A: [low_rank, *In]`, `B: [*Out, low_rank]` (Hu et al., arXiv:2106.09685). W may have any
representation. The sum W + s · B A is never computed; the additional activations have the size of the rank. The result
is linear in A and in B, so a device's shards of them give its shard of the result, as `Operand` requires.
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
        a: A, `[low_rank, *In]`, with the axes of stacked matrices.
        b: B, `[*Out, low_rank]`, with the same.
        scale: s.
        dropout: probability that an element of the input of A is dropped; applies only with a key.
        key: random bits of the dropout, uint32; None for no dropout. `ragged_dot` never drops.
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
        # Both factors have contracted axes of stacked matrices (`expert`): A is applied for each of them, and the
        # product with B sums over them.
        copies = tuple(name for name in axis if any(axis_.name == name for axis_ in self.b.axes))
        inner = tuple(name for name in axis if name not in copies)
        thin = hax.dot(self._dropped(x), self.a, axis=inner) * self.scale
        # `[…, low_rank]`, rounded to the inputs' dtype: the second product takes operands of one dtype.
        added = hax.dot(thin.astype(x.dtype), self.b, axis=(*copies, RANK), preferred_element_type=dtype)
        return whole + added.astype(whole.dtype).rearrange(whole.axes)

    def _dropped(self, x: NamedArray) -> NamedArray:
        """`x` with dropout, scaled to keep its mean; the same on every mesh and in recomputation.

        The random bits depend on the key and the axes of the whole array only.
        """
        if self.key is None or self.dropout == 0:
            return x
        kept = hax.random.bernoulli(self.key.array, x.axes, 1 - self.dropout)
        return hax.where(kept, x / (1 - self.dropout), 0.0).astype(x.dtype)

    def ragged_dot(self, x: NamedArray, axis: str, sizes: NamedArray) -> NamedArray:
        whole = as_operand(self.base).ragged_dot(x, axis, sizes)
        (Token,) = (axis_ for axis_ in x.axes if axis_.name != axis)
        thin = as_operand(self.a).ragged_dot(x, axis, sizes) * self.scale
        # Rows behind the last group are undefined, maybe NaN: as zeros they cannot reach the second product's results.
        thin = hax.where(hax.arange(Token) < jnp.sum(sizes.array), thin, 0.0).rearrange(thin.axes)
        return whole + as_operand(self.b).ragged_dot(thin.astype(x.dtype), RANK, sizes).rearrange(whole.axes)

    def rows(self, ids: NamedArray, axis: str) -> NamedArray:
        whole = as_operand(self.base).rows(ids, axis)
        # The looked-up axis belongs to one of the factors: `[*ids, low_rank]` of it, all of the other.
        of_rows = any(axis_.name == axis for axis_ in self.b.axes)
        a, b = (self.a, self.b.take(axis, ids)) if of_rows else (self.a.take(axis, ids), self.b)
        return whole + (hax.dot(a, b, axis=RANK) * self.scale).astype(whole.dtype).rearrange(whole.axes)
