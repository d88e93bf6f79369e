"""Fine-tunes on conversations or pairs: `train_lm`, which reads upstream's `sft` documents, too."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import enter, leave

if TYPE_CHECKING:
    from levanter.commands.train.lm.sft_config import SftConfig
    from levanter.commands.train.lm.train_lm import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "SftConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    leave(enter("sft"))
