"""The command line of an entry point: parses the configuration first and imports JAX only for a run.

Neither `python -m levanter.main.eval_lm --help` nor an invalid configuration imports JAX or a model.
"""

import sys
import time
from collections.abc import Sequence

from levanter.commands.catalog import ENTRY_POINTS, collection_paused
from levanter.commands.cli.errors import shell
from levanter.commands.cli.lifecycle import exit_process as exit_process
from levanter.commands.cli.signals import interrupts_deferred
from levanter.config import load_written
from levanter.io import setup_logging


def run_command(name: str, argv: Sequence[str] | None = None) -> int:
    """Runs a listed entry point as a process, from the command line to the exit code.

    Args:
        name: name of the entry point.
        argv: the command line without the program's name; None for this process's.
    """
    ref, began = ENTRY_POINTS[name], time.time()

    def run_command_line() -> int:
        setup_logging()
        words = list(sys.argv[1:] if argv is None else argv)
        loaded = load_written(ref.config_class(), words, program=f"python -m levanter.main.{name}")
        # Importing JAX takes seconds, and its C++ modules abort if an import is interrupted.
        with interrupts_deferred(), collection_paused():
            from levanter.commands.cli.runner import run_config

            entry_point = ref.load()
        return run_config(entry_point, loaded.config, written=loaded.written, began=began).exit_code

    return shell(run_command_line)
