"""Samples continuations of a few prompts and prints them, with the keys of upstream's `sample_lm`."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.generate.sample_config import SampleLmConfig
    from levanter.commands.generate.sample_lm import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "SampleLmConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("sample_lm"))
