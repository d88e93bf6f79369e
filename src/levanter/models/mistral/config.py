"""`MistralConfig`: Llama with a sliding window in every layer (Jiang et al., arXiv:2310.06825)."""

from dataclasses import dataclass

from levanter.config.validators import PositiveInt
from levanter.models.llama.config import LlamaConfig
from levanter.models.registry import LmConfig


@LmConfig.register_subclass("mistral")
@dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """A Mistral.

    Attributes:
        sliding_window: how many keys a query sees, itself included; None for all up to it (Mistral from v0.2 on).
    """

    max_seq_len: int = 8192
    intermediate_dim: int = 14336
    num_kv_heads: int = 8
    sliding_window: PositiveInt | None = 4096
    reference_checkpoint: str | None = "mistralai/Mistral-7B-v0.1"

    def window(self, layer: int) -> int | None:
        del layer
        # Every layer has the same window, so all layers are one run of a scan.
        return self.sliding_window
