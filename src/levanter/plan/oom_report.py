"""Why a Program does not fit, in axis names: what takes the room on a chip, and the nearest mapping that fits.

A refusal has one of two causes. The *inputs* alone are more than a chip has: then arithmetic knows everything, each
array by its path, and the compiler need not be asked. Or what the Program makes *on the way* is too much: gradients,
kept activations, gathered weights. The compiler says how much that is, and only sometimes of what; the largest named
activations are then the best that can be said.

The compiler names its largest allocations by the path of a parameter (Programs take their inputs as dictionaries from
path to array) or by the operation that makes an activation. Both are put back into named axes here: an input by its
path, an activation by its shape, which is that of one of the plan's named activations on a chip, alone or one of each
layer (kept for the backward pass).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from haliax_ext.errors import gib, named_shape
from haliax_ext.hlo import Allocation, OutOfMemory, Shape
from haliax_ext.placement import LeafPlan
from haliax_ext.program import Program
from levanter.hardware import Accelerator, default_topologies, parse_accelerator
from levanter.inference.capacity import DecodeCost
from levanter.plan.aot import Refused
from levanter.plan.hbm_budget import Budget, Resident, by_group, gradient_bytes, program_residents, sharding_text
from levanter.plan.hbm_lower_bound import program_lower_bound
from levanter.plan.layout_memory import LayoutSubject, least_input_bytes, saved_copies, saved_names
from levanter.plan.suggestions import suggest_layout
from levanter.runplan import RunPlan
from levanter.trainer.state import OPTIMIZER

SHOWN = 5
LAYERS = "layers"
WORTH_NAMING = 0.01
"""A replicated array is named from this share of a chip's memory on."""


def explain_oom(
    refused: Refused | OutOfMemory | None, plan: RunPlan, budget: Budget, *, program: str | None = None
) -> tuple[str, ...]:
    """Lines that explain why a Program does not fit; none where neither what is known nor the compiler refuses it.

    They name the largest inputs with their bytes, what the compiler lists, the largest activations where it is not the
    inputs' fault, and last the nearest mapping that fits, as a line of YAML.

    Args:
        refused: what the compiler said; `None` where it was not asked.
        plan: what was compiled.
        budget: the inputs by arithmetic.
        program: which Program; by default the refused one, else the one with the largest inputs.
    """
    if isinstance(refused, Refused):
        refusal, program = refused.refusal, program or refused.name
    else:
        refusal = refused
    name = program or budget.largest
    limit = budget.hbm_bytes if refusal is None else refusal.available
    inputs = budget.arguments.get(name, 0)
    if not name or limit is None:
        return ()
    known = program_lower_bound(plan, name, hbm_bytes=limit)
    if refusal is None and max(inputs, known.total) <= limit:
        return ()
    program_ = plan.program(name)
    residents = budget.residents if name == budget.largest else program_residents(program_, plan.mesh)
    needed = inputs if refusal is None else max(inputs, refusal.needed)
    subject = LayoutSubject(plan=plan, program=program_, hbm_bytes=limit, compiled_temporaries=needed - inputs or None)
    if refusal is None and inputs <= limit:
        over = (
            f"{name} needs at least {gib(known.total)} on a chip, {gib(known.total - limit)} more than its {gib(limit)}"
        )
        headline = f"{over}: {known} (not compiled: without {known.lacking})"
    else:
        headline = _headline(program_, plan, inputs, needed, limit)
    lines = [headline, _groups(residents)]
    for allocation in () if refusal is None else refusal.allocations[:SHOWN]:
        lines.append(f"largest for the compiler: {gib(allocation.nbytes)} {_allocation(allocation, plan, residents)}")
    lines += [f"largest input: {_sized(r)}" for r in residents[:SHOWN]]
    whole = [r for r in residents[SHOWN:] if r.replicated and r.group != OPTIMIZER and r.nbytes > WORTH_NAMING * limit]
    lines += [f"also replicated: {_sized(r)}" for r in whole]
    if inputs <= limit:
        lines += _activations(subject)
    lines.append(_way_out(subject))
    return tuple(lines)


