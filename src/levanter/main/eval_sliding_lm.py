"""Measures memorization of prepared prompts, row by row: the probability of the exact suffix."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.memorize.eval_sliding_lm import ENTRY_POINT, describe, execute, main
    from levanter.commands.memorize.sliding_config import EvalSlidingLmConfig

__all__ = ["ENTRY_POINT", "EvalSlidingLmConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("eval_sliding_lm"))
