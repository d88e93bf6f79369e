"""Trains a byte-level BPE tokenizer from text, with a report of its compression."""

import sys

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.train_tokenizer.train_tokenizer import TrainTokenizerConfig, main

__all__ = ["TrainTokenizerConfig", "main"]

if __name__ == "__main__":
    sys.exit(run_entry_point(TrainTokenizerConfig, main))
