"""Writes an HTML page of validation text in which each token is shaded by its log-probability."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.evaluate.config import VizLmConfig
    from levanter.commands.evaluate.viz_logprobs import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "VizLmConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("viz_logprobs"))
