"""`QwenConfig` (Qwen2 and 2.5, arXiv:2407.10671): Llama with biases on queries, keys and values; `Qwen3Config`
(arXiv:2505.09388): without them, and with norms on each head's queries and keys.

Both can give their later layers a sliding window, which no published checkpoint of theirs does.
"""

import dataclasses
from dataclasses import dataclass

from levanter.config.validators import Count, PositiveInt
from levanter.layers.attention.grouped import AttentionSpec
from levanter.models.decoder.pattern import FULL, SLIDING, WindowedConfig
from levanter.models.llama.config import LlamaConfig
from levanter.models.registry import LmConfig


@dataclass(frozen=True, kw_only=True)
class _LateWindowConfig(WindowedConfig, LlamaConfig):
    """The fields of both families.

    Attributes:
        use_sliding_window: whether `sliding_window` applies.
        max_window_layers: the index of the first layer with a window, so the number of layers without.
    """

    use_sliding_window: bool = False
    max_window_layers: Count = 0

    def default_layer_type(self, layer: int) -> str:
        windowed = self.use_sliding_window and self.sliding_window is not None and layer >= self.max_window_layers
        return SLIDING if windowed else FULL

    def window(self, layer: int) -> int | None:
        # `use_sliding_window` false wins over explicit layer types, as in transformers.
        return super().window(layer) if self.use_sliding_window else None


@LmConfig.register_subclass("qwen")
@dataclass(frozen=True, kw_only=True)
class QwenConfig(_LateWindowConfig):
    """A Qwen2 or Qwen2.5."""

    reference_checkpoint: str | None = "Qwen/Qwen2.5-7B"

    @property
    def attention(self) -> AttentionSpec:
        # Qwen2 has biases on q, k and v but none on o, and no field of config.json says so.
        return dataclasses.replace(super().attention, qkv_bias=True)


@LmConfig.register_subclass("qwen3")
@dataclass(frozen=True, kw_only=True)
class Qwen3Config(_LateWindowConfig):
    """A Qwen3."""

    sliding_window: PositiveInt | None = 4096
    reference_checkpoint: str | None = "Qwen/Qwen3-8B"

    @property
    def attention(self) -> AttentionSpec:
        return dataclasses.replace(super().attention, norm=self.norm)
