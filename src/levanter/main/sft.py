"""Fine-tunes on conversations or prompt/response pairs: `train_lm`, which also reads upstream's `sft` documents."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.train.lm.sft_config import SftConfig
    from levanter.commands.train.lm.train_lm import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "SftConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("sft"))
