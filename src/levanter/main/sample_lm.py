"""Samples from a model; not here yet: read, then refused (see `levanter.main.absent`)."""

import sys

from levanter.main.absent import run_absent

if __name__ == "__main__":
    sys.exit(run_absent("sample_lm"))
