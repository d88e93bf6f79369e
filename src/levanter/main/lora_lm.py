"""Trains low-rank adapters of a pretrained language model."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.train.lm.lora_config import LoraLmConfig
    from levanter.commands.train.lm.lora_lm import ENTRY_POINT, describe, main

__all__ = ["ENTRY_POINT", "LoraLmConfig", "describe", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("lora_lm"))
