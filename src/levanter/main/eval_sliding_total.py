"""Another name of `eval_careless_lm`, for documents with several `books:`: one load of the model serves them all."""

import sys

from levanter.commands.memorize.eval_careless_lm import ENTRY_POINT, EvalCarelessLmConfig, describe, execute, main
from levanter.commands.shell.perform import run

__all__ = ["ENTRY_POINT", "EvalCarelessLmConfig", "describe", "execute", "main"]

if __name__ == "__main__":
    sys.exit(run(ENTRY_POINT))
