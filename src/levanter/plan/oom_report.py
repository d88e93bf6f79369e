"""Explains why a Program does not fit, in axis names: the largest arrays on a chip, and the nearest mapping that fits.

A refusal has one of two causes. The *inputs* alone exceed the memory of a chip: then arithmetic knows each array by its
path without a compiler. Or the *temporaries* are too large: gradients, saved activations, gathered weights. The
compiler states their sum, and only sometimes the arrays; then the largest named activations are listed.

The compiler names its largest allocations by the path of a parameter (Programs take their inputs as dictionaries from
path to array) or by the operation that computes an activation. Both are translated into named axes here: an input by
its path, an activation by its shape, which is that of one of the plan's named activations on a chip, alone or stacked
over the layers (saved for the backward pass).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from haliax_ext.errors import gib, named_shape
from haliax_ext.hlo import Allocation, OutOfMemory, Shape
from haliax_ext.placement import LeafPlan
from haliax_ext.program import Program
from levanter.hardware import Accelerator, default_topologies, parse_accelerator
from levanter.inference.capacity import DecodeCost
from levanter.plan.aot import Compiled, Outcome, Refused
from levanter.plan.hbm_budget import Budget, Resident, by_group, gradient_bytes, program_residents, sharding_text
from levanter.plan.hbm_lower_bound import layout_lower_bound, program_lower_bound
from levanter.plan.layout_memory import LayoutSubject, layout_memory, least_input_bytes, saved_copies, saved_names
from levanter.plan.suggestions import nearest_suggestion
from levanter.runplan import RunPlan
from levanter.trainer.train_state import OPTIMIZER

SHOWN = 5
LAYERS = "layers"
_QUANTIZED = tuple(f"frozen {group}" for group in ("attention", "mlp", "head"))
_WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
WORTH_NAMING = 0.01
"""A replicated array is named from this share of a chip's memory on."""


def suggest_by_arithmetic(subject: LayoutSubject) -> tuple[str, ...]:
    """The nearest layout that may fit, as a line of YAML, or the reason why none does."""
    if (reason := too_few_chips(subject)) is not None:
        return (reason,)
    suggestion = nearest_suggestion(subject)
    return (nothing_fits(subject) if suggestion is None else str(suggestion),)


def explain_oom(
    refused: Refused | OutOfMemory | None,
    plan: RunPlan,
    budget: Budget,
    *,
    program: str | None = None,
    suggest: Callable[[LayoutSubject], Sequence[str]] = suggest_by_arithmetic,
) -> tuple[str, ...]:
    """Lines that explain why a Program does not fit; none where neither arithmetic nor the compiler refuses it.

    They name the largest inputs with their bytes, the allocations that the compiler lists, the largest activations
    where the inputs alone fit, and last what `suggest` returns.

    Args:
        refused: the compiler's refusal; `None` if the Program was not compiled.
        plan: the run.
        budget: the inputs by arithmetic.
        program: its name; by default the refused one, else the one with the largest inputs.
        suggest: the lines about layouts that would fit.
    """
    if isinstance(refused, Refused):
        refusal, program = refused.refusal, program or refused.name
    else:
        refusal = refused
    name, unit = program or budget.largest, plan.target.unit
    limit = budget.hbm_bytes if refusal is None else refusal.available
    inputs = budget.arguments.get(name, 0)
    if not name or limit is None:
        return ()
    known = program_lower_bound(plan, name, hbm_bytes=limit)
    if refusal is None and max(inputs, known.total) <= limit:
        return ()
    program_ = plan.program(name)
    residents = budget.residents if name == budget.largest else program_residents(program_, plan.mesh)
    # A compiler may count less than the inputs (it drops those that are never
    # read), but the caller holds them all.
    needed = inputs if refusal is None else max(inputs, refusal.needed)
    compiled = needed if needed > inputs else None
    subject = LayoutSubject(plan=plan, program=program_, hbm_bytes=limit, compiled_bytes=compiled)
    if refusal is None and inputs <= limit:
        over = (
            f"{name} needs at least {gib(known.total)} on a {unit}, {gib(known.total - limit)} more than its "
            f"{gib(limit)}"
        )
        headline = f"{over}: {known} (not compiled: without {known.lacking})"
    else:
        headline = _headline(program_, plan, inputs, needed, limit)
    lines = [headline, _groups(residents)]
    for allocation in () if refusal is None else refusal.allocations[:SHOWN]:
        lines.append(f"largest for the compiler: {gib(allocation.nbytes)} {_allocation(allocation, plan, residents)}")
    lines += [f"largest input: {_sized(r, unit)}" for r in residents[:SHOWN]]
    # Large replicated arrays are named even where they are not among the
    # largest: sharding them is the usual fix.
    whole = [r for r in residents[SHOWN:] if r.replicated and r.group != OPTIMIZER and r.nbytes > WORTH_NAMING * limit]
    lines += [f"also replicated: {_sized(r, unit)}" for r in whole]
    if inputs <= limit:
        lines += _activations(subject)
    return (*lines, *suggest(subject), *filter(None, [_int8_base(subject)]))


