"""Memory that is resident on a device while a Program of a training run executes, but is none of its inputs.

The training state and the frozen parameters are on the devices throughout the run. A step takes all of them;
evaluation takes the parameters while the optimizer's statistics stay in memory; an export takes one array at a time
while all others stay.
"""

from collections.abc import Iterable, Mapping

from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import ShardingPlan
from haliax_ext.program import Program
from levanter.commands.train.dpo.evaluation import PROGRAM as EVALUATE_PAIRS
from levanter.commands.train.dpo.setup import SCORE, Preferences
from levanter.commands.train.lm.evaluation import PROGRAM as EVALUATE
from levanter.commands.train.task import BetweenSteps
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
    between_steps: Iterable[BetweenSteps] = (),
    pairs: Preferences | None = None,
) -> Mapping[str, int]:
    """Bytes on a device that are resident during each Program but no inputs of it, by the Program's name.

    Args:
        plan: the placement of the state and of the frozen parameters.
        computing: the Programs of the work.
        saving: those of checkpoints and exports.
        between_steps: the work between steps, whose Programs are among `computing`.
        pairs: the setup of preference training; None for training on text.
    """
    # `resident` is state plus frozen parameters, `whole` the state alone.
    resident = plan.resident.bytes_per_device
    frozen = resident - plan.whole.bytes_per_device
    parameters = plan.parameters.bytes_per_device
    if plan.adapters is not None:
        # A parameter with a whole copy is computed with the copy; the base's own array is no part of the bound model.
        copied = set(leaf_paths(plan.adapters.whole))
        parameters -= sum(leaf.bytes_per_device for leaf in plan.loaded.leaves if leaf.leaf.path in copied)
    known = {
        # The frozen part is made or loaded first and stays while the state is initialized.
        "init_state": frozen,
        INIT: frozen,
        # Of the loaded arrays, the trained ones are inputs here (they become the state), the frozen ones are not.
        "init_optimizer": frozen,
        DIGEST: resident - frozen,
        EVALUATE: resident - parameters,
    }
    nbytes_by_program = {program.name: known[program.name] for program in computing if program.name in known}
    for program in computing:
        if program.name == INIT and any(leaf.name == COPIED for leaf in program.inputs):
            taken = program_residents(program, plan.parameters.mesh)
            # The base's arrays of which INIT makes copies are its inputs, so they are not counted as coresident too.
            nbytes_by_program[INIT] -= sum(leaf.nbytes for leaf in taken if leaf.path.startswith(f"{COPIED}."))
    second = 0
    if pairs is not None and pairs.model is not None and pairs.model.load is not None:
        load, stays = pairs.model.load, pairs.resident is not None
        second = pairs.model.plan.bytes_per_device if stays else 0
        # A reference that stays is loaded after the state; a precomputed one is loaded, used and dropped before
        # anything else.
        already = loading_coresident_bytes(load)
        state_bytes = resident if stays else 0
        # Programs that run while the reference stays, without taking it.
        grows = [name for name in nbytes_by_program if name in (EVALUATE, DIGEST)]
        nbytes_by_program |= {name: nbytes_by_program[name] + second for name in grows}
        nbytes_by_program |= {program.name: state_bytes + already.get(program.name, 0) for program in load.programs}
    for program in computing:
        if program.name == EVALUATE_PAIRS:
            # With stored log-probabilities the pairs are scored by the policy alone, and a resident reference is no
            # input.
            unused = second if pairs is not None and pairs.evaluates_alone else 0
            nbytes_by_program[program.name] = resident - frozen - trained_parameter_bytes(plan) + unused
        elif program.name == SCORE and pairs is not None and pairs.kind != "precomputed":
            # The base of adapters is part of `resident` and an input here; a second model is counted in its own plan.
            nbytes_by_program[program.name] = resident - (frozen if pairs.kind == "adapter_base" else 0)
    for part in between_steps:
        for program in part.programs:
            rest = resident + second - resident_input_bytes(program, plan.parameters.mesh)
            nbytes_by_program[program.name] = rest + part.coresident.get(program.name, 0)
    for program in saving:
        taken = sum(leaf.nbytes for leaf in program_residents(program, plan.parameters.mesh))
        # What the Program takes is subtracted. It may take arrays that are not resident, hence the cut at zero.
        nbytes_by_program[program.name] = max(resident + second - taken, 0)
    return {name: nbytes for name, nbytes in nbytes_by_program.items() if nbytes}


def resident_input_bytes(program: Program, mesh: MeshSpec) -> int:
    """Bytes on a device of the inputs that are placed by a `ShardingPlan`: resident parameters, not rows of data."""
    resident = {argument.name for argument in program.inputs if isinstance(argument.placement, ShardingPlan)}
    arrays = program_residents(program, mesh)
    return sum(array.nbytes for array in arrays if array.path.partition(".")[0] in resident)


def trained_parameter_bytes(plan: StatePlan) -> int:
    """Bytes on a device of the parameters that are trained."""
    planned_leaves = plan.parameters.leaves
    return sum(planned.bytes_per_device for planned in planned_leaves if planned.leaf.path not in plan.frozen)
