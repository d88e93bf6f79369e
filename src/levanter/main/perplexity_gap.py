"""Compares two models on the same bytes, with any tokenizers: bits per byte, and an HTML page of the differences."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.evaluate.gap.config import GapModelConfig, PerplexityGapConfig
    from levanter.commands.evaluate.gap.run import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "GapModelConfig", "PerplexityGapConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("perplexity_gap"))
