"""`SmolLM3Config`: Llama without rotary embeddings in every fourth layer (NoPE; Yang et al., arXiv:2501.18795)."""

from dataclasses import dataclass, field

from levanter.config.validators import Count, PositiveInt
from levanter.layers.rotary import DefaultRotaryConfig, RotaryConfig
from levanter.models.decoder.pattern import FULL, SLIDING, WindowedConfig
from levanter.models.llama.config import LlamaConfig
from levanter.models.registry import LmConfig


@LmConfig.register_subclass("smollm3")
@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(WindowedConfig, LlamaConfig):
    """A SmolLM3.

    Attributes:
        no_rope_layers: for each layer, 1 if it has rotary embeddings and 0 if it has none (Hugging Face's values, which
            are the opposite of the name); None for the pattern of the interval.
        no_rope_layer_interval: n: every n-th layer has no rotary embeddings.
        use_sliding_window: whether layers without rotary embeddings see a window only.
    """

    max_seq_len: int = 32768
    hidden_dim: int = 2048
    num_layers: int = 36
    num_heads: int = 16
    num_kv_heads: int = 4
    layer_norm_epsilon: float = 1e-6
    tie_word_embeddings: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotaryConfig(theta=2_000_000.0))
    no_rope_layers: tuple[Count, ...] | None = None
    no_rope_layer_interval: PositiveInt = 4
    use_sliding_window: bool = False
    reference_checkpoint: str | None = "HuggingFaceTB/SmolLM3-3B"

    def default_layer_type(self, layer: int) -> str:
        windowed = self.use_sliding_window and self.sliding_window is not None and self.rotary(layer) is None
        return SLIDING if windowed else FULL

    def window(self, layer: int) -> int | None:
        # transformers ignores sliding_window and layer types unless use_sliding_window is set.
        return super().window(layer) if self.use_sliding_window else None

    def rotary(self, layer: int) -> str | None:
        if self.no_rope_layers is not None:
            # 1 means rotary embeddings: the field lists the layers' flags, not the layers without.
            return "rope" if self.no_rope_layers[layer] else None
        return "rope" if (layer + 1) % self.no_rope_layer_interval else None

    def _problems(self) -> list[str]:
        flags = self.no_rope_layers
        if flags is not None and len(flags) != self.num_layers:
            return [f"model.no_rope_layers has {len(flags)} entries for model.num_layers {self.num_layers}"]
        return super()._problems()
