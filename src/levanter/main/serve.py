"""Serves a model over HTTP for OpenAI clients (`python -m levanter.main.plan serve` plans it)."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.serve.config import ServeConfig
    from levanter.commands.serve.serve import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "ServeConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("serve"))
