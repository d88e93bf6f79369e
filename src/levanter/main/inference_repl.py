"""Chats with a model at the terminal, with the keys and commands of upstream's `inference_repl`."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.generate.repl import ENTRY_POINT, describe, execute, main
    from levanter.commands.generate.repl_config import InferenceReplConfig

__all__ = ["ENTRY_POINT", "InferenceReplConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("inference_repl"))
