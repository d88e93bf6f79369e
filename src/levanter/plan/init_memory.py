"""HBM of Programs that initialize arrays from a random key, by arithmetic, without a compiler.

The first state of a run, what is frozen of it, factors of an adapter: nothing goes in but a key, and what comes out is
the arrays, every piece made in its final shard. So a chip holds the results, and of the array that is being made its
random bits and its values in float32. A compiler takes over half as long for such a Program as for a train step, since
each array is a fusion of the generator's rounds with the inverse error function, and finds the results and next to
nothing beside them. So it is not asked where the sum below leaves room.

*Drawn*: the sum for one Program. It has everything that is made at one time if arrays are made one after another, which
nothing forces a compiler to do, and on a TPU what its tiles add to pieces that do not fill them: heads of 64 whose
other axis is sharded 64 ways take twice their bytes.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from haliax_ext.planner import LeafPlan, ShardingPlan
from haliax_ext.program import Program
from levanter.plan.hbm_budget import program_residents
from levanter.runplan import RunPlan

KEY_BYTES = 1 << 10
"""A Program that takes no more than this takes no arrays to speak of."""
_WORKING_BYTES = 8
"""Of an element that is being made: four of random bits, four of its value."""


@dataclass(frozen=True, kw_only=True)
class InitMemory:
    """Bytes on a chip of a Program that draws values.

    Attributes:
        results: what it makes.
        working: of the largest array, while it is made.
        padding: what a TPU's tiles add to the results; 0 elsewhere.
    """

    results: int
    working: int
    padding: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.results + self.padding + self.working


def tile_padding(nbytes: int, shard_shape: Sequence[int]) -> int:
    """Bytes that tiles of 8 × 128 words add to a piece of `nbytes`, with the best two of its axes laid along them.

    A second axis shorter than 8 takes a shorter tile.
    """

    def share(second: int, minor: int) -> float:
        tile = min(8, 1 << (second - 1).bit_length())
        return -(-second // tile) * tile * -(-minor // 128) * 128 / (second * minor)

    pairs = itertools.permutations(shard_shape, 2)
    return round(nbytes * (min((share(*pair) for pair in pairs), default=1.0) - 1))


def init_memory(plan: RunPlan) -> Mapping[str, InitMemory]:
    """The Programs of a run that draw values."""
    by_program = {program.name: memory for program in plan.computing if (memory := _drawn(program, plan)) is not None}
    load = plan.load
    if load is not None and load.initial:
        name = load.initialize_program.name
        initialized = [load.sharding.by_path[leaf.path] for leaf in load.initial]
        by_program[name] = InitMemory(
            results=load.initial_bytes,
            working=load.initial_transient_bytes,
            padding=_padding(initialized, plan),
        )
    return by_program


def _padding(leaves: Iterable[LeafPlan], plan: RunPlan) -> int:
    if plan.target.platform != "tpu":
        return 0
    pieces = [(leaf.shard_shape, leaf.leaf.dtype.itemsize) for leaf in leaves]
    return sum(tile_padding(math.prod(shape) * itemsize, shape) for shape, itemsize in pieces)


def _drawn(program: Program, plan: RunPlan) -> InitMemory | None:
    placement = program.out_placement
    if not isinstance(placement, ShardingPlan) or not placement.leaves:
        return None
    if sum(leaf.nbytes for leaf in program_residents(program, plan.mesh)) > KEY_BYTES:
        return None
    return InitMemory(
        results=placement.bytes_per_device,
        working=_WORKING_BYTES * max(math.prod(leaf.shard_shape) for leaf in placement.leaves),
        padding=_padding(placement.leaves, plan),
    )
