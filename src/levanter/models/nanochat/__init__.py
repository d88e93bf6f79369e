"""nanochat: today's architecture, the plain one of October 2025, and variants in between."""

from levanter.models.nanochat.config import NanochatConfig

__all__ = ["NanochatConfig"]
