"""Bytes on a chip by use, from arithmetic alone: the plan's leaves and the Programs' inputs.

*Resident*: one array that is on a chip while a Program runs, because it is an input of the Program. *Group*: the use of
residents; `embedding`, `attention`, `mlp`, `head`, `norm` and `other weights` are parameters, `frozen mlp` and similar
those that are not trained, `optimizer` its statistics, `kv cache`, and `batch` the inputs that are new in every step.

Bytes are those of the shards. They equal the compiler's argument bytes on CPUs and GPUs; a TPU stores arrays in tiles,
which pads small ones. The compiler drops an input that the function never reads; it is a resident here, because the
caller of the Program holds it.

Gradients are not residents: they exist inside a step only, among the compiler's temporaries. They are stated separately
(`Budget.gradients`), since arithmetic knows them too.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from haliax_ext.abstract import Leaf, leaves
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import LeafPlan, place
from haliax_ext.planner import ShardingPlan
from haliax_ext.program import Input, Program
from levanter.models.param_groups import ADAPTERS, FROZEN_GROUPS, PARAMETER_GROUPS, frozen_group, parameter_group
from levanter.runplan import RunPlan
from levanter.trainer.train_state import AVERAGE, FROZEN, GRADIENT_BYTES, MODEL, OPTIMIZER, REFERENCE, TrainState

STATE_GROUPS = (OPTIMIZER, AVERAGE, REFERENCE, "kv cache", "batch")
GROUPS = (*PARAMETER_GROUPS, ADAPTERS, *FROZEN_GROUPS, *STATE_GROUPS)


@dataclass(frozen=True, kw_only=True)
class Resident:
    """One array on a chip.

    Attributes:
        path: input name and leaf path.
        group: its use.
        axes: names and sizes.
        dtype: its dtype's name.
        spec: mesh axes by axis name, as text (`mlp → model × group, embed → data`); `replicated` if none shards it.
        nbytes: on one device, without layout padding.
        whole_bytes: of the full array.
        shard_shape: the shape of one device's piece.
        replicated_over: mesh axes of size > 1 over which it is replicated.
    """

    path: str
    group: str
    axes: tuple[tuple[str, int], ...]
    dtype: str
    spec: str
    nbytes: int
    whole_bytes: int
    shard_shape: tuple[int, ...] = ()
    replicated_over: tuple[str, ...] = ()

    @property
    def replicated(self) -> bool:
        """Whether there is more than one chip and every one holds all of it."""
        return bool(self.replicated_over) and self.nbytes == self.whole_bytes


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes on a chip while the largest Program runs.

    Attributes:
        arguments: by Program name, exact bytes of its inputs on a device, without layout padding.
        groups: bytes by group, of the Program with the largest arguments.
        replicated_bytes: of those, bytes of arrays that are replicated on every chip.
        residents: of that Program, largest first.
        hbm_bytes: what a chip has; `None` where that is not limited.
        largest: the name of that Program; empty where there is none.
        gradients: bytes of the gradients that the Program makes, in their dtype and shards; 0 where it trains nothing.
            They are part of the temporaries, not of the arguments.
    """

    arguments: Mapping[str, int]
    groups: Mapping[str, int]
    replicated_bytes: int
    residents: tuple[Resident, ...]
    hbm_bytes: int | None
    largest: str = ""
    gradients: int = 0


def hbm_budget(plan: RunPlan) -> Budget:
    """The budget of a plan."""
    residents = {program.name: program_residents(program, plan.mesh) for program in plan.computing}
    # Programs run one at a time, so the one with the largest inputs decides, not the sum over all of them.
    arguments = {name: sum(r.nbytes for r in largest_residents) for name, largest_residents in residents.items()}
    largest = max(arguments, key=lambda name: arguments[name], default="")
    largest_residents = residents.get(largest, ())
    return Budget(
        arguments=arguments,
        groups=by_group(largest_residents),
        replicated_bytes=sum(r.nbytes for r in largest_residents if r.replicated),
        residents=largest_residents,
        hbm_bytes=plan.target.hbm_bytes,
        largest=largest,
        gradients=gradient_bytes(plan.program(largest), plan.mesh) if largest else 0,
    )


