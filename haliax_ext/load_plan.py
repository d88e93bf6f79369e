"""`LoadPlan`: how every leaf gets from a source to its shards, known before a weight is read.

For every leaf the plan holds one of two strategies. `direct`: each host reads what its own devices hold. `exchange`:
one host reads each byte, and the devices reshard what was read (`reshard`). `load_strategy` chooses; `loading` carries
the plan out.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from jax.sharding import PartitionSpec

from haliax_ext.abstract import Leaf
from haliax_ext.errors import gib, named_shape
from haliax_ext.initializers import LeafInit, initialize_program
from haliax_ext.leaf_layout import LeafLayout, Span
from haliax_ext.load_transforms import LoadTransform, begin_derived_program, derive_piece_program, derive_program
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import shard_boxes
from haliax_ext.planner import ShardingPlan
from haliax_ext.program import Program
from haliax_ext.reshard import Reshard, begin_program, piece_program, seconds_program, whole_program
from haliax_ext.rules import WeightRule
from haliax_ext.sources import RemoteReads

TOGETHER_BYTES = 64 << 20
"""Leaves are resharded by one Program up to this transient on a device, so that small ones share a compilation."""
CHUNK_BYTES = 8 << 20
"""Bytes of one read."""


def default_memory_bytes(local_device_bytes: int) -> int:
    """The host-memory budget beyond the arrays: a tenth of them, at least 256 MiB, at most 4 GiB.

    >>> default_memory_bytes(10 << 30) == 1 << 30
    True
    """
    return min(4 << 30, max(256 << 20, local_device_bytes // 10))


@dataclass(frozen=True, kw_only=True)
class LeafLoad:
    """How one leaf is loaded.

    Attributes:
        leaf: path, axes and the dtype it is loaded in.
        rule: which source tensors it is read from.
        layout: how its axes are laid out in them.
        sources: names of its source tensors.
        source_dtype: the dtype they are read in; where they differ, one that represents the numbers of all.
        source_dtypes: the dtype of each, where they differ; else empty.
        bytes_per_element: storage bytes of a source element (not whole for quantized sources).
        strategy: `direct` or `exchange`.
        spec: its final sharding.
        reshard: from what hosts read to the final sharding; None where hosts read the final shards. A leaf that others
            are derived from always has one.
        bytes_by_host: bytes each host reads.
        source_bytes: bytes the leaf has in storage.
        direct_amplification: how many times its bytes direct reading would read.
        amplification: how many times they are read.
        transient_device_bytes: the most on a device beyond the leaf itself.
        transient_host_bytes: the most on a host at a time, read buffers apart.
        reason: why this strategy.
        derived: the transform of a leaf that is read and not kept.
    """

    leaf: Leaf
    rule: WeightRule
    layout: LeafLayout
    sources: tuple[str, ...]
    source_dtype: np.dtype
    bytes_per_element: float
    strategy: Literal["direct", "exchange"]
    spec: PartitionSpec
    reshard: Reshard | None
    bytes_by_host: tuple[int, ...]
    source_bytes: int
    direct_amplification: float
    amplification: float
    transient_device_bytes: int
    transient_host_bytes: int
    reason: str
    derived: LoadTransform | None = None
    source_dtypes: tuple[np.dtype, ...] = ()

    @property
    def path(self) -> str:
        """The leaf's path."""
        return self.leaf.path

    @property
    def read_alike(self) -> Hashable:
        """The key that leaves have in common which are read together, piece by piece."""
        # A leaf that others are derived from is read alone: its pieces are transformed one at a time.
        derived_path = self.path if self.derived is not None else ""
        return self.sources, self.pieces, self.reshard is None, derived_path

    @property
    def reshard_key(self) -> Hashable:
        """The key that leaves have in common which one Program can reshard: all but the path."""
        assert self.reshard is not None
        return replace(self.reshard, leaf=replace(self.leaf, path="")), self.spec

    @property
    def results(self) -> tuple[tuple[Leaf, PartitionSpec], ...]:
        """The leaves that loading returns, with their sharding: itself, or what is derived from it."""
        if self.derived is None:
            return ((self.leaf, self.spec),)
        return tuple((result.leaf, result.spec) for result in self.derived.results)

    def shard_bytes(self, mesh: MeshSpec) -> int:
        """Bytes on one device of what loading returns."""
        return sum(
            leaf.nbytes // math.prod(mesh.ways(entry) for entry in spec if entry is not None)
            for leaf, spec in self.results
        )

    @property
    def pieces(self) -> tuple[Span, ...]:
        """The pieces it is loaded in; one for direct reading."""
        return self.reshard.pieces if self.reshard is not None else ((0, 0),)

    def device_boxes(self, mesh: MeshSpec, piece: Span) -> np.ndarray:
        """The boxes `[devices, axes, 2]` of the leaf that hosts read for the devices, for a piece."""
        # Read directly, a device's box is its final shard; with a reshard it is its slab.
        if self.reshard is None:
            return shard_boxes(self.leaf.shape, self.spec, mesh)
        return self.reshard.slab_boxes(piece)


