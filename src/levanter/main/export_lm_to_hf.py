"""Exports one of our checkpoints as a Hugging Face folder: config, weights, tokenizer, generation config."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.export.config import ConvertLmConfig
    from levanter.commands.export.export_lm_to_hf import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "ConvertLmConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("export_lm_to_hf"))
