"""Add a kind of layer without a fork: the mean of all positions so far, in place of attention in two of three layers.

    python examples/layer_kind.py

A layer consists of a mixer and a feed-forward part. A *spec* describes a part before any array exists; its `init` makes
the module. The spec below is a mixer; docs/extending/layer.md explains each of its properties.
"""

from dataclasses import dataclass
from typing import ClassVar

import equinox as eqx
import haliax as hax
import jax

from levanter.layers.linear import Linear
from levanter.models import LlamaConfig
from levanter.models.decoder import DecoderLmHeadModel, PatternedConfig


@dataclass(frozen=True, kw_only=True)
class CausalMeanSpec:
    """y_t = W_out (mean of W_in x_s over s ≤ t), as a value that the plan, the search and FLOP counts read."""

    Embed: hax.Axis
    Channel: hax.Axis
    attribute, rope = "mixer", None  # name of the module in leaf paths; it reads no rotary table
    tensor_axes: ClassVar = (("channel",),)  # what tensor parallelism shards
    state_axes: ClassVar = {"sum": ("channel",)}  # state while text is generated, beside the batch axis
    saved: ClassVar = {}  # activations that gradient checkpointing may keep

    @property
    def axes(self) -> tuple[hax.Axis, ...]:
        return (self.Embed, self.Channel)

    @property
    def activations(self) -> dict[str, tuple[hax.Axis, ...]]:
        return {"channels": (self.Channel,)}

    @property
    def matmul_parameters(self) -> int:
        return 2 * self.Embed.size * self.Channel.size

    def sequence_flops(self, length: int, *, attention: str) -> int:  # noqa: ARG002
        return 2 * length * self.Channel.size  # beyond the weights: a sum and a division, linear in the length

    def init(self, *, key: jax.Array) -> "CausalMean":
        w_in = Linear.init((self.Embed,), (self.Channel,), scale=0.02, use_bias=False, key=jax.random.fold_in(key, 0))
        w_out = Linear.init((self.Channel,), (self.Embed,), scale=0.02, use_bias=False, key=jax.random.fold_in(key, 1))
        return CausalMean(in_proj=w_in, out_proj=w_out)


class CausalMean(eqx.Module):
    """The module of a `CausalMeanSpec`."""

    in_proj: Linear
    out_proj: Linear

    def __call__(self, x: hax.NamedArray, context, state=None) -> tuple[hax.NamedArray, None]:  # noqa: ARG002
        u = hax.auto_sharded(self.in_proj(x))  # sharded as the compute mapping says for `channel`
        Pos = u.resolve_axis("position")
        return self.out_proj(hax.cumsum(u, Pos) / (hax.arange(Pos) + 1).astype(u.dtype)), state


@dataclass(frozen=True, kw_only=True)
class MixedConfig(PatternedConfig, LlamaConfig):
    """A Llama with two kinds of layers, which `pattern` names by letters."""

    @property
    def kinds(self) -> dict[str, str]:
        return {"F": "full_attention", "M": "causal_mean"}

    def layer_mixer(self, layer: int):
        mean = CausalMeanSpec(Embed=self.Embed, Channel=hax.Axis("channel", 96))
        return mean if self.layer_type(layer) == "causal_mean" else self.layer_attention(layer)


def main() -> None:
    """Builds a model and checks that no activation depends on a later token."""
    config = MixedConfig(hidden_dim=64, intermediate_dim=128, num_layers=6, num_heads=4, num_kv_heads=2, pattern="MMF")
    print(config.stacking)
    model = eqx.filter_jit(DecoderLmHeadModel.init)(hax.Axis("vocab", 100), config, key=jax.random.key(0))
    forward = eqx.filter_jit(lambda ids: model(hax.named(ids, ("batch", "position"))).activations.array)
    ids = jax.numpy.arange(16)[None]
    changed = (forward(ids) != forward(ids.at[0, 10].set(99))).any(axis=(0, 2))
    print("first position that changes with token 10:", int(changed.argmax()))


if __name__ == "__main__":
    main()
