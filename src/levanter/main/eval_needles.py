"""What a model finds of what was hidden in long texts: by task, length and depth, with a page."""

from typing import TYPE_CHECKING

from haliax_ext.on_demand import export_on_demand
from levanter.commands.shell.door import enter, leave

if TYPE_CHECKING:
    from levanter.commands.evaluate.eval_needles import ENTRY_POINT, describe, execute, main
    from levanter.commands.evaluate.needles_config import EvalNeedlesConfig

__all__ = ["ENTRY_POINT", "EvalNeedlesConfig", "describe", "execute", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    leave(enter("eval_needles"))
