"""RMSNorm (Zhang and Sennrich, arXiv:1910.07467), computed in float32."""

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray


class RMSNorm(eqx.Module):
    """Divides by the root of the mean square along one axis, then scales by a weight.

    The mean square and the division are in float32 and rounded to the input's dtype before the weight is applied, in
    the order of Hugging Face's implementation.

    Attributes:
        weight: along the normalized axis, or None.
        axis: the normalized axis' name.
        eps: added to the mean square.
    """

    weight: NamedArray | None
    axis: str = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(axis: Axis, *, eps: float, use_weight: bool) -> "RMSNorm":
        """A norm with unit weights."""
        return RMSNorm(weight=hax.ones(axis, dtype=jnp.float32) if use_weight else None, axis=axis.name, eps=eps)

    def __call__(self, x: NamedArray) -> NamedArray:
        exact = x.astype(jnp.float32)
        mean_square = hax.mean(hax.square(exact), self.axis)
        y = (exact * hax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        return y if self.weight is None else y * self.weight
