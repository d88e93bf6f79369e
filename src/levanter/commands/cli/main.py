"""The door of an entry point: the configuration is read first, and only a run imports what it needs.

Neither `python -m levanter.main.eval_lm --help` nor a document with a mistake needs JAX or a model.
"""

import sys
from collections.abc import Sequence

from levanter.commands.catalog import ENTRY_POINTS
from levanter.commands.cli.errors import shell
from levanter.commands.cli.lifecycle import leave as leave
from levanter.commands.cli.signals import interrupts_wait
from levanter.config import load_written
from levanter.io import setup_logging


def enter(name: str, argv: Sequence[str] | None = None) -> int:
    """Runs a listed entry point as a process, from the command line to the exit code.

    Args:
        name: the entry point's.
        argv: the command line without the program's name; None for this process's.
    """
    listed = ENTRY_POINTS[name]

    def of_command_line() -> int:
        setup_logging()
        words = list(sys.argv[1:] if argv is None else argv)
        loaded = load_written(listed.config_class(), words, program=f"python -m levanter.main.{name}")
        # Importing JAX and the like takes seconds.
        with interrupts_wait():
            from levanter.commands.cli.runner import perform

            entry_point = listed.load()
        return perform(entry_point, loaded.config, written=loaded.written).exit_code

    return shell(of_command_line)