def _headline(program: Program, plan: RunPlan, inputs: int, needed: int, limit: int) -> str:
    over = (
        f"{program.name} needs {gib(needed)} on a {plan.target.unit}, {gib(needed - limit)} more than its {gib(limit)}"
    )
    if needed == inputs:
        return f"{over}: its inputs alone"
    gradients = gradient_bytes(program, plan.mesh)
    gradient_text = f" ({gib(gradients)} of it gradients)" if gradients else ""
    return f"{over}: {gib(inputs)} of inputs, {gib(needed - inputs)} of temporaries{gradient_text}"


def _groups(residents: Sequence[Resident]) -> str:
    return "inputs: " + ", ".join(f"{group} {gib(nbytes)}" for group, nbytes in by_group(residents).items())


def _sized(resident: Resident, unit: str) -> str:
    return f"{gib(resident.nbytes)} {_resident(resident, unit)}"


def _resident(resident: Resident, unit: str) -> str:
    cut = f"replicated on every {unit}" if resident.replicated else f"{resident.spec}, of {gib(resident.whole_bytes)}"
    return f"{resident.path} {resident.dtype}{named_shape(resident.axes)}, {cut}"


def _allocation(allocation: Allocation, plan: RunPlan, residents: Sequence[Resident]) -> str:
    """Describes one of the compiler's allocations: an input, a named activation, or the temporary of a module."""
    # An allocation of an input has its path in the name of the operation: `params['layers.mlp.w']`.
    if path := re.search(r"\['([^']+)'\]", allocation.op_name):
        for resident in residents:
            if resident.path == path[1] or resident.path.endswith(f".{path[1]}"):
                return _resident(resident, plan.target.unit)
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
    """Sizes without order and without ones: the compiler transposes arrays and adds or drops axes of size 1."""
    return tuple(sorted(size for size in sizes if size != 1))


def _named(activation: LeafPlan, plan: RunPlan) -> str:
    return f"{activation.leaf.path} {named_shape(activation.leaf.axes)}, {sharding_text(activation, plan.mesh)}"


def _activations(subject: LayoutSubject) -> Iterator[str]:
    """The largest named activations; those saved for the backward pass count once for each layer."""
    times = {plan.leaf.path: saved_copies(subject, plan, subject.now) for plan in subject.plan.activations.leaves}
    by_size = sorted(subject.plan.activations.leaves, key=lambda a: -a.bytes_per_device * times[a.leaf.path])
    for activation in by_size[:SHOWN]:
        size, count = activation.bytes_per_device, times[activation.leaf.path]
        names = saved_names(subject, activation, subject.now)
        by_name = f" ({' and '.join(names)})" if names else ""
        layers = count // max(len(names), 1)
        saved = f", kept of each of {layers} layers{by_name}: {gib(size * count)}" if count > 1 else ""
        dtype = activation.leaf.dtype.name
        yield f"largest activation: {gib(size)} {_named(activation, subject.plan)}, {dtype}{saved}"


