"""Goes on with prompts: a file with a line of JSON for each goes in, a file with a line of JSON for each comes out."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import enter, leave

if TYPE_CHECKING:
    from levanter.commands.generate.config import GenerateConfig
    from levanter.commands.generate.generate import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "GenerateConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    leave(enter("generate"))
