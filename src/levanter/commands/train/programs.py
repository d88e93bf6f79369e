"""The Programs of a training run: its first state and its steps; what is on the devices while each Program runs.

The training state and the frozen parameters are on the devices throughout the run. A step takes all of them;
evaluation takes the parameters while the optimizer's statistics stay in memory; an export takes one array at a time
while all others stay.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import haliax as hax
import jax

from haliax_ext.abstract import leaves
from haliax_ext.planner import ShardingPlan
from haliax_ext.program import Program
from levanter.commands.model.workloads import WATCHED, distinct_stages, program_name
from levanter.commands.train.task import BetweenSteps
from levanter.commands.train.trained_run import TrainedRun
from levanter.plan.hbm_budget import program_residents
from levanter.plan.load_budget import loading_coresident_bytes
from levanter.trainer.adapter_state import COPIED, INIT, init_base_program
from levanter.trainer.batch_plan import BatchPlan, BatchStage
from levanter.trainer.frozen_identity import DIGEST, digest_program
from levanter.trainer.reinit_rows import unchanged
from levanter.trainer.state import init_frozen_program, init_optimizer_program, init_program
from levanter.trainer.step import StepRecipe, step_program
from levanter.trainer.watch import Watch


def first_programs(run: TrainedRun) -> list[Program]:
    """The Programs that create the first state and the frozen part, or the parts of them that are not loaded."""
    plan, partition, averaging = run.state_plan, run.partition, run.config.trainer.model_averaging
    if run.adapted is not None:
        base = init_base_program(plan, run.build, run.adapted.base_dtype(run.precision))
        # With a checkpoint the base is loaded by the load plan, and no Program initializes it.
        first = [] if run.config.pretrained is not None else [base]
        if run.adapted.config.initialize_from is None:
            first.append(run.adapted.init_program(plan, run.transformation, averaging, base=run.frozen))
        else:
            first.append(run.adapted.begin_program(run.state, plan, run.transformation, averaging))
    elif run.config.pretrained is not None:
        # Rows of `reinit_tokens` are replaced in the Program that takes the loaded parameters.
        renewed = unchanged if run.renewed is None else run.renewed
        first = [init_optimizer_program(run.state, plan, run.transformation, averaging, renewed)]
    else:
        first = [init_program(plan, run.build, run.transformation, run.precision, partition, averaging)]
        if run.frozen is not None:
            first.append(init_frozen_program(plan, run.build, run.precision, partition))
    # Checkpoints identify the frozen part by a digest of each array; this Program computes them on the devices.
    if run.frozen is not None:
        first.append(digest_program(run.frozen, plan))
    return [replace(program, compiler_options=run.compiler.default) for program in first]


def step_programs(run: TrainedRun, batches: tuple[BatchStage, ...]) -> list[Program]:
    """One train step per batch size; if histograms are watched, a second one of each with them."""
    watch = Watch.of(run.config.trainer.watch)
    # The cheap statistics are in every step. A second step with histograms is compiled only if some are watched.
    steps = [_step(run, stage, None if watch is None else watch.cheap) for stage in distinct_stages(batches)]
    if watch is not None and watch.histograms:
        steps += [_step(run, stage, watch, WATCHED) for stage in distinct_stages(batches)]
    return steps


def _recipe(run: TrainedRun, batches: BatchPlan, watch: Watch | None) -> StepRecipe[Any]:
    trainer, optimizer = run.config.trainer, run.config.optimizer
    return StepRecipe(
        # The head's chunk is chosen for this stage's microbatch; stages of a batch schedule may need different ones.
        objective=run.objective.in_chunks(run.head(batches.microbatch).chunk),
        optimizer=run.transformation,
        schedule=optimizer.schedule(trainer.num_train_steps),
        precision=run.precision,
        accumulation=batches.accumulation,
        parameters=run.state_plan.parameters,
        # Of several models, the placement has paths such as `policy.…`.
        model=run.models.model_plan(run.state_plan),
        bind=run.models.bind,
        skip_nonfinite=trainer.skip_nonfinite_steps > 0,
        averaging=trainer.model_averaging,
        curvature=optimizer.curvature,
        outliers=optimizer.outliers,
        watch=watch,
        # XLA for CPUs does not order a read of a donated array before its write; see `StepRecipe`.
        norms_first=run.platform == "cpu",
        # The compiler of jax 0.10 needs no such form for the norms, and its kept figures are without it.
        norms_fused=run.platform == "tpu" and jax.__version_info__ >= (0, 11),
        # Only dropout of adapters needs random bits, and a step without it carries none.
        draws=run.adapted is not None and run.adapted.config.dropout > 0,
    )


def _step(run: TrainedRun, stage: BatchStage, watch: Watch | None, suffix: str = "") -> Program:
    # A separate reference is an input of the step; the base of adapters already is one, as `frozen`.
    second = run.models.resident
    return step_program(
        _recipe(run, stage.plan, watch),
        state=run.state,
        frozen=run.frozen,
        reference=None if second is None else second.module,
        reference_plan=None if second is None else second.plan,
        plan=run.state_plan,
        batch=run.objective.abstract_batch(
            # `placed_rows` includes the padding rows of a batch that does not divide over the devices.
            hax.Axis(run.resolved.batch_axis, stage.plan.placed_rows),
            hax.Axis("position", run.config.positions),
        ),
        mappings=run.resolved.mappings,
        name=program_name(stage) + suffix,
        compiler_options=run.compiler.working["train"],
    )


def coresident_bytes(
    run: TrainedRun, computing: Iterable[Program], saving: Iterable[Program], between_steps: Iterable[BetweenSteps]
) -> Mapping[str, int]:
    """Bytes on a device that are resident during each Program but no inputs of it, by the Program's name.

    Args:
        run: the training run.
        computing: the Programs of the work.
        saving: those of checkpoints and exports.
        between_steps: the work between steps, whose Programs are among `computing`.
    """
    plan, second = run.state_plan, run.models.resident
    mesh = plan.parameters.mesh
    # `resident` is state plus frozen parameters, `whole` the state alone.
    state_and_frozen = plan.resident.bytes_per_device
    frozen = state_and_frozen - plan.whole.bytes_per_device
    everything = state_and_frozen + (0 if second is None else second.plan.bytes_per_device)
    nbytes: dict[str, int] = {}
    for program in computing:
        # The frozen part is made or loaded first and stays while the state is initialized. Of the loaded arrays, the
        # trained ones are inputs of `init_optimizer` (they become the state), the frozen ones are not.
        if program.name in ("init_state", "init_optimizer", INIT):
            # The base's arrays of which INIT makes copies are its inputs, so they are not counted as coresident too.
            taken = [leaf for leaf in program_residents(program, mesh) if leaf.path.startswith(f"{COPIED}.")]
            nbytes[program.name] = frozen - sum(leaf.nbytes for leaf in taken)
        elif program.name == DIGEST:
            nbytes[program.name] = everything - frozen
    for work in between_steps:
        for program in work.programs:
            rest = everything - _resident_input_bytes(program)
            nbytes[program.name] = rest + work.coresident.get(program.name, 0)
    if run.models.reference is not None and (load := run.models.reference.load) is not None:
        # A second model that stays is loaded after the state; another one is loaded, used and dropped before
        # anything else.
        already = loading_coresident_bytes(load)
        before = 0 if second is None else state_and_frozen
        nbytes |= {program.name: before + already.get(program.name, 0) for program in load.programs}
    for program in saving:
        taken_bytes = sum(leaf.nbytes for leaf in program_residents(program, mesh))
        # What the Program takes is subtracted. It may take arrays that are not resident, hence the cut at zero.
        nbytes[program.name] = max(everything - taken_bytes, 0)
    return {name: size for name, size in nbytes.items() if size}


def _resident_input_bytes(program: Program) -> int:
    """Bytes on a device of the inputs that are placed by a `ShardingPlan`: resident parameters, not rows of data."""
    return sum(
        argument.placement.by_path[leaf.path].bytes_per_device
        for argument in program.inputs
        if isinstance(argument.placement, ShardingPlan)
        for leaf in leaves(argument.value)
    )
