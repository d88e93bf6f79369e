"""Smear: a part of the previous token's embedding is added to each token, before the first layer (karpathy/nanochat).

    x_t + scale · σ(gate · x_t[:channels]) · x_{t−1}

The first token of a text has no previous one. A sequence that is packed in segments is several texts; one without
segments is a single text, whatever documents it was cut from.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levanter.layers.context import ForwardContext
from levanter.layers.linear import Linear


class Smear(eqx.Module):
    """Adds a part of the previous token's embedding.

    Attributes:
        scale: of what is added; 0 at first, so that smear changes nothing.
        gate: from the leading features to one number.
    """

    scale: NamedArray
    gate: Linear

    @staticmethod
    def init(channels: int = 24) -> "Smear":
        """A smear that adds nothing, with a gate of zeros."""
        Channel = Axis("gate_channel", channels)
        return Smear(
            scale=hax.zeros((), dtype=jnp.float32),
            gate=Linear(weight=hax.zeros((Channel,), dtype=jnp.float32), bias=None, In=(Channel.name,)),
        )

    def __call__(self, x: NamedArray, context: ForwardContext) -> NamedArray:
        """Maps embedded tokens `[…, position, embed]` to the same axes."""
        Channel = self.gate.operand.axes[-1]
        with jax.named_scope("smear"):
            leading = x["embed", 0 : Channel.size].rename({"embed": Channel.name})
            gate = self.scale * hax.nn.sigmoid(self.gate(leading))
            return x + (gate * context.embedded_before(x)).rearrange(x.axes)
