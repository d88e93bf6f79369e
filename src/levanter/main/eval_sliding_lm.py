"""Asks a model to continue the prompts of a prepared set, row by row: how likely is exactly what follows?"""

import sys

from levanter.commands.memorize.eval_sliding_lm import EvalSlidingLmConfig, describe, execute, main
from levanter.commands.shell.entry import run_entry_point

__all__ = ["EvalSlidingLmConfig", "describe", "execute", "main"]

if __name__ == "__main__":
    sys.exit(run_entry_point(EvalSlidingLmConfig, main))
