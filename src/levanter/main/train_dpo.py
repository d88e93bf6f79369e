"""Trains a language model on preference pairs."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.train.dpo.config import TrainDpoConfig
    from levanter.commands.train.dpo.train_dpo import ENTRY_POINT, describe, main

__all__ = ["ENTRY_POINT", "TrainDpoConfig", "describe", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("train_dpo"))
