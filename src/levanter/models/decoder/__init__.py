"""The decoder-only transformer that families are variants of: its config, layer pattern, model and weight rules."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand

if TYPE_CHECKING:
    from levanter.models.decoder.config import DecoderConfig
    from levanter.models.decoder.model import DecoderLmHeadModel
    from levanter.models.decoder.pattern import PatternedConfig, WindowedConfig
    from levanter.models.decoder.scan_layout import Run, scan_runs
    from levanter.models.decoder.weights import BlockTensor, decoder_rules

__all__ = [
    "BlockTensor",
    "DecoderConfig",
    "DecoderLmHeadModel",
    "PatternedConfig",
    "Run",
    "WindowedConfig",
    "decoder_rules",
    "scan_runs",
]

export_on_demand(__name__)
