"""Translates upstream's YAML, old or new, to today's keys, and lists each change."""

import sys

from levanter.upstream.migrate import main, run

__all__ = ["main", "run"]

if __name__ == "__main__":
    sys.exit(run())
