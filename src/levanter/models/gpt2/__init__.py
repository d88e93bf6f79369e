"""GPT-2: learned positions, LayerNorm, plain MLPs, biases everywhere."""

from levanter.models.gpt2.config import Gpt2Config

__all__ = ["Gpt2Config"]
