"""Another name of `eval_careless_lm`, for documents with several `books:`: one load of the model serves them all."""

import sys

from levanter.commands.memorize.eval_careless_lm import EvalCarelessLmConfig, describe, execute, main
from levanter.commands.shell.entry import run_entry_point

__all__ = ["EvalCarelessLmConfig", "describe", "execute", "main"]

if __name__ == "__main__":
    sys.exit(run_entry_point(EvalCarelessLmConfig, main))
