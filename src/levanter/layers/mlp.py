"""Feed-forward blocks: gated, `down(act(gate(x)) · up(x))` (SwiGLU; Shazeer, arXiv:2002.05202), and plain.

An `MlpSpec` is the configuration of a block; its `init` returns the module.
"""

from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray

from levanter.layers.activation import ACTIVATIONS
from levanter.layers.context import ForwardContext
from levanter.layers.linear import Linear
from levanter.layers.protocols import Shapes
from levanter.layers.remat_names import saved


class GatedMlp(eqx.Module):
    """Constraint points: the gate and up activations."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    activation: str = eqx.field(static=True)

    @staticmethod
    def init(Embed: Axis, Mlp: Axis, *, activation: str, scale: float, use_bias: bool, key: jax.Array) -> "GatedMlp":
        """Three projections with weights of standard deviation `scale`."""
        gate, up, down = jax.random.split(key, 3)
        return GatedMlp(
            gate_proj=Linear.init((Embed,), (Mlp,), scale=scale, use_bias=use_bias, key=gate),
            up_proj=Linear.init((Embed,), (Mlp,), scale=scale, use_bias=use_bias, key=up),
            down_proj=Linear.init((Mlp,), (Embed,), scale=scale, use_bias=use_bias, key=down),
            activation=activation,
        )

    def __call__(self, x: NamedArray, context: ForwardContext | None = None) -> NamedArray:
        del context
        with jax.named_scope("gate_proj"):
            gate = saved(hax.auto_sharded(self.gate_proj(x)), "gate")
        with jax.named_scope("up_proj"):
            up = saved(hax.auto_sharded(self.up_proj(x)), "up")
        # Unnamed for checkpointing: the backward pass recomputes this cheap product from gate and up.
        gated = ACTIVATIONS[self.activation](gate) * up
        with jax.named_scope("down_proj"):
            return self.down_proj(gated)


class PlainMlp(eqx.Module):
    """`down(act(up(x)))`. Constraint point: the up activation."""

    up_proj: Linear
    down_proj: Linear
    activation: str = eqx.field(static=True)

    @staticmethod
    def init(Embed: Axis, Mlp: Axis, *, activation: str, scale: float, use_bias: bool, key: jax.Array) -> "PlainMlp":
        """Two projections with weights of standard deviation `scale`."""
        up, down = jax.random.split(key)
        return PlainMlp(
            up_proj=Linear.init((Embed,), (Mlp,), scale=scale, use_bias=use_bias, key=up),
            down_proj=Linear.init((Mlp,), (Embed,), scale=scale, use_bias=use_bias, key=down),
            activation=activation,
        )

    def __call__(self, x: NamedArray, context: ForwardContext | None = None) -> NamedArray:
        del context
        with jax.named_scope("up_proj"):
            up = saved(hax.auto_sharded(self.up_proj(x)), "up")
        with jax.named_scope("down_proj"):
            return self.down_proj(ACTIVATIONS[self.activation](up))


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """The configuration of a feed-forward block.

    Attributes:
        Embed: axis of the residual stream.
        Mlp: axis of the features inside.
        activation: a name in `ACTIVATIONS`.
        gated: whether a second projection gates the first.
        use_bias: biases in all projections.
        scale: initial standard deviation of the weights.
    """

    Embed: Axis
    Mlp: Axis
    activation: str
    gated: bool = True
    use_bias: bool = False
    scale: float = 0.02

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply each token."""
        return (3 if self.gated else 2) * self.Embed.size * self.Mlp.size

    def sequence_flops(self, length: int, *, attention: Literal["causal", "full"]) -> int:  # noqa: ARG002
        """None beyond the products with its weights."""
        return 0

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of its weights."""
        return (self.Embed, self.Mlp)

    @property
    def tensor_axes(self) -> tuple[tuple[str, ...], ...]:
        """The features inside."""
        return ((self.Mlp.name,),)

    @property
    def activations(self) -> Shapes:
        """The activations it constrains: the features inside."""
        return {"mlp hidden": (self.Mlp,)}

    @property
    def saved(self) -> Shapes:
        """The activations it names for gradient checkpointing; see `layers.remat_names`."""
        return dict.fromkeys(("gate", "up") if self.gated else ("up",), (self.Mlp,))

    def init(self, *, key: jax.Array) -> GatedMlp | PlainMlp:
        """A freshly initialized block."""
        kind = GatedMlp if self.gated else PlainMlp
        return kind.init(
            self.Embed, self.Mlp, activation=self.activation, scale=self.scale, use_bias=self.use_bias, key=key
        )
