"""`LlamaConfig`: the Llama family's architecture as a value (Llama 1 to 3.2, SmolLM2 and relatives).

Field names are upstream's, so YAML written for it keeps working; the attribute list explains them.
Touvron et al., arXiv:2302.13971; Llama 3, arXiv:2407.21783.
"""

import dataclasses
from dataclasses import dataclass

from levanter.layers.attention.grouped import AttentionSpec
from levanter.layers.mlp import MlpSpec
from levanter.layers.norm import NormSpec
from levanter.layers.residual import POST_NORMS, PRE_NORMS, NormPlace
from levanter.models.decoder.config import DecoderConfig
from levanter.models.registry import LmConfig


@LmConfig.register_subclass("llama")
@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """A Llama.

    Attributes:
        use_bias: biases in all projections.
        attention_bias: biases in q, k, v and o.
        mlp_bias: biases in gate, up and down.
        use_qk_norm: RMSNorm on each head's queries and keys, before the rotation.
        hybrid_norm: RMSNorm also on the outputs of attention and MLP, before they join the residual stream.
        input_embedding_norm: RMSNorm on the embedded tokens.
        use_layer_norm_weight: RMSNorms have weights.
    """

    use_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_qk_norm: bool = False
    hybrid_norm: bool = False
    input_embedding_norm: bool = False
    use_layer_norm_weight: bool = True
    reference_checkpoint: str | None = "NousResearch/Llama-2-7b-hf"

    @property
    def has_attention_bias(self) -> bool:
        """Whether the projections of attention have biases."""
        return self.use_bias or self.attention_bias

    @property
    def has_mlp_bias(self) -> bool:
        """Whether the projections of the feed-forward part have biases."""
        return self.use_bias or self.mlp_bias

    @property
    def norm(self) -> NormSpec:
        # HF's LlamaRMSNorm rounds x to the activations' dtype
        # before it multiplies by the weight (NormSpec's default).
        return NormSpec(eps=self.layer_norm_epsilon, use_weight=self.use_layer_norm_weight)

    @property
    def norms(self) -> tuple[NormPlace, ...]:
        return PRE_NORMS + POST_NORMS if self.hybrid_norm else PRE_NORMS

    @property
    def attention(self) -> AttentionSpec:
        return dataclasses.replace(
            super().attention,
            # HF's attention_bias covers q, k, v and o alike.
            qkv_bias=self.has_attention_bias,
            out_bias=self.has_attention_bias,
            norm=self.norm if self.use_qk_norm else None,
        )

    @property
    def mlp(self) -> MlpSpec:
        return MlpSpec(
            Embed=self.Embed,
            Mlp=self.Mlp,
            activation=self.activation_function,
            use_bias=self.has_mlp_bias,
            scale=self.initializer_range,
        )

    @property
    def normed_embedding(self) -> bool:
        return self.input_embedding_norm
