"""SmolLM3: Llama with layers that know no positions."""

from levanter.models.smollm3.config import SmolLM3Config

__all__ = ["SmolLM3Config"]
