"""Evaluates a language model on text: loss, perplexity and bits per byte, per data set and per tag."""

import sys

from levanter.commands.evaluate.eval_lm import EvalLmConfig, describe, execute, main
from levanter.commands.shell.entry import run_entry_point

__all__ = ["EvalLmConfig", "describe", "execute", "main"]

if __name__ == "__main__":
    sys.exit(run_entry_point(EvalLmConfig, main))
