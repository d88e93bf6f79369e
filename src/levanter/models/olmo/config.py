"""`Olmo2Config` (OLMo 2, arXiv:2501.00656) and `Olmo3Config`.

Norms come after attention and MLP instead of before them, and queries and keys are normalized over all heads together.
OLMo 3 gives three layers in four a sliding window; only full-attention layers use YaRN.
"""

import dataclasses
from dataclasses import dataclass, field

from levanter.config.validators import Fraction, PositiveInt
from levanter.layers.attention.grouped import AttentionSpec
from levanter.layers.norm import NormSpec
from levanter.layers.residual import POST_NORMS, NormPlace
from levanter.layers.rotary import DefaultRotaryConfig, RotaryConfig
from levanter.models.decoder.pattern import FULL, SLIDING, WindowedConfig
from levanter.models.llama.config import LlamaConfig
from levanter.models.registry import LmConfig


@LmConfig.register_subclass("olmo2")
@dataclass(frozen=True, kw_only=True)
class Olmo2Config(LlamaConfig):
    """An OLMo 2.

    Attributes:
        attention_dropout: upstream's key; only 0 is possible.
    """

    max_seq_len: int = 4096
    layer_norm_epsilon: float = 1e-6
    attention_dropout: Fraction = 0.0
    reference_checkpoint: str | None = "allenai/OLMo-2-1124-7B"

    @property
    def norm(self) -> NormSpec:
        # HF's Olmo2RMSNorm multiplies by the weight in float32 and rounds after it.
        return dataclasses.replace(super().norm, rounding="product")

    @property
    def norms(self) -> tuple[NormPlace, ...]:
        return POST_NORMS

    @property
    def attention(self) -> AttentionSpec:
        # One norm over the features of all heads together, unlike Qwen 3's norm for each head.
        return dataclasses.replace(super().attention, norm=self.norm, normed="all heads")

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.attention_dropout:
            problems.append(f"model.attention_dropout {self.attention_dropout}: there is no dropout here; it must be 0")
        return problems


@LmConfig.register_subclass("olmo3")
@dataclass(frozen=True, kw_only=True)
class Olmo3Config(WindowedConfig, Olmo2Config):
    """An OLMo 3.

    Attributes:
        rope: of full-attention layers.
        rope_sliding: of sliding-window layers; None for the same base without scaling.
    """

    max_seq_len: int = 4096
    layer_norm_epsilon: float = 1e-6
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotaryConfig(theta=500_000.0))
    rope_sliding: RotaryConfig | None = None
    sliding_window: PositiveInt | None = 4096
    reference_checkpoint: str | None = "allenai/Olmo-3-1025-7B"

    def default_layer_type(self, layer: int) -> str:
        # Every fourth layer is full, the last one of each four.
        return SLIDING if (layer + 1) % 4 else FULL

    def rotary(self, layer: int) -> str | None:
        return "rope_local" if self.layer_type(layer) == SLIDING else "rope"

    @property
    def rope_local(self) -> RotaryConfig:
        """The rotary embeddings of sliding-window layers."""
        # The same base without YaRN, which published OLMo 3 models use in full-attention layers only.
        return self.rope_sliding or DefaultRotaryConfig(theta=self.rope.theta)
