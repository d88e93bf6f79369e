"""OLMo 2 and OLMo 3."""

from levanter.models.olmo.config import Olmo2Config, Olmo3Config

__all__ = ["Olmo2Config", "Olmo3Config"]
