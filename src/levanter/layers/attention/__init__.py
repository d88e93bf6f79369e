"""Attention: the mask as a rule, implementations of one meaning, and the choice between them."""

from levanter.layers.attention.backends import BackendChoice, attend, choose_backend
from levanter.layers.attention.grouped import GroupedQueryAttention
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.context import MixerContext

__all__ = ["AttentionMask", "BackendChoice", "GroupedQueryAttention", "MixerContext", "attend", "choose_backend"]
