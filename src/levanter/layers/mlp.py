"""The gated feed-forward block: `down(act(gate(x)) · up(x))` (SwiGLU; Shazeer, arXiv:2002.05202)."""

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray

from levanter.layers.activation import ACTIVATIONS
from levanter.layers.linear import Linear
from levanter.layers.saved import saved


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

    def __call__(self, x: NamedArray) -> NamedArray:
        with jax.named_scope("gate_proj"):
            gate = saved(hax.auto_sharded(self.gate_proj(x)), "gate")
        with jax.named_scope("up_proj"):
            up = saved(hax.auto_sharded(self.up_proj(x)), "up")
        gated = ACTIVATIONS[self.activation](gate) * up
        with jax.named_scope("down_proj"):
            return self.down_proj(gated)
