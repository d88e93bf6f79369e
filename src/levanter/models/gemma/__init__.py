"""Gemma 1, 2 and 3 (the text models)."""

from levanter.models.gemma.config import Gemma2Config, Gemma3Config, GemmaConfig

__all__ = ["Gemma2Config", "Gemma3Config", "GemmaConfig"]
