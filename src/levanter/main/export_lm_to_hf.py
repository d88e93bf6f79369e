"""Writes a checkpoint of ours as a Hugging Face folder: config, weights, tokenizer, generation config."""

import sys

from levanter.commands.export.export_lm_to_hf import ConvertLmConfig, describe, execute, main
from levanter.commands.shell.entry import run_entry_point

__all__ = ["ConvertLmConfig", "describe", "execute", "main"]

if __name__ == "__main__":
    sys.exit(run_entry_point(ConvertLmConfig, main))
