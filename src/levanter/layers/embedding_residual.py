"""A residual stream into which the embedded tokens are mixed everywhere (karpathy/nanochat).

A layer begins with `r·x + s·x0`, whose result its mixer reads and is added to; x0 is what the first layer reads. Before
the first layer, *smear* adds a part of the previous token's embedding to each token:

    x_t + scale · σ(gate · x_t[:channels]) · x_{t−1}

Before the final norm, *backout* subtracts a multiple of the middle layer's output.

The first token of a text has no previous one. A sequence that is packed in segments is several texts; one without
segments is a single text, whatever documents it was cut from.
"""

from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from haliax_ext.mapping import shard_residual
from levanter.layers.context import ForwardContext
from levanter.layers.linear import Linear
from levanter.layers.residual import PlainRule, ResidualRule, ResidualSpec

GATE_CHANNEL = Axis("gate_channel", 24)
"""The axis of what smear's gate reads."""
X0, MIDDLE = "x0", "middle"
"""Constants of the forward pass: what the first layer reads, and the middle layer's output."""


class Smear(eqx.Module):
    """Adds a part of the previous token's embedding.

    Attributes:
        scale: of what is added; 0 at first, so that smear changes nothing.
        gate: from the leading features to one number.
    """

    scale: NamedArray
    gate: Linear

    @staticmethod
    def init(Channel: Axis) -> "Smear":
        """A smear that adds nothing, with a gate of zeros."""
        return Smear(
            scale=hax.zeros((), dtype=jnp.float32),
            gate=Linear(weight=hax.zeros((Channel,), dtype=jnp.float32), bias=None, In=(Channel.name,)),
        )

    def __call__(self, x: NamedArray, context: ForwardContext) -> NamedArray:
        """Maps embedded tokens `[…, position, embed]` to the same axes."""
        # A gate of one number for each token: its matrix has one axis, so optimizers of matrices leave it to AdamW.
        Channel = self.gate.operand.axes[-1]
        with jax.named_scope("smear"):
            leading = x["embed", 0 : Channel.size].rename({"embed": Channel.name})
            gate = self.scale * hax.nn.sigmoid(self.gate(leading))
            return x + (gate * context.embedded_before(x)).rearrange(x.axes)


class MixedWithEmbedding(eqx.Module):
    """`r·x + s·x0` is what the mixer reads, and what its output is added to.

    Attributes:
        stream_scale: r.
        x0_scale: s.
    """

    stream_scale: NamedArray
    x0_scale: NamedArray

    def read(self, stream: NamedArray, context: ForwardContext) -> NamedArray:
        """The mixture of the stream and the embedded tokens."""
        return self.stream_scale * stream + self.x0_scale * context.constants[X0]

    def write(self, stream: NamedArray, branch: NamedArray, context: ForwardContext) -> NamedArray:
        """The mixture plus the branch."""
        # The same expression as in `read`, which XLA computes once.
        return shard_residual(self.read(stream, context) + branch)


class SmearBackoutEnds(eqx.Module):
    """Smear at the beginning of the stream, backout at its end; None for a part that the model does not have.

    Attributes:
        smear: see the module.
        backout_scale: of the middle layer's output, which is subtracted.
    """

    smear: Smear | None
    backout_scale: NamedArray | None

    def enter(self, x: NamedArray, context: ForwardContext) -> NamedArray:
        """The embedded tokens, each with a part of the previous one."""
        # The result is x0 of all layers: it contains the smear.
        return x if self.smear is None else self.smear(x, context)

    def leave(self, stream: NamedArray, context: ForwardContext) -> NamedArray:
        """The stream without a part of the middle layer's output."""
        return stream if self.backout_scale is None else stream - self.backout_scale * context.constants[MIDDLE]


@dataclass(frozen=True, kw_only=True)
class EmbeddingResidual(ResidualSpec):
    """The configuration of the stream.

    Attributes:
        scalars: whether layers mix the stream with the embedded tokens.
        smear: whether there is a smear.
        backout: the initial factor of the middle layer's output; None for no backout.
    """

    scalars: bool = True
    smear: bool = True
    backout: float | None = 0.2

    @property
    def any_order(self) -> bool:
        # In zigzag order, the entry before a token is not the token before it.
        return not self.smear

    @property
    def ends_axes(self) -> tuple[Axis, ...]:
        return (GATE_CHANNEL,) if self.smear else ()

    def init(self, Embed: Axis, branches: int, *, key: jax.Array) -> tuple[ResidualRule, ...]:
        # The family sets the initial scalars, which depend on the layer.
        if not self.scalars:
            return super().init(Embed, branches, key=key)
        one, zero = hax.ones((), dtype=jnp.float32), hax.zeros((), dtype=jnp.float32)
        return (MixedWithEmbedding(stream_scale=one, x0_scale=zero), PlainRule())[:branches]

    def init_ends(self, Embed: Axis, *, key: jax.Array) -> SmearBackoutEnds:
        # Nothing here is random; the family draws the gate of smear.
        del Embed, key
        return SmearBackoutEnds(
            smear=Smear.init(GATE_CHANNEL) if self.smear else None,
            backout_scale=None if self.backout is None else hax.full((), self.backout, dtype=jnp.float32),
        )
