"""Trains low-rank adapters of a pretrained language model on preference pairs."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.train.dpo.lora_config import LoraDpoConfig
    from levanter.commands.train.dpo.lora_dpo import ENTRY_POINT, describe, main

__all__ = ["ENTRY_POINT", "LoraDpoConfig", "describe", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("lora_dpo"))
