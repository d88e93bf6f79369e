"""RULER needle-in-a-haystack evaluation: accuracy by task, length and depth, with an HTML page."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand
from levanter.commands.cli.main import exit_process, run_command

if TYPE_CHECKING:
    from levanter.commands.evaluate.needles.config import EvalNeedlesConfig
    from levanter.commands.evaluate.needles.run import ENTRY_POINT, describe, execute, main

__all__ = ["ENTRY_POINT", "EvalNeedlesConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    exit_process(run_command("eval_needles"))
