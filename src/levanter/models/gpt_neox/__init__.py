"""GPT-NeoX and Pythia: attention and MLP side by side, a part of each head rotated, biases everywhere."""

from levanter.models.gpt_neox.config import GptNeoxConfig

__all__ = ["GptNeoxConfig"]
