"""What stays on a device while a Program of a training run works, and is none of what it takes.

The state of a run, and what is frozen, lie on the devices from beginning to end. A step takes all of it; evaluation
takes the parameters, and the optimizer's statistics stay beside them; an export takes one array at a time, and all
others stay.
"""

from collections.abc import Iterable, Mapping

from haliax_ext.program import Program
from levanter.commands.train.evaluation import PROGRAM as EVALUATE
from levanter.plan.budget import residents_of
from levanter.trainer.frozen import DIGEST
from levanter.trainer.state import StatePlan


def bytes_beside(plan: StatePlan, computing: Iterable[Program], saving: Iterable[Program]) -> Mapping[str, int]:
    """By Program, bytes on a device of what is there and not taken.

    Args:
        plan: where the state and what is frozen lie.
        computing: the Programs of the work.
        saving: those of checkpoints and exports.
    """
    resident = plan.resident.bytes_per_device
    frozen = resident - plan.whole.bytes_per_device
    parameters = plan.parameters.bytes_per_device
    known = {
        # Made first, and what is trained is made beside it.
        "init_state": frozen,
        "init_adapters": frozen,
        # What was loaded is frozen, or becomes the state.
        "init_optimizer": frozen,
        DIGEST: resident - frozen,
        EVALUATE: resident - parameters,
    }
    found = {program.name: known[program.name] for program in computing if program.name in known}
    for program in saving:
        taken = sum(each.nbytes for each in residents_of(program, plan.parameters.mesh))
        found[program.name] = max(resident - taken, 0)
    return {name: nbytes for name, nbytes in found.items() if nbytes}
