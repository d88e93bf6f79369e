"""Samples from a model; not here yet: read, then refused (see `levanter.legacy.absent`)."""

import sys

from levanter.legacy.absent import run_absent

if __name__ == "__main__":
    sys.exit(run_absent("sample_lm"))
