"""Runs the tasks of the evaluation harness; not here yet: read, then refused (see `levanter.legacy.absent`)."""

import sys

from levanter.legacy.absent import run_absent

if __name__ == "__main__":
    sys.exit(run_absent("eval_harness"))
