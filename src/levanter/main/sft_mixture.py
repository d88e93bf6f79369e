"""Fine-tunes on a mixture of sets of conversations; not here yet: read, then refused (see `levanter.legacy.absent`)."""

import sys

from levanter.legacy.absent import run_absent

if __name__ == "__main__":
    sys.exit(run_absent("sft_mixture"))