def _headline(program: Program, plan: RunPlan, inputs: int, needed: int, limit: int) -> str:
    over = f"{program.name} needs {gib(needed)} on a chip, {gib(needed - limit)} more than its {gib(limit)}"
    if needed == inputs:
        return f"{over}: its inputs alone"
    gradients = gradient_bytes(program, plan.mesh)
    of_it = f" ({gib(gradients)} of it gradients)" if gradients else ""
    return f"{over}: {gib(inputs)} of inputs, {gib(needed - inputs)} of temporaries{of_it}"


def _groups(residents: Sequence[Resident]) -> str:
    return "inputs: " + ", ".join(f"{group} {gib(nbytes)}" for group, nbytes in by_group(residents).items())


def _sized(resident: Resident) -> str:
    return f"{gib(resident.nbytes)} {_resident(resident)}"


def _resident(resident: Resident) -> str:
    cut = "replicated on every chip" if resident.replicated else f"{resident.spec}, of {gib(resident.whole_bytes)}"
    return f"{resident.path} {resident.dtype}{named_shape(resident.axes)}, {cut}"


def _allocation(allocation: Allocation, plan: RunPlan, residents: Sequence[Resident]) -> str:
    """What one of the compiler's allocations is: an input, a named activation, or whatever a module makes."""
    if path := re.search(r"\['([^']+)'\]", allocation.op_name):
        for resident in residents:
            if resident.path == path[1] or resident.path.endswith(f".{path[1]}"):
                return _resident(resident)
    where = f" in {allocation.scope.module} ({allocation.scope.during})" if allocation.op_name else ""
    if allocation.shape is None:
        return f"{allocation.kind or 'of its own'}{where}"
    shape = f"{allocation.shape.dtype}[{','.join(map(str, allocation.shape.sizes))}]"
    named = _activation(allocation.shape, plan)
    return f"{shape}{where}" + (f", the shape of {named}" if named else "")


def _activation(shape: Shape, plan: RunPlan) -> str:
    """The named activations that have this shape on a chip; those of equal shape together."""
    layers = {dict(leaf.leaf.axes)[LAYERS] for leaf in plan.sharding.leaves if LAYERS in leaf.leaf.names}
    wanted = _essential(shape.sizes)
    alone = [_named(a, plan) for a in plan.activations.leaves if _essential(a.shard_shape) == wanted]
    stacked = [
        f"{_named(a, plan)}, one of each of {count} layers"
        for a in plan.activations.leaves
        for count in sorted(layers)
        if _essential((count, *a.shard_shape)) == wanted
    ]
    return " or ".join((alone or stacked)[:3])


