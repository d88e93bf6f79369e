"""From a depth to a chat model: every number with its reason, hours and dollars on a pod, and the documents."""

import sys

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.recipe.recipe import RecipeConfig, main

__all__ = ["RecipeConfig", "main"]

if __name__ == "__main__":
    sys.exit(run_entry_point(RecipeConfig, main))