def by_group(residents: Iterable[Resident]) -> dict[str, int]:
    """Bytes of residents by group, in the order of `GROUPS`; groups without bytes are left out."""
    sums: dict[str, int] = dict.fromkeys(GROUPS, 0)
    for resident in residents:
        sums[resident.group] += resident.nbytes
    return {group: nbytes for group, nbytes in sums.items() if nbytes}


def program_residents(program: Program, mesh: MeshSpec) -> tuple[Resident, ...]:
    """Every array that a Program takes, largest on a chip first."""
    residents = [_resident(argument, plan, mesh) for argument in program.inputs for plan in _placed(argument, mesh)]
    return tuple(sorted(residents, key=lambda resident: -resident.nbytes))


def gradient_bytes(program: Program, mesh: MeshSpec) -> int:
    """Bytes on a device of the gradients that a train step makes: float32, in the shards of the parameters.

    A train step is a Program that takes a `TrainState` and something beside it. With accumulation there are, for a
    moment, those of a microbatch too.
    """
    states = [argument for argument in program.inputs if isinstance(argument.value, TrainState)]
    # The Programs that save or initialize a state have no other input, and compute no gradients.
    if len(program.inputs) < 2:
        return 0
    return sum(
        math.prod(plan.shard_shape) * GRADIENT_BYTES
        for argument in states
        for plan in _placed(argument, mesh)
        if plan.leaf.path.startswith(f"{MODEL}.")
    )


def _placed(argument: Input, mesh: MeshSpec) -> Iterator[LeafPlan]:
    """The sharding of every array of an input."""
    placement = argument.placement
    assert placement is not None, f"input {argument.name}: a plan needs its sharding"
    for leaf in leaves(argument.value):
        if isinstance(placement, ShardingPlan):
            yield placement.by_path[leaf.path]
        else:
            mapping = placement.params_at(leaf.path) if isinstance(placement, Mappings) else placement
            yield place(leaf, AxisMapping(mapping), mesh)[0]


def _resident(argument: Input, plan: LeafPlan, mesh: MeshSpec) -> Resident:
    leaf = plan.leaf
    return Resident(
        path=f"{argument.name}.{leaf.path}" if leaf.path else argument.name,
        group=resident_group(argument, leaf),
        axes=leaf.axes,
        dtype=leaf.dtype.name,
        spec=sharding_text(plan, mesh),
        nbytes=plan.bytes_per_device,
        whole_bytes=leaf.nbytes,
        shard_shape=plan.shard_shape,
        replicated_over=plan.replicated_over,
    )


def sharding_text(plan: LeafPlan, mesh: MeshSpec) -> str:
    """Which mesh axes shard which axes: `mlp → model × group, embed → data`, or `replicated`."""
    cuts = {
        name: [axis for axis in mesh_axes if mesh.shape[axis] > 1]
        for name, mesh_axes in zip(plan.leaf.names, plan.mesh_axes, strict=True)
    }
    return ", ".join(f"{name} → {' × '.join(axes)}" for name, axes in cuts.items() if axes) or "replicated"


def resident_group(argument: Input, leaf: Leaf) -> str:
    """The group of an input's array.

    Arrays that a sharding plan or parameter rules place stay from step to step: parameters and, under `optimizer`,
    their statistics. Arrays that the compute mapping places are new in every step, unless they are a cache.
    """
    names = (argument.name, *leaf.path.split("."))
    # The order of the tests matters: a reference model and frozen weights have
    # parameters' paths below their own name.
    if REFERENCE in names[:2]:
        return REFERENCE
    if names[1] == FROZEN:
        return frozen_group(replace(leaf, path=leaf.path.removeprefix(f"{FROZEN}.")))
    if any("cache" in part for part in names):
        return "kv cache"
    if argument.name == FROZEN:
        return frozen_group(leaf)
    for group in (OPTIMIZER, AVERAGE):
        if group in names:
            return group
    if isinstance(argument.placement, ShardingPlan | Mappings) and leaf.axes:
        inside = isinstance(argument.value, TrainState) and leaf.path.startswith(f"{MODEL}.")
        return parameter_group(replace(leaf, path=leaf.path.removeprefix(f"{MODEL}.")) if inside else leaf)
    return "other weights" if isinstance(argument.placement, ShardingPlan) else "batch"
