"""Alias of `eval_careless_lm`, for documents with several `books:`: the model is loaded once for all of them."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.memorize.config import EvalCarelessLmConfig
    from levanter.commands.memorize.eval_careless_lm import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "EvalCarelessLmConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("eval_sliding_total"))
