"""Asks a model to continue a book, window by window: how much of it has the model memorized?"""

import sys

from levanter.commands.memorize.eval_careless_lm import ENTRY_POINT, EvalCarelessLmConfig, describe, execute, main
from levanter.commands.shell.perform import run

__all__ = ["ENTRY_POINT", "EvalCarelessLmConfig", "describe", "execute", "main"]

if __name__ == "__main__":
    sys.exit(run(ENTRY_POINT))
