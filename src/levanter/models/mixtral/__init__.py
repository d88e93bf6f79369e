"""Mixtral, and Qwen3 with experts."""

from levanter.models.mixtral.config import MixtralConfig, Qwen3MoeConfig

__all__ = ["MixtralConfig", "Qwen3MoeConfig"]
