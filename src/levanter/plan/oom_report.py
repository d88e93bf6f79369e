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

from haliax_ext.errors import gib, named_shape
from haliax_ext.hlo import Allocation, OutOfMemory, Shape
from haliax_ext.placement import LeafPlan
from haliax_ext.program import Program
from levanter.plan.aot import Refused
from levanter.plan.hbm_budget import Budget, Resident, by_group, cut_text, gradient_bytes, residents_of
from levanter.plan.hbm_lower_bound import known_of
from levanter.plan.layout_memory import LayoutSubject, kept_names, kept_times, least_bytes
from levanter.plan.suggestions import nearest_that_fits
from levanter.runplan import RunPlan
from levanter.trainer.state import OPTIMIZER

SHOWN = 5
LAYERS = "layers"
WORTH_NAMING = 0.01
"""A replicated array is named from this share of a chip's memory on."""


def why_not(
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
    known = known_of(plan, name, hbm_bytes=limit)
    if refusal is None and max(inputs, known.total) <= limit:
        return ()
    asked = plan.program(name)
    residents = budget.residents if name == budget.largest else residents_of(asked, plan.mesh)
    needed = inputs if refusal is None else max(inputs, refusal.needed)
    subject = LayoutSubject(plan=plan, program=asked, hbm_bytes=limit, made=needed - inputs or None)
    if refusal is None and inputs <= limit:
        over = (
            f"{name} needs at least {gib(known.total)} on a chip, {gib(known.total - limit)} more than its {gib(limit)}"
        )
        headline = f"{over}: {known} (not compiled: without {known.lacking})"
    else:
        headline = _headline(asked, plan, inputs, needed, limit)
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
    return f"{activation.leaf.path} {named_shape(activation.leaf.axes)}, {cut_text(activation, plan.mesh)}"


def _activations(subject: LayoutSubject) -> Iterator[str]:
    """The largest named activations; what a backward pass keeps of each layer counts once for each."""
    times = {plan.leaf.path: kept_times(subject, plan, subject.now) for plan in subject.plan.activations.leaves}
    found = sorted(subject.plan.activations.leaves, key=lambda a: -a.bytes_per_device * times[a.leaf.path])
    for activation in found[:SHOWN]:
        size, count = activation.bytes_per_device, times[activation.leaf.path]
        names = kept_names(subject, activation)
        by_name = f" ({' and '.join(names)})" if names else ""
        layers = count // max(len(names), 1)
        kept = f", kept of each of {layers} layers{by_name}: {gib(size * count)}" if count > 1 else ""
        dtype = activation.leaf.dtype.name
        yield f"largest activation: {gib(size)} {_named(activation, subject.plan)}, {dtype}{kept}"


def _way_out(subject: LayoutSubject) -> str:
    chips, limit = subject.plan.mesh.size, subject.hbm_bytes
    least = least_bytes(subject)
    if least > limit:
        return (
            f"no mapping fits: even evenly sharded over all {chips} chips, the inputs still take {gib(least)} on each; "
            f"they need at least {-(-least * chips // limit)} chips"
        )
    found = nearest_that_fits(subject)
    if found is None:
        return (
            f"none of the changes tried fits; --search looks further (evenly sharded, the inputs take {gib(least)} a "
            "chip)"
        )
    return str(found)
