"""A decoder of two kinds of layers with different weights: full attention (F), and a gated causal convolution (C).

The convolution is here only to be another kind: `y = W_out (silu(W_gate x) · Σ_k w_k u_{t−k})` with `u = W_in x`, over
axes `channel` and `tap` that no other layer has, and within segments. `numpy_logits` computes the whole model another
way, layer by layer from the tensors of a checkpoint.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray

from haliax_ext.rules import WeightRules
from levanter.layers.context import ForwardContext
from levanter.layers.decode_state import LayerState, StateLeaf
from levanter.layers.layer import LayerSpec
from levanter.layers.linear import Linear
from levanter.layers.protocols import FeedForward, Mixer, Shapes
from levanter.layers.remat_names import saved
from levanter.models import registry
from levanter.models.config_json import ConfigJson, ConfigJsonReader, Spelling
from levanter.models.decoder import DecoderLmHeadModel, PatternedConfig
from levanter.models.decoder.config_json import read_decoder
from levanter.models.decoder.weights import (
    ATTENTION,
    EMBED,
    FEED_FORWARD,
    BlockTensor,
    decoder_rules,
    norms,
    projections,
)
from levanter.models.family import Family
from levanter.models.llama.config import LlamaConfig
from levanter.models.llama.config_json import write_llama
from levanter.models.registry import LmConfig

CHANNEL = ("channel",)


@dataclass(frozen=True, kw_only=True)
class ConvolutionSpec:
    """A gated causal convolution, as a value."""

    Embed: Axis
    Channel: Axis
    Tap: Axis
    init_std: float

    attribute = "mixer"
    rope = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (self.Embed, self.Channel, self.Tap)

    @property
    def tensor_axes(self) -> tuple[tuple[str, ...], ...]:
        return (CHANNEL,)

    @property
    def activations(self) -> Shapes:
        return {"channels": (self.Channel,)}

    @property
    def saved(self) -> Shapes:
        return {"convolved": (self.Channel,)}

    @property
    def matmul_parameters(self) -> int:
        return self.Channel.size * (3 * self.Embed.size + self.Tap.size)

    def sequence_flops(self, length: int, *, attention: str) -> int:
        # The product with the gate; the taps are weights.
        return length * self.Channel.size

    def decode_state(self, dtype: Any) -> Mapping[str, StateLeaf]:
        # The inputs of the positions before, the oldest first; as wide as the dtype of keys and values, unless that is
        # an integer.
        kept = self.Tap.resize(self.Tap.size - 1)
        return {"latest": StateLeaf(axes=("batch", kept, self.Channel))}

    def init(self, *, key: jax.Array) -> "Convolution":
        """Random weights."""
        keys = jax.random.split(key, 4)

        def linear(n: int, In: Axis, Out: Axis) -> Linear:
            return Linear.init((In,), (Out,), scale=self.init_std, use_bias=False, key=keys[n])

        kernel = hax.random.normal(keys[3], (self.Tap, self.Channel), dtype=jnp.float32) * self.init_std
        return Convolution(
            in_proj=linear(0, self.Embed, self.Channel),
            gate_proj=linear(1, self.Embed, self.Channel),
            out_proj=linear(2, self.Channel, self.Embed),
            kernel=kernel,
        )


class Convolution(eqx.Module):
    """The module of a `ConvolutionSpec`."""

    in_proj: Linear
    gate_proj: Linear
    out_proj: Linear
    kernel: NamedArray

    def __call__(
        self, x: NamedArray, context: ForwardContext, state: LayerState | None = None
    ) -> tuple[NamedArray, LayerState | None]:
        u = hax.auto_sharded(self.in_proj(x)).rearrange((..., "position", "channel"))
        if state is not None:
            return self._continued(x, u, context, state)
        ids = context.segments
        segments = None if ids is None else ids.rearrange((..., "position")).array
        convolved = self.kernel["tap", 0] * u
        for tap in range(1, self.kernel.axis_size("tap")):
            convolved += self.kernel["tap", tap] * hax.named(_earlier(u.array, segments, tap), u.axes)
        convolved = saved(hax.auto_sharded(convolved.rearrange(u.axes)), "convolved")
        return self.out_proj(hax.nn.silu(hax.auto_sharded(self.gate_proj(x))) * convolved), state

    def _continued(
        self, x: NamedArray, u: NamedArray, context: ForwardContext, state: LayerState
    ) -> tuple[NamedArray, LayerState]:
        """The same for tokens that continue a text."""
        assert context.new is not None
        Pos, taps = u.resolve_axis("position"), self.kernel.axis_size("tap")
        latest = state.read("latest").astype(u.dtype).rename({"tap": "position"})
        inputs = hax.concatenate("position", [latest, u.rearrange(("batch", "position", "channel"))])
        convolved = sum(self.kernel["tap", n] * inputs["position", hax.ds(taps - 1 - n, Pos)] for n in range(taps))
        # Behind the last valid position of each row, which padding follows.
        count = hax.sum(context.new.valid.astype(jnp.int32), "position")
        at = (count.broadcast_axis(Axis("tap", taps - 1)) + hax.arange(Axis("tap", taps - 1))).rearrange(
            ("batch", "tap")
        )
        kept = jnp.take_along_axis(inputs.array, at.array[:, :, None], axis=1)
        state = state.write(latest=hax.named(kept, ("batch", "tap", "channel")))
        return self.out_proj(hax.nn.silu(hax.auto_sharded(self.gate_proj(x))) * convolved), state


def _earlier(x: jax.Array, segments: jax.Array | None, by: int) -> jax.Array:
    """`[…, position, channel]` of so many positions before; zero where that is another segment's, or nobody's."""
    length = x.shape[-2]
    moved = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(by, 0), (0, 0)])[..., :length, :]
    if segments is None:
        return moved
    before = jnp.pad(segments, [(0, 0)] * (segments.ndim - 1) + [(by, 0)], constant_values=-1)[..., :length]
    return jnp.where((before == segments)[..., None], moved, jnp.zeros((), x.dtype))


@dataclass(frozen=True, kw_only=True)
class TwoKindsConfig(PatternedConfig, LlamaConfig):
    """A Llama of which some layers are convolutions.

    Attributes:
        channels: size of `channel`.
        taps: size of `tap`.
        bare: whether convolutions have no feed-forward part behind them.
        narrow: size of `mlp` behind convolutions; None for that of all layers.
    """

    channels: int = 48
    taps: int = 3
    bare: bool = False
    narrow: int | None = None

    @property
    def kinds(self) -> Mapping[str, str]:
        return {"F": "full_attention", "C": "convolution"}

    def default_layer_type(self, layer: int) -> str:
        return "convolution" if layer % 2 else "full_attention"

    def layer_mixer(self, layer: int) -> Mixer:
        if self.layer_type(layer) == "full_attention":
            return self.layer_attention(layer)
        return ConvolutionSpec(
            Embed=self.Embed,
            Channel=Axis("channel", self.channels),
            Tap=Axis("tap", self.taps),
            init_std=self.initializer_range,
        )

    def layer_feed_forward(self, layer: int) -> FeedForward | None:
        if self.layer_type(layer) == "full_attention":
            return self.mlp
        if self.bare:
            return None
        return self.mlp if self.narrow is None else replace(self.mlp, Mlp=Axis("mlp", self.narrow))


def rules(config: TwoKindsConfig, Vocab: Axis | None = None) -> WeightRules:
    """Where each leaf comes from: a table for each kind of layer."""

    def tensors(layer: LayerSpec) -> list[BlockTensor]:
        fed = [] if layer.feed_forward is None else projections(FEED_FORWARD)
        if not isinstance(layer.mixer, ConvolutionSpec):
            return [*projections(ATTENTION), *fed, *norms(layer)]
        inside = {"in_proj": (CHANNEL, EMBED), "gate_proj": (CHANNEL, EMBED), "out_proj": (EMBED, CHANNEL)}
        return [
            *(
                BlockTensor(target=f"mixer.{name}.weight", source=f"conv.{name}.weight", axes=axes)
                for name, axes in inside.items()
            ),
            BlockTensor(target="mixer.kernel", source="conv.kernel", axes=(CHANNEL, ("tap",))),
            *fed,
            *norms(layer),
        ]

    return decoder_rules(config, Vocab, tensors)


def _read(fields: ConfigJsonReader) -> TwoKindsConfig | None:
    types = fields.get("layer_types", list, required=True)
    return read_decoder(
        fields,
        TwoKindsConfig,
        name="model of two kinds",
        transformers_class="TwoKindsForCausalLM",
        layer_types=tuple(types or ()),
        channels=fields.size("channels", 48),
        taps=fields.size("taps", 3),
        bare=fields.get("bare", bool, False),
        narrow=fields.get("narrow", int),
    )


def _write(config: TwoKindsConfig, spelling: Spelling) -> dict[str, Any]:
    own = {"layer_types": list(config.types), "channels": config.channels, "taps": config.taps, "bare": config.bare}
    own |= {} if config.narrow is None else {"narrow": config.narrow}
    return write_llama(config, spelling, name="model of two kinds") | own


TWO_KINDS = Family(
    name="two_kinds",
    config_class=TwoKindsConfig,
    build=DecoderLmHeadModel.init,
    weight_rules=rules,
    config_json=(
        ConfigJson(model_type="two_kinds", transformers_class="TwoKindsForCausalLM", read=_read, write=_write),
    ),
)


@contextlib.contextmanager
def installed(folder: Path) -> Iterator[None]:
    """As if a package with the family were installed in a folder, and found; afterwards as if it had never been."""
    package = folder / "two_kinds-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: two-kinds\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[levanter.families]\ntwo_kinds = helpers.two_kinds:TWO_KINDS\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        registry.family_named("two_kinds")
        yield
        registry._loaded.cache_clear()
        LmConfig._choice_registry.pop("two_kinds", None)


def numpy_logits(
    config: TwoKindsConfig, tensors: Mapping[str, np.ndarray], ids: np.ndarray, segments: np.ndarray | None = None
) -> np.ndarray:
    """Logits `[batch, position, vocab]` in float64, in a plain loop over layers, positions and heads."""
    t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    segments = np.zeros_like(ids) if segments is None else segments

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.layer_norm_epsilon) * t[name]

    def silu(x):
        return x / (1 + np.exp(-x))

    def layer(x, row, n):
        here = f"model.layers.{n}"
        normed = norm(x, f"{here}.input_layernorm.weight")
        mix = _numpy_attention if config.layer_type(n) == "full_attention" else _numpy_convolution
        x = x + mix(config, {k.removeprefix(f"{here}."): v for k, v in t.items() if k.startswith(here)}, normed, row)
        if f"{here}.mlp.up_proj.weight" not in t:
            return x
        normed = norm(x, f"{here}.post_attention_layernorm.weight")
        gate, up, down = (t[f"{here}.mlp.{k}_proj.weight"] for k in ("gate", "up", "down"))
        return x + (silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    found = []
    for tokens, row in zip(ids, segments, strict=True):
        x = t["model.embed_tokens.weight"][tokens]
        for n in range(config.num_layers):
            x = layer(x, row, n)
        found.append(norm(x, "model.norm.weight") @ t["lm_head.weight"].T)
    return np.stack(found)


def _numpy_attention(config, t, x, segments):
    size, heads, kv_heads = config.HeadSize.size, config.num_heads, config.num_kv_heads
    angles = np.arange(len(x))[:, None] / config.rope.theta ** (np.arange(0, size, 2) / size)

    def rotated(y):
        a, b = y[:, : size // 2], y[:, size // 2 :]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    q, k, v = (x @ t[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    found = np.zeros((len(x), heads * size))
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        of = head * kv_heads // heads
        shared = slice(of * size, (of + 1) * size)
        queries, keys = rotated(q[:, own]), rotated(k[:, shared])
        for at in range(len(x)):
            seen = [n for n in range(at + 1) if segments[n] == segments[at]]
            scores = np.array([queries[at] @ keys[n] for n in seen]) / math.sqrt(size)
            weights = np.exp(scores - scores.max())
            found[at, own] = (weights / weights.sum()) @ v[seen][:, shared]
    return found @ t["self_attn.o_proj.weight"].T


def _numpy_convolution(config, t, x, segments):
    u, gate = x @ t["conv.in_proj.weight"].T, x @ t["conv.gate_proj.weight"].T
    mixed = np.zeros_like(u)
    for at in range(len(x)):
        for tap in range(min(config.taps, at + 1)):
            if segments[at - tap] == segments[at]:
                mixed[at] += t["conv.kernel"][:, tap] * u[at - tap]
    return (gate / (1 + np.exp(-gate)) * mixed) @ t["conv.out_proj.weight"].T
