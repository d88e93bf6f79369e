"""Fine-tunes on a mixture of data sets: `train_lm`, which also reads upstream's `sft_mixture` documents."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.train.lm.sft_config import SftMixtureConfig
    from levanter.commands.train.lm.train_lm import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "SftMixtureConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("sft_mixture"))
