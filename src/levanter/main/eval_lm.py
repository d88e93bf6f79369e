"""Evaluates a language model on text: loss, perplexity and bits per byte, per data set and per tag."""

import sys

from levanter.commands.evaluate.eval_lm import ENTRY_POINT, EvalLmConfig, describe, execute, main
from levanter.commands.shell.perform import run

__all__ = ["ENTRY_POINT", "EvalLmConfig", "describe", "execute", "main"]

if __name__ == "__main__":
    sys.exit(run(ENTRY_POINT))
