"""nanochat's own checkpoints: folders of torch files, read without executing a pickle, and written."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand

if TYPE_CHECKING:
    from levanter.compat.nanochat.checkpoint import (
        NanochatFolder,
        NanochatSource,
        is_nanochat_folder,
        open_nanochat,
        write_nanochat,
    )

__all__ = ["NanochatFolder", "NanochatSource", "is_nanochat_folder", "open_nanochat", "write_nanochat"]

export_on_demand(__name__)
