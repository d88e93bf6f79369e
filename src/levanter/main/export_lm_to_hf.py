"""Writes a checkpoint of ours as a Hugging Face folder: config, weights, tokenizer, generation config."""

import sys

from levanter.commands.export.export_lm_to_hf import ENTRY_POINT, ConvertLmConfig, describe, execute, main
from levanter.commands.shell.perform import run

__all__ = ["ENTRY_POINT", "ConvertLmConfig", "describe", "execute", "main"]

if __name__ == "__main__":
    sys.exit(run(ENTRY_POINT))
