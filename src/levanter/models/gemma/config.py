"""The Gemmas as values: `GemmaConfig` (arXiv:2403.08295), `Gemma2Config` (arXiv:2408.00118) and `Gemma3Config`
(arXiv:2503.19786, the text model).

Differences from Llama: a GELU gate, one table for embedding and head, embedded tokens scaled by √hidden_dim, and norms
whose weights are stored as differences from 1. Gemma 2 adds norms after attention and MLP, soft caps on attention
scores and on logits, and a window in every second layer. Gemma 3 drops the caps, normalizes queries and keys, has five
sliding-window layers for each full one, and uses another rotary base in the former.
"""

import dataclasses
import math
from dataclasses import dataclass, field

from levanter.config.validators import PositiveFloat, PositiveInt
from levanter.layers.attention.grouped import AttentionSpec
from levanter.layers.norm import NormSpec
from levanter.layers.residual import POST_NORMS, PRE_NORMS, NormPlace
from levanter.layers.rotary import DefaultRotaryConfig, RotaryConfig
from levanter.models.decoder.pattern import FULL, SLIDING, WindowedConfig
from levanter.models.llama.config import LlamaConfig
from levanter.models.registry import LmConfig


@LmConfig.register_subclass("gemma")
@dataclass(frozen=True, kw_only=True)
class GemmaConfig(LlamaConfig):
    """A Gemma.

    Attributes:
        query_pre_attn_scalar: attention scores are divided by its square root; None for the size of a head.
    """

    max_seq_len: int = 8192
    vocab_size: int | None = 256_000
    hidden_dim: int = 2048
    intermediate_dim: int = 16384
    num_layers: int = 18
    num_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int | None = 256
    activation_function: str = "gelu_new"
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: PositiveFloat | None = None
    reference_checkpoint: str | None = "google/gemma-2b"

    @property
    def norm(self) -> NormSpec:
        offset = 1.0 if self.use_layer_norm_weight else 0.0
        # HF computes x · (1 + weight) in float32 and rounds once after the product; Llama's norm rounds x before it.
        return dataclasses.replace(super().norm, offset=offset, rounding="product")

    @property
    def attention(self) -> AttentionSpec:
        scalar = self.query_pre_attn_scalar
        # Attention's default scale is 1 / √head_size; Gemma 2 27B uses hidden_dim / num_heads instead of head_size.
        return dataclasses.replace(super().attention, softmax_scale=None if scalar is None else 1 / math.sqrt(scalar))

    @property
    def embedding_scale(self) -> float | None:
        # `DecoderEmbedding` rounds the factor to the activations' dtype, as HF does.
        return math.sqrt(self.hidden_dim)


@LmConfig.register_subclass("gemma2")
@dataclass(frozen=True, kw_only=True)
class Gemma2Config(WindowedConfig, GemmaConfig):
    """A Gemma 2.

    Attributes:
        attn_logit_softcapping: bound of attention scores; None for none.
        final_logit_softcapping: bound of the head's logits; None for none.
    """

    max_seq_len: int = 8192
    vocab_size: int | None = 256_000
    hidden_dim: int = 2304
    intermediate_dim: int = 9216
    num_layers: int = 26
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int | None = 256
    activation_function: str = "gelu_new"
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: float | None = 256.0
    attn_logit_softcapping: PositiveFloat | None = 50.0
    final_logit_softcapping: PositiveFloat | None = 30.0
    sliding_window: PositiveInt | None = 4096
    reference_checkpoint: str | None = "google/gemma-2-2b"

    def default_layer_type(self, layer: int) -> str:
        # HF numbers layers from 0, and the first one has the window.
        return FULL if layer % 2 else SLIDING

    @property
    def norms(self) -> tuple[NormPlace, ...]:
        return PRE_NORMS + POST_NORMS

    @property
    def attention(self) -> AttentionSpec:
        return dataclasses.replace(super().attention, soft_cap=self.attn_logit_softcapping)

    @property
    def logit_soft_cap(self) -> float | None:
        return self.final_logit_softcapping


@LmConfig.register_subclass("gemma3")
@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """A Gemma 3, text only.

    Attributes:
        rope: of full-attention layers.
        rope_local_base_freq: rotary base of sliding-window layers.
        sliding_window_pattern: n: every n-th layer has full attention, the others a window; None is 6.
    """

    max_seq_len: int = 131_072
    vocab_size: int | None = 262_208
    # QK-norm replaces Gemma 2's cap on attention scores.
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_qk_norm: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotaryConfig(theta=1_000_000.0))
    rope_local_base_freq: PositiveFloat = 10_000.0
    sliding_window_pattern: PositiveInt | None = None
    reference_checkpoint: str | None = "google/gemma-3-1b-pt"

    def default_layer_type(self, layer: int) -> str:
        return SLIDING if (layer + 1) % (self.sliding_window_pattern or 6) else FULL

    def rotary(self, layer: int) -> str | None:
        # Names a property, not a field: windowed layers' embeddings follow from `rope_local_base_freq`.
        return "rope_local" if self.layer_type(layer) == SLIDING else "rope"

    @property
    def rope_local(self) -> RotaryConfig:
        """The rotary embeddings of sliding-window layers."""
        return DefaultRotaryConfig(theta=self.rope_local_base_freq)
