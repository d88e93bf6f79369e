"""Attention: masks as rules, several backends with the same result, and the choice between them."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand

if TYPE_CHECKING:
    from levanter.layers.attention.backends import BackendChoice, attend, choose_backend
    from levanter.layers.attention.grouped import GroupedQueryAttention
    from levanter.layers.attention.mask import AttentionMask

__all__ = ["AttentionMask", "BackendChoice", "GroupedQueryAttention", "attend", "choose_backend"]

export_on_demand(__name__)