def _essential(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes without order and without ones, which the compiler moves about."""
    return tuple(sorted(size for size in sizes if size != 1))


def _named(activation: LeafPlan, plan: RunPlan) -> str:
    return f"{activation.leaf.path} {named_shape(activation.leaf.axes)}, {sharding_text(activation, plan.mesh)}"


def _activations(subject: LayoutSubject) -> Iterator[str]:
    """The largest named activations; what a backward pass keeps of each layer counts once for each."""
    times = {plan.leaf.path: saved_copies(subject, plan, subject.now) for plan in subject.plan.activations.leaves}
    by_size = sorted(subject.plan.activations.leaves, key=lambda a: -a.bytes_per_device * times[a.leaf.path])
    for activation in by_size[:SHOWN]:
        size, count = activation.bytes_per_device, times[activation.leaf.path]
        names = saved_names(subject, activation)
        by_name = f" ({' and '.join(names)})" if names else ""
        layers = count // max(len(names), 1)
        kept = f", kept of each of {layers} layers{by_name}: {gib(size * count)}" if count > 1 else ""
        dtype = activation.leaf.dtype.name
        yield f"largest activation: {gib(size)} {_named(activation, subject.plan)}, {dtype}{kept}"


def _way_out(subject: LayoutSubject) -> str:
    chips, limit = subject.plan.mesh.size, subject.hbm_bytes
    least = least_input_bytes(subject)
    if least > limit:
        return (
            f"no mapping fits: even evenly sharded over all {chips} chips, the inputs still take {gib(least)} on each; "
            f"they need at least {-(-least * chips // limit)} chips"
        )
    suggestion = suggest_layout(subject)
    if suggestion is None:
        return (
            f"none of the changes tried fits; --search looks further (evenly sharded, the inputs take {gib(least)} a "
            "chip)"
        )
    return str(suggestion)


def decode_cost(plan: RunPlan | None) -> DecodeCost | None:
    """What a run that generates text holds and moves; None for other runs."""
    serving = None if plan is None else getattr(plan.work, "serving", None)
    return serving if isinstance(serving, DecodeCost) else None


def advise_on_slots(plan: RunPlan, pod: Accelerator | None = None) -> list[str]:
    """What is said of a run that generates text where its devices have too little memory; nothing for other runs.

    Args:
        plan: the run.
        pod: the chips; None for the devices here.
    """
    served, limit = decode_cost(plan), plan.target.limit_bytes
    return [] if served is None or limit is None else [format_slot_advice(served, limit, pod)]


def format_slot_advice(served: DecodeCost, limit: int, pod: Accelerator | None, *, room: int | None = None) -> str:
    """What is said where more rows are asked for than fit: how many do, and what would hold them.

    Args:
        served: as asked for.
        limit: bytes of a device.
        pod: the chips; larger ones of its kind are tried.
        room: what Programs take beside their inputs; what is taken for them by default.
    """
    room = served.temp_bytes if room is None else room
    most = served.fitting(limit, served.context, temp_bytes=room)
    message = f"{most:,} rows of {served.context:,} positions fit, {served.rows:,} asked"
    ways: list[str] = []
    if most:
        ways.append(f"inference.max_rows: {most} (or auto)")
    if served.dtype != "int8":
        ways += _if_enough(
            served, "inference.cache_dtype: int8", served.fitting(limit, served.context, "int8", temp_bytes=room)
        )
    weights = served.weights
    if not weights.integers and weights.width > 1:
        smaller = replace(served, weights=replace(weights, others=weights.others // weights.width))
        ways += _if_enough(served, "quantize: int8", smaller.fitting(limit, served.context, temp_bytes=room))
    context = served.context
    while context > 1024 and served.fitting(limit, context, temp_bytes=room) < served.rows:
        context //= 2
    if context < served.context and (rows := served.fitting(limit, context, temp_bytes=room)) >= served.rows:
        ways.append(f"inference.max_seq_len: {context}, {rows} rows")
    if pod is not None:
        ways += _larger_pods(served, limit, pod, room)
    return f"{message}: " + (", or ".join(ways) if ways else "nothing smaller than other weights or more chips")


def _if_enough(served: DecodeCost, what: str, rows: int) -> list[str]:
    more = f"{what}, {rows:,} rows"
    return [more] if rows >= served.rows else [f"{more} only"] if rows else []


def _larger_pods(served: DecodeCost, limit: int, pod: Accelerator, temporaries: int) -> list[str]:
    """The smallest larger pod whose chips, with all of them in tensor parallelism, have room."""
    tensor = served.devices // served.shards
    for chips in default_topologies(pod.generation):
        devices = chips * pod.generation.devices_per_chip
        ways, data = devices // served.shards, served.shards
        if chips <= pod.chips or devices % data or ways % tensor:
            continue
        kv_ways = max(n for n in range(1, served.kv_heads + 1) if served.kv_heads % n == 0 and ways % n == 0)
        group = ways // kv_ways
        if served.query_groups % group:
            break
        weights = served.weights
        sharded = (weights.total - weights.replicated) * tensor // ways
        sharded += served.repeated_weights(kv_ways=kv_ways, group=group)
        smaller = replace(
            served,
            weights=replace(weights, integers=0, scales=0, table=0, others=sharded + weights.replicated),
            kv_ways=kv_ways,
        )
        rows = smaller.fitting(limit, served.context, temp_bytes=temporaries)
        if rows >= served.rows:
            name = parse_accelerator(f"{pod.generation.name}-{chips * pod.generation.cores_per_chip}").name
            mesh = " × ".join(
                f"{axis} {size}" for axis, size in (("data", data), ("model", kv_ways), ("group", group)) if size > 1
            )
            return [f"{name} with {mesh}, {rows} rows of {gib(smaller.bytes_of_row(served.context))} a chip"]
    return []
