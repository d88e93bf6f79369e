"""Llama on named axes."""

from levanter.models.llama.config import LlamaConfig

__all__ = ["LlamaConfig"]
