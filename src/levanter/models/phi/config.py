"""`Phi3Config` (Phi-3, arXiv:2404.14219; Phi-4 and Phi-4-mini have the same `model_type`).

A Llama whose checkpoints hold queries, keys and values in one tensor and the gate with the up projection in another.
Some rotate a part of each head only, and some stretch their context with LongRoPE.
"""

from dataclasses import dataclass

from levanter.config.validators import PositiveInt
from levanter.models.llama.config import LlamaConfig
from levanter.models.registry import LmConfig


@LmConfig.register_subclass("phi3")
@dataclass(frozen=True, kw_only=True)
class Phi3Config(LlamaConfig):
    """A Phi-3 or Phi-4.

    Attributes:
        sliding_window: how many keys a query sees, itself included; None for all up to it.
    """

    max_seq_len: int = 4096
    hidden_dim: int = 3072
    intermediate_dim: int = 8192
    sliding_window: PositiveInt | None = None
    reference_checkpoint: str | None = "microsoft/Phi-3-mini-4k-instruct"

    def window(self, layer: int) -> int | None:
        del layer
        return self.sliding_window

    def _problems(self) -> list[str]:
        # Parts of a LlamaConfig for which Phi-3's checkpoints have no tensors.
        plain = ("use_bias", "attention_bias", "mlp_bias", "use_qk_norm", "hybrid_norm", "input_embedding_norm")
        problems = [f"model.{name}: a Phi-3 has none" for name in plain if getattr(self, name)]
        return problems + super()._problems()
