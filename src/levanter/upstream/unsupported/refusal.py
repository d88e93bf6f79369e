"""Runs an upstream entry point that is not implemented yet: its document is read and checked, then it is refused."""

import sys
from collections.abc import Sequence

from levanter.commands.cli.errors import shell
from levanter.config import load_written
from levanter.io import setup_logging
from levanter.upstream.unsupported.entry_points import ABSENT


class AbsentEntryPointError(ValueError):
    """The requested entry point is not implemented yet."""


def run_absent(name: str, argv: Sequence[str] | None = None) -> int:
    """Reads the configuration of an absent entry point, then refuses to run it.

    Returns:
        The exit code: 0 for `--help`, else 2.
    """
    row = ABSENT[name]

    def refuse() -> int:
        setup_logging()
        load_written(row.config, sys.argv[1:] if argv is None else argv, program=f"python -m levanter.main.{name}")
        raise AbsentEntryPointError(
            f"levanter.main.{name} is not implemented yet ({row.what}); the configuration was read and is valid\n"
            f"today: {row.instead}"
        )

    return shell(refuse)
