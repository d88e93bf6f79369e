"""The command line of an entry point: parses the configuration first and imports JAX only for a run.

Neither `python -m levanter.main.eval_lm --help` nor an invalid configuration imports JAX or a model.
"""

import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from levanter.commands.catalog import ENTRY_POINTS, collection_paused
from levanter.commands.cli.errors import shell
from levanter.commands.cli.lifecycle import exit_process as exit_process
from levanter.commands.cli.signals import interrupts_deferred
from levanter.commands.guides import GROUPS, GUIDES, Guide
from levanter.config import Loaded, load_written
from levanter.config.help import first_steps
from levanter.io import setup_logging


class NoConfigurationError(ValueError):
    """A command was given nothing at all; the message says how to begin."""


class MissingExtraError(ValueError):
    """Packages of an extra are not installed."""


def load_command_line(name: str, words: Sequence[str], *, program: str) -> Loaded[Any]:
    """The configuration of a listed entry point; help begins with its guide.

    Args:
        name: name of the entry point.
        words: the command line without the program's name.
        program: what a user types before these words.

    Raises:
        NoConfigurationError: there are no words: no run works with defaults alone, and its errors explain nothing.
        ConfigError: with everything that is wrong.
        HelpRequested: with the help text.
    """
    config_class, guide = ENTRY_POINTS[name].config_class(), GUIDES.get(name, Guide(GROUPS[-1]))
    if not words:
        steps = first_steps(config_class, program=program, common=guide.keys, example=guide.example)
        raise NoConfigurationError(steps)
    # A file of keys without its flag is left to the parser, which says which flag it needs.
    if guide.first_word and not words[0].startswith("-") and not words[0].endswith((".yaml", ".yml")):
        words = [f"--{guide.first_word}={words[0]}", *words[1:]]
    return load_written(config_class, list(words), program=program, common=guide.keys, example=guide.example)


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
        loaded = load_command_line(name, words, program=f"python -m levanter.main.{name}")
        guide = GUIDES[name]
        # Before the model is described, which takes seconds to minutes.
        if missing := [package for package in guide.packages if find_spec(package) is None]:
            from levanter.io.package_version import DISTRIBUTION

            raise MissingExtraError(
                f"{name} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed\n"
                f"  → pip install '{DISTRIBUTION}[{guide.extra}]'"
            )
        # Importing JAX takes seconds, and its C++ modules abort if an import is interrupted.
        with interrupts_deferred(), collection_paused():
            from levanter.commands.cli.runner import run_config

            entry_point = ref.load()
        return run_config(entry_point, loaded.config, written=loaded.written, began=began).exit_code

    return shell(run_command_line)