@dataclass(frozen=True, kw_only=True)
class LoadStep:
    """Leaves, or a piece of one, that arrive together.

    Attributes:
        loads: one leaf, those that share its source tensors where they are read directly, or several small ones that
            are resharded by one Program.
        piece: which piece of a leaf that arrives in several; None: all of it.
    """

    loads: tuple[LeafLoad, ...]
    piece: Span | None = None


def plan_steps(loads: Sequence[LeafLoad]) -> tuple[LoadStep, ...]:
    """Orders leaves into steps; leaves that share source tensors are adjacent, piece by piece.

    Args:
        loads: one for each leaf, in the order of the sharding plan, which is kept as far as possible.
    """
    steps: list[LoadStep] = []
    together: list[LeafLoad] = []
    transient = 0

    # The small leaves collected so far become one step.
    def flush() -> None:
        if together:
            steps.append(LoadStep(loads=tuple(together)))
            together.clear()

    # Leaves that are read alike form one group, which takes the place of its first member in the order.
    groups: dict[Hashable, list[LeafLoad]] = {}
    for load in loads:
        groups.setdefault(load.read_alike, []).append(load)
    for load in loads:
        group = groups[load.read_alike]
        if load.reshard is None:
            if group[0] is load:
                steps.append(LoadStep(loads=tuple(group)))
        # Pieces alternate between the leaves that share tensors: what is adjacent in the file is read at one time.
        elif load.reshard.cut is not None:
            if group[0] is load:
                steps += [LoadStep(loads=(leaf,), piece=piece) for piece in load.pieces for leaf in group]
        elif load.derived is not None:
            steps.append(LoadStep(loads=(load,)))
        elif group[0] is load:
            # Small leaves are resharded by one Program, as long as all of them fit TOGETHER_BYTES.
            needed = sum(leaf.transient_device_bytes for leaf in group)
            transient += needed
            if transient > TOGETHER_BYTES:
                flush()
                transient = needed
            # Together they would exceed the limit of a shared Program, so each gets its own.
            if needed > TOGETHER_BYTES and len(group) > 1:
                steps += [LoadStep(loads=(leaf,)) for leaf in group]
                transient = 0
            else:
                together += group
    flush()
    return tuple(steps)


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """How every leaf is loaded.

    Attributes:
        sharding: the final sharding of every leaf.
        loads: one for each leaf, in the order of the sharding plan.
        steps: what is loaded one after another; the same on all hosts.
        hosts: the host of each device, in the mesh's row-major order.
        skipped: paths of optional leaves that the source lacks.
        initial: leaves that are initialized and not read.
        remote: how the source is read, where it is on another machine.
        name: the prefix of its Programs' names; a run that loads several models gives each its own.
    """

    sharding: ShardingPlan
    loads: tuple[LeafLoad, ...]
    steps: tuple[LoadStep, ...]
    hosts: tuple[int, ...]
    skipped: tuple[str, ...] = ()
    initial: tuple[LeafInit, ...] = ()
    remote: RemoteReads | None = None
    name: str = "load"

    @property
    def leaves(self) -> tuple[LeafLoad, ...]:
        """Another name of `loads`, as sharding plans have it."""
        return self.loads

    @cached_property
    def by_path(self) -> dict[str, LeafLoad]:
        """The loads by the path of their leaf."""
        return {load.path: load for load in self.loads}

    @property
    def num_hosts(self) -> int:
        """The number of hosts that read."""
        return max(self.hosts) + 1

    @property
    def source_bytes(self) -> int:
        """Bytes in storage of all that is loaded."""
        return sum(load.source_bytes for load in self.loads)

    @property
    def bytes_by_host(self) -> tuple[int, ...]:
        """Bytes each host reads."""
        return tuple(sum(load.bytes_by_host[host] for load in self.loads) for host in range(self.num_hosts))

    @property
    def amplification(self) -> float:
        """Bytes that all hosts read, divided by the bytes in storage."""
        return sum(self.bytes_by_host) / max(self.source_bytes, 1)

    @property
    def transient_device_bytes(self) -> int:
        """The most that loading needs on a device beyond the arrays."""
        # Steps run one after another, so their transients do not add up; the leaves of one step do.
        steps = (sum(load.transient_device_bytes for load in step.loads) for step in self.steps)
        return max(self.initial_transient_bytes, *steps, 0)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the loaded arrays on one device."""
        return self.initial_bytes + sum(load.shard_bytes(self.sharding.mesh) for load in self.loads)

    @property
    def initial_bytes(self) -> int:
        """Bytes on one device of the leaves that are initialized."""
        return sum(
            math.prod(self.sharding.by_path[init.path].shard_shape) * init.leaf.dtype.itemsize for init in self.initial
        )

    @property
    def initial_transient_bytes(self) -> int:
        """Bytes on a device, beyond the leaves of `initial`, while they are initialized: random bits and float32."""
        # Four bytes of random bits and four of float32 for each element, before the cast to the leaf's dtype.
        return sum(8 * math.prod(self.sharding.by_path[init.path].shard_shape) for init in self.initial)

    def local_bytes(self, host: int) -> int:
        """Bytes of the loaded arrays on all devices of a host."""
        return self.bytes_per_device * self.hosts.count(host)

    def host_devices(self, host: int) -> np.ndarray:
        """Numbers, in the mesh's row-major order, of a host's devices."""
        return np.flatnonzero(np.asarray(self.hosts) == host)

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """Every Program that loading runs, in the order of first use."""
        programs: dict[str, Program] = {}
        if self.initial:
            programs[self.initialize_program.name] = self.initialize_program
        for step in self.steps:
            # `setdefault`: steps that are resharded alike share a Program, which is listed once.
            for program in self.step_programs(step):
                programs.setdefault(program.name, program)
        if self.num_hosts > 1:
            program = seconds_program(self.sharding.mesh)
            programs[program.name] = program
        return tuple(programs.values())

    @cached_property
    def initialize_program(self) -> Program:
        """The Program that initializes the leaves of `initial`."""
        return replace(initialize_program(self.initial, self.sharding), name=f"{self.name}.initialize")

    def step_programs(self, step: LoadStep) -> tuple[Program, ...]:
        """The Programs of a step: none (direct), the reshard, or one that allocates the leaf and one for a piece."""
        return self._step_programs[self.steps.index(step)]

    @cached_property
    def _step_programs(self) -> tuple[tuple[Program, ...], ...]:
        programs: dict[str, Program] = {}
        # Reshards that differ in nothing but their leaves' paths are one Program, which has the paths of the first.
        first: dict[Hashable, LoadStep] = {}
        by_step: list[tuple[Program, ...]] = []
        for step in self.steps:
            reshard, derived = step.loads[0].reshard, step.loads[0].derived
            if reshard is None:
                by_step.append(())
            elif derived is not None:
                by_step.append(self._derive_programs(step, reshard, derived, programs))
            else:
                # `model` is the first step that is resharded in the same way: its Program serves this one too.
                model = first.setdefault(tuple(load.reshard_key for load in step.loads), step)
                by_step.append(self._reshard_programs(step, model, programs))
        return tuple(by_step)

    def _reshard_programs(self, step: LoadStep, model: LoadStep, programs: dict[str, Program]) -> tuple[Program, ...]:
        """The Programs of a step, which are those of `model`, the first step that is resharded alike."""
        reshards = [load.reshard for load in model.loads if load.reshard is not None]
        path, piece = reshards[0].leaf.path, step.piece
        if piece is None:
            # The name has the number of the step, which is the same on all hosts.
            name = f"{self.name}.exchange.{self.steps.index(model)}"
            if name not in programs:
                programs[name] = whole_program(name, reshards, self.sharding)
            return (programs[name],)
        # Pieces of one length share a Program; only a shorter last piece needs another.
        begin, put = f"{self.name}.begin.{path}", f"{self.name}.exchange.{path}.{piece[1] - piece[0]}"
        if begin not in programs:
            programs[begin] = begin_program(begin, reshards[0], self.sharding)
        if put not in programs:
            programs[put] = piece_program(put, reshards[0], piece, self.sharding)
        return programs[begin], programs[put]

    def _derive_programs(
        self, step: LoadStep, reshard: Reshard, derived: LoadTransform, programs: dict[str, Program]
    ) -> tuple[Program, ...]:
        path = reshard.leaf.path
        if step.piece is None:
            return (derive_program(f"{self.name}.derive.{path}", reshard, derived, self.sharding),)
        begin, put = f"{self.name}.begin.{path}", f"{self.name}.derive.{path}.{step.piece[1] - step.piece[0]}"
        if begin not in programs:
            programs[begin] = begin_derived_program(begin, derived.results, self.sharding)
        if put not in programs:
            programs[put] = derive_piece_program(put, reshard, derived, step.piece, self.sharding)
        return programs[begin], programs[put]

    def __str__(self) -> str:
        rows = [("leaf", "from", "strategy", "bytes", "read", "transient", "why")]
        rows += [
            (
                f"{load.path} {load.leaf.dtype.name}{named_shape(load.leaf.axes)}",
                f"{len(load.sources)} × {load.source_dtype.name}",
                load.strategy,
                gib(load.source_bytes),
                f"{load.amplification:.2f}×",
                gib(load.transient_device_bytes),
                load.reason,
            )
            for load in self.loads
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, self.summary])

    @property
    def summary(self) -> str:
        """Totals: bytes in storage, read, and on a device; how many leaves take which strategy."""
        most = max(self.bytes_by_host, default=0)
        counts = ", ".join(
            f"{sum(load.strategy == strategy for load in self.loads)} {strategy}"
            for strategy in ("direct", "exchange")
            if any(load.strategy == strategy for load in self.loads)
        )
        hosts = "1 host" if self.num_hosts == 1 else f"{self.num_hosts} hosts"
        lines = [
            f"loading {len(self.loads)} arrays ({counts}): {gib(self.source_bytes)} in storage, read "
            f"{self.amplification:.3f}× by {hosts}, at most {gib(most)} by one;",
            f"  {gib(self.bytes_per_device)} on each device, {gib(self.transient_device_bytes)} more while loading",
        ]
        if self.skipped:
            lines.append(f"  missing from the source: {', '.join(self.skipped)}")
        if self.initial:
            lines.append(f"  initialized, not read: {'; '.join(str(init) for init in self.initial)}")
        for load in self.loads:
            if load.derived is not None:
                results = ", ".join(result.leaf.path for result in load.derived.results)
                lines.append(f"  computed from {load.path}, which is not kept: {results}")
        return "\n".join(lines)
