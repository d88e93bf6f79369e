"""Evaluates a language model on text: loss, perplexity and bits per byte, per data set and per tag."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.evaluate.config import EvalLmConfig
    from levanter.commands.evaluate.eval_lm import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "EvalLmConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("eval_lm"))
