"""Reports on finished memorization runs: one page for one run, several side by side, thresholds from control texts."""

import sys

from levanter.commands.memorize.memorization_report import main, run

__all__ = ["main", "run"]

if __name__ == "__main__":
    sys.exit(run())
