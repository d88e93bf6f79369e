"""The state with which a training run begins, without the run."""

from typing import Any

from levanter.commands.train.initial_state import initial_state
from levanter.commands.train.task import Running
from levanter.runplan import Session


def state_of(plan: Any, mesh: Any, resumed: Any = None) -> Any:
    """The state before the first step, from a checkpoint or from the seed. Rows and folders have no part in it."""
    nothing: Any = None
    session = Session(run_id="state", show=False)
    running = Running(
        plan=plan, run=plan.work, mesh=mesh, session=session, dirs=nothing, resumed=resumed, rows=nothing, stop=0
    )
    return initial_state(running)[0]
