"""Writes a report on finished memorization runs: one run, or several compared, with thresholds from control texts."""

import sys

from levanter.commands.memorize.memorization_report import main, run

__all__ = ["main", "run"]

if __name__ == "__main__":
    sys.exit(run())
