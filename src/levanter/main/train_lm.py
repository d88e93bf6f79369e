"""Trains a language model."""

import sys

from levanter.commands.shell.perform import run
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.train_lm import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "TrainLmConfig", "describe", "execute", "main"]

if __name__ == "__main__":
    sys.exit(run(ENTRY_POINT))
