"""`LoadPlan`: how every leaf gets from a source to its shards, known before a weight is read.

For every leaf the plan holds one of two strategies. *direct*: each host reads what its own devices hold. *exchange*:
each byte is read by one host, and the devices exchange (`exchange`). `load_strategy` chooses; `loading` carries it out.
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
from haliax_ext.leaf_layout import Box, LeafLayout, Span
from haliax_ext.load_transforms import LoadTransform, begin_derived_program, derive_piece_program, derive_program
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import ShardingPlan
from haliax_ext.program import Program
from haliax_ext.read_plan import GAP_BYTES, ReadUnit, shard_boxes, units
from haliax_ext.reshard import Exchange
from haliax_ext.reshard_programs import begin_program, piece_program, seconds_program, whole_program
from haliax_ext.rules import WeightRule
from haliax_ext.sources import RemoteReads

TOGETHER_BYTES = 64 << 20
"""Leaves are exchanged by one Program up to this transient on a device: small ones need not be compiled one by one."""
CHUNK_BYTES = 8 << 20
"""Bytes of one read."""


def default_memory_bytes(local_device_bytes: int) -> int:
    """The host-memory budget beyond the arrays: a tenth of them, at least 256 MiB, at most 4 GiB."""
    return min(4 << 30, max(256 << 20, local_device_bytes // 10))


@dataclass(frozen=True, kw_only=True)
class LeafLoad:
    """How one leaf is loaded.

    Attributes:
        leaf: path, axes and the dtype it is loaded in.
        rule: where it comes from.
        layout: how it lies there.
        sources: names of its source tensors.
        source_dtype: the dtype they are read in.
        bytes_per_element: storage bytes of a source element (not whole for quantized sources).
        strategy: `direct` or `exchange`.
        spec: how it is cut in the end.
        exchange: for the strategy of that name; for a leaf that others are derived from, always: how it arrives.
        bytes_by_host: bytes each host reads.
        source_bytes: bytes the leaf has in storage.
        direct_amplification: how many times its bytes direct reading would read.
        amplification: how many times they are read.
        transient_device_bytes: the most on a device beyond the leaf itself.
        transient_host_bytes: the most on a host at a time, read buffers apart.
        reason: why this strategy.
        derived: what becomes of it, where it is read and not kept.
    """

    leaf: Leaf
    rule: WeightRule
    layout: LeafLayout
    sources: tuple[str, ...]
    source_dtype: np.dtype
    bytes_per_element: float
    strategy: Literal["direct", "exchange"]
    spec: PartitionSpec
    exchange: Exchange | None
    bytes_by_host: tuple[int, ...]
    source_bytes: int
    direct_amplification: float
    amplification: float
    transient_device_bytes: int
    transient_host_bytes: int
    reason: str
    derived: LoadTransform | None = None

    @property
    def path(self) -> str:
        """The leaf's path."""
        return self.leaf.path

    @property
    def read_alike(self) -> Hashable:
        """What it has in common with the leaves that are read together with it, piece by piece."""
        alone = self.path if self.derived is not None else ""
        return self.sources, self.pieces, self.exchange is None, alone

    @property
    def exchanged_alike(self) -> Hashable:
        """What decides its exchange: all but the leaf's path."""
        assert self.exchange is not None
        return replace(self.exchange, leaf=replace(self.leaf, path="")), self.spec

    @property
    def results(self) -> tuple[tuple[Leaf, PartitionSpec], ...]:
        """The leaves that loading gives, and how they are cut: itself, or what is derived from it."""
        if self.derived is None:
            return ((self.leaf, self.spec),)
        return tuple((result.leaf, result.spec) for result in self.derived.results)

    def shard_bytes(self, mesh: MeshSpec) -> int:
        """Bytes on one device of what loading gives."""
        return sum(
            leaf.nbytes // math.prod(mesh.ways(entry) for entry in spec if entry is not None)
            for leaf, spec in self.results
        )

    @property
    def pieces(self) -> tuple[Span, ...]:
        """The pieces it is loaded in; one for direct reading."""
        return self.exchange.pieces if self.exchange is not None else ((0, 0),)

    def device_boxes(self, mesh: MeshSpec, piece: Span) -> np.ndarray:
        """The boxes `[devices, axes, 2]` of the leaf that devices are filled with for a piece."""
        if self.exchange is None:
            return shard_boxes(self.leaf.shape, self.spec, mesh)
        return self.exchange.slab_boxes(piece)

    def units(self, boxes: Sequence[Box]) -> tuple[ReadUnit, ...]:
        """How distinct blocks are read."""
        # Slabs are cut so that bytes are read once; reading through gaps would undo that.
        gap = GAP_BYTES if self.strategy == "direct" else 0
        return units(self.layout, boxes, itemsize=self.source_dtype.itemsize, gap_bytes=gap)

    def chunk(self, nbytes: int = CHUNK_BYTES) -> int:
        """Elements of one read of about `nbytes`."""
        return max(nbytes // self.source_dtype.itemsize, 1)


@dataclass(frozen=True, kw_only=True)
class LoadStep:
    """Leaves, or a piece of one, that arrive together.

    Attributes:
        loads: one leaf, those that share its source tensors where they are read directly, or several small ones that
            are exchanged together.
        piece: which piece of a leaf that arrives in several; None: all of it.
    """

    loads: tuple[LeafLoad, ...]
    piece: Span | None = None


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """How every leaf is loaded.

    Attributes:
        sharding: where everything goes.
        loads: one for each leaf, in the order of the sharding plan.
        hosts: the host of each device, in the mesh's row-major order.
        skipped: paths of optional leaves that the source lacks.
        initial: leaves that are made and not read.
        remote: how the source is read, where it is on another machine.
        name: what the names of its Programs begin with, where a run loads more than one model.
    """

    sharding: ShardingPlan
    loads: tuple[LeafLoad, ...]
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
        """How many hosts read."""
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
        """How many times the job reads the checkpoint."""
        return sum(self.bytes_by_host) / max(self.source_bytes, 1)

    @property
    def transient_device_bytes(self) -> int:
        """The most that loading needs on a device beyond the arrays."""
        steps = (sum(load.transient_device_bytes for load in step.loads) for step in self.steps)
        return max(self.initial_transient_bytes, *steps, 0)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the loaded arrays on one device."""
        return self.initial_bytes + sum(load.shard_bytes(self.sharding.mesh) for load in self.loads)

    @property
    def initial_bytes(self) -> int:
        """Bytes on one device of the leaves that are made."""
        places = [(made.leaf, self.sharding.by_path[made.path].shard_shape) for made in self.initial]
        return sum(math.prod(shape) * leaf.dtype.itemsize for leaf, shape in places)

    @property
    def initial_transient_bytes(self) -> int:
        """The most on a device, beside them, while the leaves of `initial` are made: random bits, and float32."""
        return sum(8 * math.prod(self.sharding.by_path[made.path].shard_shape) for made in self.initial)

    def local_bytes(self, host: int) -> int:
        """Bytes of the loaded arrays on all devices of a host."""
        return self.bytes_per_device * self.hosts.count(host)

    def devices_of(self, host: int) -> np.ndarray:
        """Numbers, in the mesh's row-major order, of a host's devices."""
        return np.flatnonzero(np.asarray(self.hosts) == host)

    @cached_property
    def steps(self) -> tuple[LoadStep, ...]:
        """What is loaded one after another; the same on all hosts."""
        found: list[LoadStep] = []
        together: list[LeafLoad] = []
        room = 0

        def flush() -> None:
            if together:
                found.append(LoadStep(loads=tuple(together)))
                together.clear()

        # Leaves that share source tensors lie side by side there, piece by piece.
        kin: dict[Hashable, list[LeafLoad]] = {}
        for load in self.loads:
            kin.setdefault(load.read_alike, []).append(load)
        for load in self.loads:
            same = kin[load.read_alike]
            if load.exchange is None:
                if same[0] is load:
                    found.append(LoadStep(loads=tuple(same)))
            elif load.exchange.cut is not None:
                if same[0] is load:
                    found += [LoadStep(loads=(each,), piece=piece) for piece in load.pieces for each in same]
            elif load.derived is not None:
                found.append(LoadStep(loads=(load,)))
            elif same[0] is load:
                needed = sum(each.transient_device_bytes for each in same)
                room += needed
                if room > TOGETHER_BYTES:
                    flush()
                    room = needed
                if needed > TOGETHER_BYTES and len(same) > 1:
                    found += [LoadStep(loads=(each,)) for each in same]
                    room = 0
                else:
                    together += same
        flush()
        return tuple(found)

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """Every Program that loading runs, in the order of first use."""
        found: dict[str, Program] = {}
        if self.initial:
            program = self.initialize_program
            found[program.name] = program
        for step in self.steps:
            for program in self.step_programs(step):
                found.setdefault(program.name, program)
        if self.num_hosts > 1:
            program = seconds_program(self.sharding.mesh)
            found[program.name] = program
        return tuple(found.values())

    @cached_property
    def initialize_program(self) -> Program:
        """The Program that makes the leaves of `initial`."""
        return replace(initialize_program(self.initial, self.sharding), name=f"{self.name}.initialize")

    def step_programs(self, step: LoadStep) -> tuple[Program, ...]:
        """The Programs of a step: none (direct), the exchange, or making room and the exchange of a piece."""
        return self._step_programs[self.steps.index(step)]

    @cached_property
    def _step_programs(self) -> tuple[tuple[Program, ...], ...]:
        made: dict[str, Program] = {}
        # Exchanges that differ in nothing but their leaves' paths are one Program, which has the paths of the first.
        first: dict[Hashable, LoadStep] = {}
        found: list[tuple[Program, ...]] = []
        for step in self.steps:
            programs: list[Program] = []
            exchange, derived = step.loads[0].exchange, step.loads[0].derived
            if exchange is not None and derived is not None:
                programs += self._derive_programs(step, exchange, derived, made)
            elif exchange is not None:
                alike = first.setdefault(tuple(load.exchanged_alike for load in step.loads), step)
                exchanges = [load.exchange for load in alike.loads if load.exchange is not None]
                path, piece = exchanges[0].leaf.path, step.piece
                if piece is None:
                    name = f"{self.name}.exchange.{self.steps.index(alike)}"
                    if name not in made:
                        made[name] = whole_program(name, exchanges, self.sharding)
                    programs.append(made[name])
                else:
                    begin, put = f"{self.name}.begin.{path}", f"{self.name}.exchange.{path}.{piece[1] - piece[0]}"
                    if begin not in made:
                        made[begin] = begin_program(begin, exchanges[0], self.sharding)
                    if put not in made:
                        made[put] = piece_program(put, exchanges[0], piece, self.sharding)
                    programs += [made[begin], made[put]]
            found.append(tuple(programs))
        return tuple(found)

    def _derive_programs(
        self, step: LoadStep, exchange: Exchange, derived: LoadTransform, made: dict[str, Program]
    ) -> tuple[Program, ...]:
        path = exchange.leaf.path
        if step.piece is None:
            return (derive_program(f"{self.name}.derive.{path}", exchange, derived, self.sharding),)
        begin, put = f"{self.name}.begin.{path}", f"{self.name}.derive.{path}.{step.piece[1] - step.piece[0]}"
        if begin not in made:
            made[begin] = begin_derived_program(begin, derived.results, self.sharding)
        if put not in made:
            made[put] = derive_piece_program(put, exchange, derived, step.piece, self.sharding)
        return made[begin], made[put]

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
        ways = ", ".join(
            f"{sum(load.strategy == way for load in self.loads)} {way}"
            for way in ("direct", "exchange")
            if any(load.strategy == way for load in self.loads)
        )
        hosts = "1 host" if self.num_hosts == 1 else f"{self.num_hosts} hosts"
        lines = [
            f"loading {len(self.loads)} arrays ({ways}): {gib(self.source_bytes)} in storage, read "
            f"{self.amplification:.3f}× by {hosts}, at most {gib(most)} by one;",
            f"  {gib(self.bytes_per_device)} on each device, {gib(self.transient_device_bytes)} more while loading",
        ]
        if self.skipped:
            lines.append(f"  missing from the source: {', '.join(self.skipped)}")
        if self.initial:
            lines.append(f"  initialized, not read: {'; '.join(str(each) for each in self.initial)}")
        for load in self.loads:
            if load.derived is not None:
                results = ", ".join(result.leaf.path for result in load.derived.results)
                lines.append(f"  computed from {load.path}, which is not kept: {results}")
        return "\n".join(lines)
