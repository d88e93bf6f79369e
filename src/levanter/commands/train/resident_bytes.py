"""What stays on a device while a Program of a training run works, and is none of what it takes.

The state of a run, and what is frozen, lie on the devices from beginning to end. A step takes all of it; evaluation
takes the parameters, and the optimizer's statistics stay beside them; an export takes one array at a time, and all
others stay.
"""

from collections.abc import Iterable, Mapping

from haliax_ext.program import Program
from levanter.commands.train.dpo.evaluation import PROGRAM as EVALUATE_PAIRS
from levanter.commands.train.dpo.setup import SCORE, Preferences
from levanter.commands.train.lm.evaluation import PROGRAM as EVALUATE
from levanter.eval.harness.packing import PROGRAM_PREFIX
from levanter.models.adapters.whole import leaf_paths
from levanter.plan.hbm_budget import program_residents
from levanter.plan.load_budget import loading_coresident_bytes
from levanter.trainer.adapter_state import COPIED, INIT
from levanter.trainer.frozen_identity import DIGEST
from levanter.trainer.state import StatePlan


def coresident_bytes(
    plan: StatePlan,
    computing: Iterable[Program],
    saving: Iterable[Program],
    pairs: Preferences | None = None,
) -> Mapping[str, int]:
    """By Program, bytes on a device of what is there and not taken.

    Args:
        plan: where the state and what is frozen lie.
        computing: the Programs of the work.
        saving: those of checkpoints and exports.
        pairs: what pairs are learned from with; None where text is.
    """
    resident = plan.resident.bytes_per_device
    frozen = resident - plan.whole.bytes_per_device
    parameters = plan.parameters.bytes_per_device
    if plan.adapters is not None:
        # What has a copy is no part of the model that is computed with.
        copied = set(leaf_paths(plan.adapters.whole))
        parameters -= sum(leaf.bytes_per_device for leaf in plan.loaded.leaves if leaf.leaf.path in copied)
    known = {
        # Made first, and what is trained is made beside it.
        "init_state": frozen,
        INIT: frozen,
        # What was loaded is frozen, or becomes the state.
        "init_optimizer": frozen,
        DIGEST: resident - frozen,
        EVALUATE: resident - parameters,
    }
    nbytes_by_program = {program.name: known[program.name] for program in computing if program.name in known}
    for program in computing:
        if program.name == INIT and any(leaf.name == COPIED for leaf in program.inputs):
            taken = program_residents(program, plan.parameters.mesh)
            nbytes_by_program[INIT] -= sum(leaf.nbytes for leaf in taken if leaf.path.startswith(f"{COPIED}."))
    # The harness's Programs take what an evaluation takes.
    nbytes_by_program |= {
        leaf.name: resident - parameters for leaf in computing if leaf.name.startswith(PROGRAM_PREFIX)
    }
    second = 0
    if pairs is not None and pairs.model is not None and pairs.model.load is not None:
        load, stays = pairs.model.load, pairs.resident is not None
        second = pairs.model.plan.bytes_per_device if stays else 0
        # Loaded last, where it stays; else before anything.
        already = loading_coresident_bytes(load)
        state_bytes = resident if stays else 0
        grows = (name for name in nbytes_by_program if name in (EVALUATE, DIGEST) or name.startswith(PROGRAM_PREFIX))
        nbytes_by_program |= {name: nbytes_by_program[name] + second for name in grows}
        nbytes_by_program |= {program.name: state_bytes + already.get(program.name, 0) for program in load.programs}
    for program in computing:
        if program.name == EVALUATE_PAIRS:
            unused = second if pairs is not None and pairs.evaluates_alone else 0
            nbytes_by_program[program.name] = resident - frozen - trained_parameter_bytes(plan) + unused
        elif program.name == SCORE and pairs is not None and pairs.kind != "precomputed":
            # The base of adapters is a part of what is resident, a second model is beside it.
            nbytes_by_program[program.name] = resident - (frozen if pairs.kind == "adapter_base" else 0)
    for program in saving:
        taken = sum(leaf.nbytes for leaf in program_residents(program, plan.parameters.mesh))
        nbytes_by_program[program.name] = max(resident + second - taken, 0)
    return {name: nbytes for name, nbytes in nbytes_by_program.items() if nbytes}


def trained_parameter_bytes(plan: StatePlan) -> int:
    """Bytes on a device of the parameters that are trained."""
    planned_leaves = plan.parameters.leaves
    return sum(planned.bytes_per_device for planned in planned_leaves if planned.leaf.path not in plan.frozen)
