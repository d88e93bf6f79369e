"""Models on named axes. Importing this package registers every family."""

from levanter.models.llama import LlamaConfig
from levanter.models.registry import LmConfig

__all__ = ["LlamaConfig", "LmConfig"]
