"""Another name of `eval_careless_lm`, for documents with several `books:`: one load of the model serves them all."""

import sys

from levanter.main.entry import run_entry_point
from levanter.main.eval_careless_lm import EvalCarelessLmConfig, describe, execute, main

__all__ = ["EvalCarelessLmConfig", "describe", "execute", "main"]

if __name__ == "__main__":
    sys.exit(run_entry_point(EvalCarelessLmConfig, main))
