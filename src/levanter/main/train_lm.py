"""Trains a language model."""

import sys

from levanter.commands.shell.entry import run_entry_point
from levanter.commands.train.train_lm import TrainLmConfig, describe, execute, main

__all__ = ["TrainLmConfig", "describe", "execute", "main"]

if __name__ == "__main__":
    sys.exit(run_entry_point(TrainLmConfig, main))
