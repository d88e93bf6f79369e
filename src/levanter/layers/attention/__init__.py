"""Attention: masks as rules, several backends with the same result, and the choice between them."""

from levanter.layers.attention.backends import BackendChoice, attend, choose_backend
from levanter.layers.attention.grouped import GroupedQueryAttention
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.context import MixerContext

__all__ = ["AttentionMask", "BackendChoice", "GroupedQueryAttention", "MixerContext", "attend", "choose_backend"]
