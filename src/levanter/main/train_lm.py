"""Trains a language model."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.train.config import TrainLmConfig
    from levanter.commands.train.lm.train_lm import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "TrainLmConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("train_lm"))
