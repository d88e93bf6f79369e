"""Models on named axes. A family is imported on first use, by name or by class (`registry`)."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand

if TYPE_CHECKING:
    from levanter.models.gemma import Gemma2Config, Gemma3Config, GemmaConfig
    from levanter.models.gpt2 import Gpt2Config
    from levanter.models.gpt_neox import GptNeoxConfig
    from levanter.models.llama import LlamaConfig
    from levanter.models.mistral import MistralConfig
    from levanter.models.mixtral import MixtralConfig, Qwen3MoeConfig
    from levanter.models.nanochat import NanochatConfig
    from levanter.models.olmo import Olmo2Config, Olmo3Config
    from levanter.models.phi import Phi3Config
    from levanter.models.qwen import Qwen3Config, QwenConfig
    from levanter.models.registry import LmConfig
    from levanter.models.smollm3 import SmolLM3Config

__all__ = [
    "Gemma2Config",
    "Gemma3Config",
    "GemmaConfig",
    "Gpt2Config",
    "GptNeoxConfig",
    "LlamaConfig",
    "LmConfig",
    "MistralConfig",
    "MixtralConfig",
    "NanochatConfig",
    "Olmo2Config",
    "Olmo3Config",
    "Phi3Config",
    "Qwen3Config",
    "Qwen3MoeConfig",
    "QwenConfig",
    "SmolLM3Config",
]

export_on_demand(__name__)
