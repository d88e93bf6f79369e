"""Low-rank adapters: a second, small tree of parameters that is bound to a frozen model.

`config` holds a user's settings, `lora_targets` finds the projections that they select, `tree` holds the factors and
binds them to a model.
"""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand

if TYPE_CHECKING:
    from levanter.models.adapters.config import AdapterConfig, LoraConfig, NoAdapterConfig
    from levanter.models.adapters.lora import Adapters, Pair
    from levanter.models.adapters.lora_targets import AdapterError, TargetGroup, find_targets, target_groups

__all__ = [
    "AdapterConfig",
    "AdapterError",
    "Adapters",
    "LoraConfig",
    "NoAdapterConfig",
    "Pair",
    "TargetGroup",
    "find_targets",
    "target_groups",
]

export_on_demand(__name__)
