"""Writes a page that shows some validation text token by token, each as dark as the model was surprised by it."""

import sys

from levanter.commands.evaluate.viz_logprobs import VizLmConfig, describe, execute, main
from levanter.commands.shell.entry import run_entry_point

__all__ = ["VizLmConfig", "describe", "execute", "main"]

if __name__ == "__main__":
    sys.exit(run_entry_point(VizLmConfig, main))
