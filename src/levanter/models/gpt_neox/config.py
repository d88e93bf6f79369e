"""`GptNeoxConfig`: GPT-NeoX (Black et al., arXiv:2204.06745), Pythia (arXiv:2304.01373) and models of the same form.

The defaults are GPT-NeoX-20B's. Upstream does not have this family; field names follow its other families.
"""

import dataclasses
from dataclasses import dataclass, field

from haliax import Axis

from levanter.config.validators import Count
from levanter.layers.attention.grouped import AttentionSpec
from levanter.layers.mlp import MlpSpec
from levanter.layers.norm import NormSpec
from levanter.layers.residual import ParallelResidual, ResidualSpec
from levanter.layers.rotary import DefaultRotaryConfig, RotaryConfig
from levanter.models.decoder.config import DecoderConfig
from levanter.models.registry import LmConfig


@LmConfig.register_subclass("gpt_neox")
@dataclass(frozen=True, kw_only=True)
class GptNeoxConfig(DecoderConfig):
    """A GPT-NeoX.

    Attributes:
        num_kv_heads: must equal `num_heads`; 0 for the same.
        use_parallel_residual: attention and MLP both read the block's input; otherwise one comes after the other.
        attention_bias: biases of q, k, v and o. Norms and MLPs always have biases.
    """

    max_seq_len: int = 2048
    hidden_dim: int = 6144
    intermediate_dim: int = 24576
    num_layers: int = 44
    num_heads: int = 64
    num_kv_heads: Count = 0
    activation_function: str = "gelu_fast"
    use_parallel_residual: bool = True
    attention_bias: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotaryConfig(partial_rotary_factor=0.25))
    reference_checkpoint: str | None = "EleutherAI/gpt-neox-20b"

    @property
    def KVHead(self) -> Axis:
        """The axis of key and value heads: as many as query heads, unless given."""
        # 0 as default keeps the two in step when a user changes only num_heads.
        return Axis("kv_head", self.num_kv_heads or self.num_heads)

    @property
    def norm(self) -> NormSpec:
        # LayerNorm with bias, unlike Llama's RMSNorm.
        return NormSpec(kind="layer", eps=self.layer_norm_epsilon, use_bias=True)

    @property
    def residual(self) -> ResidualSpec:
        rule = ParallelResidual if self.use_parallel_residual else ResidualSpec
        return rule(norm=self.norm, norms=self.norms)

    @property
    def attention(self) -> AttentionSpec:
        return dataclasses.replace(super().attention, qkv_bias=self.attention_bias, out_bias=self.attention_bias)

    @property
    def mlp(self) -> MlpSpec:
        return MlpSpec(
            Embed=self.Embed,
            Mlp=self.Mlp,
            activation=self.activation_function,
            # Two matrices with GELU between them, without a gate.
            gated=False,
            use_bias=True,
            scale=self.initializer_range,
        )

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.KVHead.size != self.num_heads:
            problems.append(f"model.num_kv_heads is {self.num_kv_heads}; a GPT-NeoX has as many as num_heads")
        return problems
