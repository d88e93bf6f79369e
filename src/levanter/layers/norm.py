"""Normalizations, computed in float32: RMSNorm (Zhang and Sennrich, arXiv:1910.07467) and LayerNorm (arXiv:1607.06450).

Families differ in details that change numbers: Gemma's weights are offsets from 1; Gemma and OLMo round to the input's
dtype after the product with the weight, not before; OLMo normalizes queries over all heads together. A `NormSpec` is
the configuration of a norm; its `init` returns the module.
"""

from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levanter.layers.param_roles import role


class RMSNorm(eqx.Module):
    """Divides by the root of the mean square along some axes, then scales by a weight.

    Attributes:
        weight: along the normalized axes, or None.
        axis: name of the normalized axis, or names of several that are normalized together.
        eps: added to the mean square.
        offset: added to the weight; 1 if weights are stored as differences from 1.
        rounding: whether the quotient is rounded to the input's dtype before the product with the weight (Llama and
            most others), or only the product is rounded (Gemma, OLMo). In float32 both give the same result.
    """

    weight: NamedArray | None = eqx.field(metadata=role("norm"))
    axis: str | tuple[str, ...] = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    offset: float = eqx.field(static=True, default=0.0)
    rounding: Literal["quotient", "product"] = eqx.field(static=True, default="quotient")

    @staticmethod
    def init(axis: Axis | tuple[Axis, ...], *, eps: float, use_weight: bool) -> "RMSNorm":
        """A norm with unit weights."""
        names = axis.name if isinstance(axis, Axis) else tuple(a.name for a in axis)
        return RMSNorm(weight=hax.ones(axis, dtype=jnp.float32) if use_weight else None, axis=names, eps=eps)

    def __call__(self, x: NamedArray) -> NamedArray:
        exact = x.astype(jnp.float32)
        mean_square = hax.mean(hax.square(exact), self.axis)
        # eps inside the root, as in Llama; rsqrt rather than a division, as in torch.
        quotient = exact * hax.rsqrt(mean_square + self.eps)
        if self.weight is None:
            return quotient.astype(x.dtype)
        if self.rounding == "quotient":
            # The weight multiplies in its own dtype, that of the compute policy, as in Hugging Face's `LlamaRMSNorm`.
            weight = self.weight + self.offset if self.offset else self.weight
            return quotient.astype(x.dtype) * weight
        weight = self.weight.astype(jnp.float32)
        return (quotient * (weight + self.offset if self.offset else weight)).astype(x.dtype)


class LayerNorm(eqx.Module):
    """Subtracts the mean along one axis and divides by the standard deviation, then scales and shifts.

    Attributes:
        weight: along the normalized axis, or None.
        bias: along the normalized axis, or None.
        axis: the normalized axis' name.
        eps: added to the variance.
    """

    weight: NamedArray | None = eqx.field(metadata=role("norm"))
    bias: NamedArray | None = eqx.field(metadata=role("norm"))
    axis: str = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(axis: Axis, *, eps: float, use_weight: bool, use_bias: bool) -> "LayerNorm":
        """A norm with unit weights and zero bias."""
        return LayerNorm(
            weight=hax.ones(axis, dtype=jnp.float32) if use_weight else None,
            bias=hax.zeros(axis, dtype=jnp.float32) if use_bias else None,
            axis=axis.name,
            eps=eps,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        exact = x.astype(jnp.float32)
        # The variance is the mean square of the centered values: mean(x²) − mean(x)² cancels in float32.
        centered = exact - hax.mean(exact, self.axis)
        y = centered * hax.rsqrt(hax.mean(hax.square(centered), self.axis) + self.eps)
        if self.weight is not None:
            y = y * self.weight.astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias.astype(jnp.float32)
        return y.astype(x.dtype)


Norm = RMSNorm | LayerNorm


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """The configuration of a model's norms.

    Attributes:
        kind: `rms` or `layer`.
        eps: added to the mean square, or to the variance.
        use_weight: whether there is a weight.
        use_bias: whether there is a bias (`layer` only).
        offset: see `RMSNorm`; the stored weight is initialized to 1 − `offset`.
        rounding: see `RMSNorm`.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    use_weight: bool = True
    use_bias: bool = False
    offset: float = 0.0
    rounding: Literal["quotient", "product"] = "quotient"

    def init(self, axis: Axis | tuple[Axis, ...]) -> Norm:
        """A norm over `axis` whose initial scale is 1."""
        if self.kind == "layer":
            # Only RMSNorm is used over several axes (queries and keys of all heads).
            assert isinstance(axis, Axis), f"LayerNorm is over one axis, not {axis}"
            return LayerNorm.init(axis, eps=self.eps, use_weight=self.use_weight, use_bias=self.use_bias)
        assert not self.use_bias, "RMSNorm has no bias"
        names = axis.name if isinstance(axis, Axis) else tuple(a.name for a in axis)
        # Gemma stores differences from 1, so its initial weight is 0.
        weight = hax.full(axis, 1.0 - self.offset, dtype=jnp.float32) if self.use_weight else None
        return RMSNorm(weight=weight, axis=names, eps=self.eps, offset=self.offset, rounding=self.rounding)
