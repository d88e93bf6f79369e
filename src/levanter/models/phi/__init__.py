"""Phi-3 and Phi-4."""

from levanter.models.phi.config import Phi3Config

__all__ = ["Phi3Config"]
