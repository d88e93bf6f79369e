"""`Gpt2Config`: GPT-2 as a value (Radford et al., Language Models are Unsupervised Multitask Learners, 2019)."""

import dataclasses
import math
from dataclasses import dataclass

from haliax import Axis

from levanter.config.validators import Count, Fraction, PositiveInt
from levanter.layers.attention.grouped import AttentionSpec
from levanter.layers.mlp import MlpSpec
from levanter.layers.norm import NormSpec
from levanter.layers.rotary import DefaultRotaryConfig
from levanter.models.decoder.config import DecoderConfig
from levanter.models.registry import LmConfig


@LmConfig.register_subclass("gpt2")
@dataclass(frozen=True, kw_only=True)
class Gpt2Config(DecoderConfig):
    """A GPT-2.

    Attributes:
        mlp_scale: size of `mlp` in multiples of `hidden_dim`.
        intermediate_dim: size of `mlp`; 0 for `mlp_scale × hidden_dim`.
        num_kv_heads: must equal `num_heads`; 0 for the same.
        use_bias: biases in all projections and norms.
        embed_pdrop, resid_pdrop, attn_pdrop: dropout in training; only 0.
        scale_attn_by_inverse_layer_idx: whether scores are divided by the layer's number, counted from 1. Layers then
            differ, and each is compiled separately.
    """

    max_seq_len: int = 1024
    hidden_dim: int = 768
    intermediate_dim: Count = 0
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: Count = 0
    mlp_scale: PositiveInt = 4
    embed_pdrop: Fraction = 0.0
    resid_pdrop: Fraction = 0.0
    attn_pdrop: Fraction = 0.0
    activation_function: str = "gelu_new"
    scale_attn_by_inverse_layer_idx: bool = False
    use_bias: bool = True
    tie_word_embeddings: bool = True
    reference_checkpoint: str | None = "gpt2"

    @property
    def Mlp(self) -> Axis:
        """The axis between the two halves of the feed-forward part, given as a size or as a multiple of `embed`."""
        # 0 (the default) means the multiple; HF's `n_inner` null means 4 × n_embd.
        return Axis("mlp", self.intermediate_dim or self.mlp_scale * self.hidden_dim)

    @property
    def KVHead(self) -> Axis:
        """The axis of key and value heads: as many as query heads, unless given."""
        return Axis("kv_head", self.num_kv_heads or self.num_heads)

    @property
    def norm(self) -> NormSpec:
        return NormSpec(kind="layer", eps=self.layer_norm_epsilon, use_bias=self.use_bias)

    @property
    def attention(self) -> AttentionSpec:
        return dataclasses.replace(super().attention, qkv_bias=self.use_bias, out_bias=self.use_bias)

    def layer_attention(self, layer: int) -> AttentionSpec:
        spec = super().layer_attention(layer)
        if not self.scale_attn_by_inverse_layer_idx:
            return spec
        # The scale is static in a kernel, so every layer has a spec of its own and no two are scanned together.
        return dataclasses.replace(spec, softmax_scale=1 / (math.sqrt(self.HeadSize.size) * (layer + 1)))

    @property
    def mlp(self) -> MlpSpec:
        return MlpSpec(
            Embed=self.Embed,
            Mlp=self.Mlp,
            activation=self.activation_function,
            gated=False,
            use_bias=self.use_bias,
            scale=self.initializer_range,
        )

    def rotary(self, layer: int) -> str | None:
        del layer
        # GPT-2 adds learned positions to the embedded tokens instead.
        return None

    @property
    def learned_positions(self) -> bool:
        return True

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.rope != DefaultRotaryConfig():
            problems.append("model.rope: a GPT-2 has learned positions and no rotary embeddings")
        if self.KVHead.size != self.num_heads:
            problems.append(f"model.num_kv_heads is {self.num_kv_heads}; a GPT-2 has as many as num_heads")
        for name in ("embed_pdrop", "resid_pdrop", "attn_pdrop"):
            if getattr(self, name):
                problems.append(f"model.{name} is {getattr(self, name)}: there is no dropout here; set it to 0")
        return problems
