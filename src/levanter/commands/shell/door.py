"""The door of an entry point: a configuration is read first, and only a run imports what runs.

`python -m levanter.main.eval_lm --help`, and a document with a mistake, need neither JAX nor a model.
"""

import sys
from collections.abc import Sequence

from levanter.commands.catalog import ENTRY_POINTS
from levanter.commands.shell.entry import shell
from levanter.commands.shell.interrupts import interrupts_wait
from levanter.config import load_written
from levanter.io import setup_logging


def enter(name: str, argv: Sequence[str] | None = None) -> int:
    """Makes a process of a listed entry point: from the words of a command line to the exit code.

    Args:
        name: the entry point's.
        argv: the command line without the program's name; None for this process's.
    """
    listed = ENTRY_POINTS[name]

    def of_command_line() -> int:
        setup_logging()
        words = list(sys.argv[1:] if argv is None else argv)
        loaded = load_written(listed.config_class(), words, program=f"python -m levanter.main.{name}")
        # Importing JAX and its kin takes seconds.
        with interrupts_wait():
            from levanter.commands.shell.perform import perform

            entry_point = listed.load()
        return perform(entry_point, loaded.config, written=loaded.written).exit_code

    return shell(of_command_line)
