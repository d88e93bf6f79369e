"""Builds the token caches of a training run in advance."""

import sys

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.tokenize.cache_dataset import CacheDatasetConfig, main

__all__ = ["CacheDatasetConfig", "main"]

if __name__ == "__main__":
    sys.exit(run_entry_point(CacheDatasetConfig, main))
