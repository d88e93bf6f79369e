"""Evaluates a model on lm-evaluation-harness tasks: multiple choice, log-likelihood and generation."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.harness.config import EvalHarnessConfig
    from levanter.commands.harness.eval_harness import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "EvalHarnessConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("eval_harness"))
