"""Writes a page that shows some validation text token by token, each as dark as the model was surprised by it."""

import sys

from levanter.commands.evaluate.viz_logprobs import ENTRY_POINT, VizLmConfig, describe, execute, main
from levanter.commands.shell.perform import run

__all__ = ["ENTRY_POINT", "VizLmConfig", "describe", "execute", "main"]

if __name__ == "__main__":
    sys.exit(run(ENTRY_POINT))
