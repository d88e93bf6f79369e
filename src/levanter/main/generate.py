"""Generates text for a file of prompts: JSON lines in, JSON lines out."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.generate.config import GenerateConfig
    from levanter.commands.generate.generate import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "GenerateConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("generate"))
