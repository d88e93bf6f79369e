"""Qwen2, Qwen2.5 and Qwen3."""

from levanter.models.qwen.config import Qwen3Config, QwenConfig

__all__ = ["Qwen3Config", "QwenConfig"]