def nothing_fits(subject: LayoutSubject) -> str:
    """The line where no change of a layout fits."""
    unit = subject.plan.target.unit
    more = "--search tries more layouts" if subject.plan.mesh.size > 1 else f"there is one {unit}"
    least = gib(least_input_bytes(subject))
    return f"none of the changes tried fits; {more} (evenly sharded, the inputs take {least} a {unit})"


def too_few_chips(subject: LayoutSubject) -> str | None:
    """Why no mapping fits, where the inputs exceed the chips even if sharded evenly; None elsewhere."""
    chips, limit, least = subject.plan.mesh.size, subject.hbm_bytes, least_input_bytes(subject)
    if least <= limit:
        return None
    unit = subject.plan.target.unit
    if chips == 1:
        return f"the inputs need at least {-(-least // limit)} {unit}s"
    return (
        f"no mapping fits: even evenly sharded over all {chips} {unit}s, the inputs still take {gib(least)} on each; "
        f"they need at least {-(-least * chips // limit)} {unit}s"
    )


def _int8_base(subject: LayoutSubject) -> str | None:
    """How adapters on a frozen base would fit with the base in int8; None where they would not, or it is int8 already.

    Its Programs would be others, so this is arithmetic: the frozen projections take one byte for each weight. What
    else has to change is tried with as many bytes more on a chip.
    """
    residents = program_residents(subject.program, subject.plan.mesh)
    frozen = [r for r in residents if r.group in _QUANTIZED and r.dtype in _WIDTHS and len(r.axes) > 1]
    freed = sum(r.nbytes - r.nbytes // _WIDTHS[r.dtype] for r in frozen)
    if not freed or any(r.dtype == "int8" for r in residents):
        return None
    wider = replace(subject, hbm_bytes=subject.hbm_bytes + freed)
    key = "lora" if subject.plan.entry_point.startswith("lora_") else "adapter"
    change = f"{key}: {{base_dtype: int8}}"
    known = layout_lower_bound(wider, wider.now, layout_memory(wider, wider.now))
    if known.total > wider.hbm_bytes:
        suggestion = nearest_suggestion(wider)
        if suggestion is None:
            return None
        change, known = f"{change}, {suggestion.yaml}", suggestion.known
    total = gib(known.total - freed)
    return f"may fit: {change}  # at least {total} in all (not compiled): frozen projections take {gib(freed)} less"


def decode_cost(plan: RunPlan | None) -> DecodeCost | None:
    """The decode cost of a run that generates text; None for other runs."""
    serving = None if plan is None else getattr(plan.work, "serving", None)
    return serving if isinstance(serving, DecodeCost) else None


def decode_temporaries(served: DecodeCost, outcomes: Iterable[Outcome | None]) -> int | None:
    """The most that a compiled Program allocates in addition to its inputs; None where none of them is compiled.

    The Program that makes the empty cache is left out: the cache is its result, not a temporary, and it runs once.
    """
    names = {*served.decode.values(), *served.prefill}
    compiled = [outcome for outcome in outcomes if isinstance(outcome, Compiled) and outcome.name in names]
    return max((max(0, outcome.peak_bytes - outcome.memory.argument) for outcome in compiled), default=None)


def advise_on_slots(plan: RunPlan, pod: Accelerator | None = None, outcomes: Iterable[Outcome] = ()) -> list[str]:
    """Advice for a run that generates text whose devices have too little memory; empty for other runs.

    Args:
        plan: the run.
        pod: the chips; None for the devices of this machine.
        outcomes: of its Programs, where they were compiled: their temporaries may be larger than what is assumed.
    """
    served, limit = decode_cost(plan), plan.target.limit_bytes
    if served is None or limit is None:
        return []
    temp_bytes = max(served.temp_bytes, decode_temporaries(served, outcomes) or 0)
    return [format_slot_advice(served, limit, pod, temp_bytes=temp_bytes)]


def format_slot_advice(
    served: DecodeCost, limit: int, pod: Accelerator | None, *, temp_bytes: int | None = None
) -> str:
    """Advice where more rows are configured than fit: the number that fits, and changes that would hold them.

    Args:
        served: as configured.
        limit: bytes of a device.
        pod: the chips; larger pods of its generation are tried.
        temp_bytes: bytes of Programs' temporaries; by default those that `served` assumes.
    """
    temp_bytes = served.temp_bytes if temp_bytes is None else temp_bytes
    most = served.fitting(limit, served.context, temp_bytes=temp_bytes)
    message = f"{most:,} rows of {served.context:,} positions fit, {served.rows:,} asked"
    ways: list[str] = []
    if most:
        ways.append(f"inference.max_rows: {most} (or auto)")
    if served.dtype != "int8":
        ways += _if_enough(
            served, "inference.cache_dtype: int8", served.fitting(limit, served.context, "int8", temp_bytes=temp_bytes)
        )
    weights = served.weights
    # Weights that are quantized already have nothing more to save.
    if not weights.integers and weights.width > 1:
        smaller = replace(served, weights=replace(weights, others=weights.others // weights.width))
        ways += _if_enough(served, "quantize: int8", smaller.fitting(limit, served.context, temp_bytes=temp_bytes))
    context = served.context
    while context > 1024 and served.fitting(limit, context, temp_bytes=temp_bytes) < served.rows:
        context //= 2
    if context < served.context and (rows := served.fitting(limit, context, temp_bytes=temp_bytes)) >= served.rows:
        ways.append(f"inference.max_seq_len: {context}, {rows} rows")
    if pod is not None:
        ways += _larger_pods(served, limit, pod, temp_bytes)
    unit = "device" if pod is None else pod.unit
    return f"{message}: " + (", or ".join(ways) if ways else f"only smaller weights or more {unit}s hold that many")


def _if_enough(served: DecodeCost, what: str, rows: int) -> list[str]:
    more = f"{what}, {rows:,} rows"
    return [more] if rows >= served.rows else [f"{more} only"] if rows else []


def _larger_pods(served: DecodeCost, limit: int, pod: Accelerator, temporaries: int) -> list[str]:
    """The smallest larger pod that holds the rows, with the additional chips in tensor parallelism."""
    tensor = served.devices // served.shards
    for chips in _pod_sizes(pod):
        devices = chips * pod.generation.devices_per_chip
        ways, data = devices // served.shards, served.shards
        if chips <= pod.chips or devices % data or ways % tensor:
            continue
        # Tensor parallelism shards heads of keys and values as far as they divide; the rest of its ways goes to
        # the query heads of a group, over which keys and values are replicated.
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
            joined = f"-{chips * pod.generation.cores_per_chip}" if pod.generation.gpu is None else f"x{chips}"
            name = parse_accelerator(f"{pod.generation.name}{joined}").name
            mesh = " × ".join(
                f"{axis} {size}" for axis, size in (("data", data), ("model", kv_ways), ("group", group)) if size > 1
            )
            return [f"{name} with {mesh}, {rows} rows of {gib(smaller.bytes_per_row(served.context))} a {pod.unit}"]
    return []


def _pod_sizes(pod: Accelerator) -> Sequence[int]:
    """The numbers of chips of a generation's pods, ascending; of GPUs up to those of an NVLink domain."""
    if pod.generation.gpu is None:
        return tuple(default_topologies(pod.generation))
    return [n for n in (1, 2, 4, 8, 16, 36, 72) if n <= pod.generation.nvlink_domain]
