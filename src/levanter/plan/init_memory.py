"""HBM of Programs that initialize arrays from a random key, by arithmetic, without a compiler.

The first state of a run, its frozen weights, factors of an adapter: the only input is a key, and the results are the
arrays, each computed in its final shard. So a chip holds the results and, of the array that is being computed, its
random bits and its values in float32. Compiling such a Program takes more than half the time of a train step, since
each array is a fusion of the generator's rounds with the inverse error function, and the compiler finds the results and
almost nothing else. So the Program is not compiled where the sum below fits.

The sum assumes that arrays are computed one after another, which nothing forces a compiler to do. On a TPU it includes
the padding of pieces that do not fill their tiles: heads of 64 whose other axis is sharded 64 ways take twice their
bytes.
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
"""A Program whose inputs are at most this large takes a random key and no arrays."""
_WORKING_BYTES = 8
"""For each element that is being computed: four of random bits, four of its value."""


@dataclass(frozen=True, kw_only=True)
class InitMemory:
    """Bytes on a chip of a Program that draws values.

    Attributes:
        results: of its outputs.
        working: temporaries of the largest array.
        padding: that a TPU's tiles add to the results; 0 elsewhere.
    """

    results: int
    working: int
    padding: int = 0

    @property
    def total(self) -> int:
        """The sum of results, padding and temporaries."""
        return self.results + self.padding + self.working


def tile_padding(nbytes: int, shard_shape: Sequence[int]) -> int:
    """Bytes that tiles of 8 × 128 words add to a piece of `nbytes`, with the best two of its axes laid along them.

    A second axis shorter than 8 takes a shorter tile.
    """

    def share(second: int, minor: int) -> float:
        # The tile of a shorter axis has the next power of two of rows.
        tile = min(8, 1 << (second - 1).bit_length())
        return -(-second // tile) * tile * -(-minor // 128) * 128 / (second * minor)

    pairs = itertools.permutations(shard_shape, 2)
    # Which two axes the compiler lays along a tile is not known here: the pair
    # with least padding, so this may be low.
    return round(nbytes * (min((share(*pair) for pair in pairs), default=1.0) - 1))


def init_memory(plan: RunPlan) -> Mapping[str, InitMemory]:
    """By name, the memory of the Programs of a run that initialize arrays."""
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
