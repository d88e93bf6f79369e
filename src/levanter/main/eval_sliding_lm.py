"""Asks a model to continue the prompts of a prepared set, row by row: how likely is exactly what follows?"""

import sys

from levanter.commands.memorize.eval_sliding_lm import ENTRY_POINT, EvalSlidingLmConfig, describe, execute, main
from levanter.commands.shell.perform import run

__all__ = ["ENTRY_POINT", "EvalSlidingLmConfig", "describe", "execute", "main"]

if __name__ == "__main__":
    sys.exit(run(ENTRY_POINT))
