"""Mistral: Llama whose queries see a window of keys."""

from levanter.models.mistral.config import MistralConfig

__all__ = ["MistralConfig"]
