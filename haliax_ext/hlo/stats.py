"""`CompiledFigures`: what one execution of a compiled program costs one device, summed over its loops.

The figures are read from the optimized, scheduled text of a module (see `parser`), with every while body multiplied by
its trip count (see `trip_counts`). Nothing is guessed: a loop whose count is not known counts once and is listed in
`unknown`. Instructions that do work but carry no estimate are listed in `unestimated`, kernels written by hand in
`kernels` (the compiler sees an opaque call).

*Cycles* are the TPU compiler's own estimates, printed with each fusion; a GPU compiler prints none, and the caller may
estimate each kernel from its work (`kernel_work`) in a unit of its own. *Bytes* of a collective are those of the
whole array that a group shares or reduces: the result of an all-gather, the operand of a reduce-scatter, all-reduce,
all-to-all or permute. A collective is *overlapped* as far as other instructions are scheduled between its start and
its end; their cycles are its `hidden_cycles`, and no cycle hides two collectives that use the same links (the same mesh
axes, and for a permute the same direction).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from haliax_ext.hlo.memory import hbm_traffic
from haliax_ext.hlo.op_metadata import UNLIKELY, Scope, parse_scope
from haliax_ext.hlo.parser import Computation, Instruction, Module, Shape, parse_module
from haliax_ext.hlo.replica_groups import (
    AxisSpan,
    Network,
    inner_mesh,
    network,
    pair_spans,
    parse_groups,
    parse_pairs,
    spans,
)
from haliax_ext.hlo.trip_counts import trip_count
from haliax_ext.meshspec import MeshSpec

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
# Instructions that take no time of the core: bookkeeping, and transfers that run beside it.
_FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
     "copy-start", "slice-start", "async-update", "opt-barrier", "add-dependency",
     "get-dimension-size", "domain", "send", "recv", "send-done", "recv-done", "infeed", "outfeed",
     "dynamic-slice-start", "dynamic-update-slice-start")
)  # fmt: skip
_KERNEL_TARGETS = ("tpu_custom_call", "__gpu$xla.gpu.triton")
LARGE_COPY = 16 << 20
"""Bytes moved at once from which an instruction without an estimate counts as a copy of them, and not as nothing."""
_COMPILER_KERNELS = frozenset(("ragged-dot", "sort"))
"""Instructions that the compiler turns into kernels without an estimate: their shapes are recorded instead."""


@dataclass(frozen=True)
class Collective:
    """One collective of the schedule.

    Attributes:
        kind: `all-gather`, `all-reduce`, …
        bytes: of the whole array (see the module's text), for one execution.
        times: executions.
        members: devices in a group.
        spans: mesh axes that a group covers; `None` if its groups are no block of the mesh.
        network: `ici`, `dcn`, or `unknown`.
        scope: the module it serves.
        hidden_cycles: cycles of other work scheduled while one execution is under way; 0 for a synchronous one.
        name: the instruction.
        hidden_by: kernels scheduled meanwhile, whose time is not known here. Each has a key that is the same for all
            collectives over the same links, so that no second of a kernel hides two of them.
    """

    kind: str
    bytes: int
    times: int
    members: int
    spans: tuple[AxisSpan, ...] | None
    network: Network
    scope: Scope
    hidden_cycles: int
    name: str
    hidden_by: tuple[tuple[str, "Kernel"], ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes over all executions."""
        return self.bytes * self.times

    @property
    def over(self) -> str:
        """The mesh axes, as text."""
        return "unknown" if self.spans is None else " × ".join(map(str, self.spans)) or "(one device)"


@dataclass(frozen=True)
class Kernel:
    """A call of a hand-written kernel, whose cost the compiler does not know, or an instruction (`ragged-dot`, `sort`)
    that the compiler turns into a kernel without an estimate."""

    name: str
    times: int
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    scope: Scope


@dataclass(frozen=True, kw_only=True)
class CompiledFigures:
    """Sums over one execution on one device.

    Attributes:
        cycles: estimated cycles by scope; empty where the compiler prints none (CPU, GPU).
        has_cycles: whether the compiler prints estimates at all.
        hbm_bytes: bytes read from and written to HBM by the scheduled instructions, each reading its operands once.
        collectives: in schedule order.
        kernels: hand-written kernels, grouped products and sorts, without cycles.
        unestimated: opcodes that do work but carry no estimate → executions.
        copied_bytes: of `hbm_bytes`, those that instructions without an estimate move, where one of them moves
            `LARGE_COPY` or more: a `reshape` that changes the layout of an array, say, takes as long as its bytes do.
        unknown: sentences about what could not be determined.
        workspace_bytes: that a library will ask for on the device and that no text states.
    """

    cycles: dict[Scope, int]
    has_cycles: bool
    hbm_bytes: int
    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]
    unestimated: dict[str, int]
    unknown: tuple[str, ...]
    copied_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def total_cycles(self) -> int:
        """Estimated cycles of one execution, all scopes together."""
        return sum(self.cycles.values())

    def cycles_by_module(self, depth: int) -> dict[str, int]:
        """Cycles summed by the first `depth` names of the module, all passes together, largest first."""
        sums: Counter[str] = Counter()
        for scope, cycles in self.cycles.items():
            sums[scope.at_depth(depth).module] += cycles
        return dict(sums.most_common())

    def collective_bytes(self) -> dict[tuple[str, str, Network], int]:
        """Total bytes by (kind, mesh axes, network), largest first."""
        sums: Counter[tuple[str, str, Network]] = Counter()
        for c in self.collectives:
            sums[c.kind, c.over, c.network] += c.total_bytes
        return dict(sums.most_common())


class KernelEstimator(Protocol):
    """Estimates kernels of a compiler that prints no cycles."""

    def cycles(self, module: Module, computation: Computation, instruction: Instruction) -> tuple[int, int]:
        """Cycles of one execution, in a unit that the caller chooses, and the bytes that it moves; 0 for a marker."""
        ...

    def workspace(self, module: Module) -> int:
        """Bytes that a library will ask for on the device and that the text does not state."""
        ...


def read_figures(
    text: str, mesh: MeshSpec, *, trips: Mapping[int, int] | None = None, estimate: KernelEstimator | None = None
) -> CompiledFigures:
    """Reads the optimized text of a program compiled for `mesh`.

    Args:
        text: what the compiler prints.
        mesh: what it was compiled for.
        trips: trip counts to replace. A program that scans 7 layers, read with `{7: 80}`, has the figures of one that
            scans 80, as long as nothing else in it runs 7 times.
        estimate: of kernels for which the compiler prints none; without it they are listed in `unestimated`.

    Raises:
        HloTextError: the text is not that of a compiled module.
    """
    reader = _Reader(parse_module(text), mesh, trips or {}, estimate)
    reader.visit(reader.module.entry, 1)
    return reader.figures()


@dataclass
class _Flight:
    """A collective while the schedule is walked: where it starts, where it ends, what hides it."""

    kind: str
    first: int
    last: int
    source: Instruction
    shapes: tuple[Shape, ...]
    hidden: int = 0
    hidden_by: list[tuple[str, Kernel]] = field(default_factory=list[tuple[str, Kernel]])


_Call = tuple[str, tuple[Shape, ...], tuple[Shape, ...], Scope]
"""A custom kernel's name, operands, results and scope."""


@dataclass
class _Reader:
    module: Module
    mesh: MeshSpec
    trips: Mapping[int, int]
    estimate: KernelEstimator | None = None
    cycles: Counter[Scope] = field(default_factory=Counter[Scope])
    estimates: int = 0
    hbm_bytes: int = 0
    copied_bytes: int = 0
    collectives: list[Collective] = field(default_factory=list[Collective])
    kernels: Counter[_Call] = field(default_factory=Counter[_Call])
    unestimated: Counter[str] = field(default_factory=Counter[str])
    unknown: dict[str, None] = field(default_factory=dict[str, None])

    def figures(self) -> CompiledFigures:
        return CompiledFigures(
            cycles=dict(self.cycles.most_common()),
            has_cycles=self.estimates > 0,
            hbm_bytes=self.hbm_bytes,
            collectives=tuple(self.collectives),
            kernels=tuple(Kernel(n, times, o, r, s) for (n, o, r, s), times in self.kernels.items()),
            unestimated=dict(self.unestimated),
            unknown=tuple(self.unknown),
            copied_bytes=self.copied_bytes,
            workspace_bytes=0 if self.estimate is None else self.estimate.workspace(self.module),
        )

    def visit(self, computation: Computation, times: int) -> int:
        """Adds `times` executions; returns the cycles of one."""
        # The cycles of one execution by position; a loop's entry holds all of its trips, so that a collective that
        # spans a loop is hidden by the whole loop.
        cycles_by_position = [
            self._instruction(computation, instruction, times) for instruction in computation.instructions
        ]
        self._flights(computation, cycles_by_position, times)
        return sum(cycles_by_position)

    def _kernel_at(self, computation: Computation, call: Instruction) -> Kernel | None:
        """The hand-written kernel that an instruction is, once."""
        if call.opcode != "custom-call" or call.attribute("custom_call_target") not in _KERNEL_TARGETS:
            return None
        name, operands, results, scope = self._call(computation, call)
        return Kernel(name, 1, operands, results, scope)

    def _instruction(self, computation: Computation, instruction: Instruction, times: int) -> int:
        opcode = instruction.opcode
        if opcode == "while":
            return self._loop(computation, instruction, times)
        if opcode == "call":
            return sum(self.visit(self.module.computations[name], times) for name in instruction.called())
        if opcode == "conditional":
            # The program says which of its branches hardly ever runs.
            branches = [self.module.computations[name] for name in instruction.called()]
            likely = [branch for branch in branches if not any(UNLIKELY in i.op_name for i in branch.instructions)]
            if len(likely) != 1:
                message = f"{instruction.name}: it is not known which branch runs; all branches are counted"
                self.unknown[message] = None
            return sum(self.visit(branch, times) for branch in (likely if len(likely) == 1 else branches))
        # Collectives are counted by `_flights`, and `async-` wrappers with the collective that they wrap.
        if opcode in _FREE or opcode.startswith(KINDS) or opcode.startswith("async-"):
            return 0
        if self.estimate is not None and instruction.estimated_cycles is None:
            return self._estimated(computation, instruction, times, self.estimate)
        if opcode == "custom-call":
            if instruction.attribute("custom_call_target") in _KERNEL_TARGETS:
                self._kernel(computation, instruction, times)
            # Any other custom call without an estimate is taken for a marker that does no work.
            elif instruction.estimated_cycles is None:
                return 0
        # Traffic counts for kernels and unestimated instructions too: it needs shapes only.
        moved = hbm_traffic(self.module, computation, instruction)
        self.hbm_bytes += times * moved
        estimate = instruction.estimated_cycles
        if estimate is None and opcode in _COMPILER_KERNELS:
            self._kernel(computation, instruction, times)
            return 0
        if estimate is None:
            # Results of at most 1 KiB are scalars and counters: they are not worth a line in the report.
            if (
                opcode != "custom-call"
                # What runs beside other work costs the schedule nothing but its traffic.
                and not opcode.endswith("-done")
                and any(s.nbytes > 1024 for s in instruction.shapes)
                and not self._carries(instruction)
            ):
                self.unestimated[opcode] += times
                self.copied_bytes += times * moved if moved >= LARGE_COPY else 0
            return 0
        self.estimates += 1
        self.cycles[self._scope(instruction)] += estimate * times
        return estimate

    def _estimated(
        self, computation: Computation, instruction: Instruction, times: int, estimate: KernelEstimator
    ) -> int:
        """The caller's estimate of a kernel, which counts like one of the compiler."""
        if self._kernel_at(computation, instruction) is not None:
            # What a hand-written kernel computes does not follow from its shapes.
            self._kernel(computation, instruction, times)
            return 0
        cycles, moved = estimate.cycles(self.module, computation, instruction)
        # Markers and views of arrays take no time.
        if not cycles:
            return 0
        self.estimates += 1
        self.hbm_bytes += times * moved
        self.cycles[self._scope(instruction)] += cycles * times
        return cycles

    def _loop(self, computation: Computation, loop: Instruction, times: int) -> int:
        count = trip_count(self.module, computation, loop)
        # `trips` replaces a count by value: the program was compiled with fewer layers than the run has.
        count = self.trips.get(count, count) if count is not None else None
        if count is None:
            self.unknown[
                f"{loop.name} ({loop.op_name or 'no name'}): its trip count is not known; it is counted once"
            ] = None
        body = self.module.computations[loop.attribute("body") or ""]
        return (count if count is not None else 1) * self.visit(body, times * (count if count is not None else 1))

    def _kernel(self, computation: Computation, call: Instruction, times: int) -> None:
        self.kernels[self._call(computation, call)] += times

    def _call(self, computation: Computation, call: Instruction) -> _Call:
        operands = tuple(shape for name in call.operands if (i := computation.by_name.get(name)) for shape in i.shapes)
        name = call.name.split(".")[0] if call.opcode == "custom-call" else call.opcode
        return name, operands, call.shapes, self._scope(call)

    def _scope(self, instruction: Instruction) -> Scope:
        """The instruction's own scope; for a fusion without one, that of what it fuses."""
        scope = parse_scope(instruction.op_name)
        # A fusion without a path of its own takes that of the last instruction inside it that has one.
        if instruction.opcode != "fusion" or "/" in instruction.op_name:
            return scope
        inner = self.module.computations.get(instruction.attribute("calls") or "")
        names = [i.op_name for i in inner.instructions if "/" in i.op_name] if inner else []
        return parse_scope(names[-1]) if names else scope

    def _carries(self, instruction: Instruction) -> bool:
        """Whether a fusion is there for a collective inside it."""
        return any(True for _ in self._inside(instruction))

    def _inside(self, instruction: Instruction) -> Iterator[Instruction]:
        if instruction.opcode not in ("fusion", "async-start"):
            return
        inner = self.module.computations.get(instruction.attribute("calls") or "")
        for i in inner.instructions if inner else ():
            if _kind(i.opcode):
                yield i
            elif i.opcode == "fusion":
                yield from self._inside(i)

    def _flights(self, computation: Computation, cycles: list[int], times: int) -> None:
        """Finds each collective's first and last instruction, and shares out the work in between."""
        flights: dict[str, _Flight] = {}
        for index, instruction in enumerate(computation.instructions):
            opcode = instruction.opcode
            # The first operand of a `-done` is its `-start`.
            if opcode.endswith("-done") and instruction.operands and instruction.operands[0] in flights:
                flights[instruction.operands[0]].last = index
                continue
            kind = _kind(opcode)
            if kind:
                shapes = _payload(computation, instruction, kind)
                flights[instruction.name] = _Flight(kind, index, index, instruction, shapes)
            # Collectives over DCN are printed as sends of the multi-slice runtime, not as collective instructions.
            elif opcode == "send" and "xla_megascale" in instruction.attributes:
                flights[instruction.name] = _Flight(_megascale_kind(instruction), index, index, instruction, ())
            for inner in self._inside(instruction):
                # One collective may be spread over several fusions, which then share its channel.
                key = f"channel {inner.channel}" if inner.channel else instruction.name
                if key in flights:
                    flights[key].last = index
                    continue
                within = self.module.computations[instruction.attribute("calls") or ""]
                shapes = _payload(within, inner, _kind(inner.opcode) or "")
                kind = _kind(inner.opcode) or ""
                if kind == "all-reduce" and _scatters(instruction, inner):
                    kind = "reduce-scatter"
                flights[key] = _Flight(kind, index, index, inner, shapes)
                # The `async-done` that ends this collective names the wrapper as its operand, not the collective
                # inside.
                if opcode == "async-start":
                    flights[instruction.name] = flights[key]
        # A wrapped collective is in the table under two keys; it is one flight.
        unique = list({id(flight): flight for flight in flights.values()}.values())
        self._emit(unique, computation, cycles, times)

    def _emit(self, flights: list[_Flight], computation: Computation, cycles: list[int], times: int) -> None:
        built = [(flight, *self._placed(flight)) for flight in flights]
        # (links, position) whose cycles already hide a collective: one cycle hides only one transfer over the same
        # links.
        used_cycles: set[tuple[str, int]] = set()
        for flight, covered, net, members in built:
            links = f"{covered} {_direction(flight.source)}"
            # A synchronous collective starts and ends at one position and is hidden by nothing.
            for index in range(flight.first, flight.last + 1) if flight.last > flight.first else ():
                if cycles[index] and (links, index) not in used_cycles:
                    used_cycles.add((links, index))
                    flight.hidden += cycles[index]
                if kernel := self._kernel_at(computation, computation.instructions[index]):
                    flight.hidden_by.append((f"{computation.instructions[index].name} {links}", kernel))
            nbytes = sum(shape.nbytes for shape in flight.shapes)
            # A send carries no operand shapes here; the first element of its result is the buffer that is sent.
            if net == "dcn" and not nbytes:
                nbytes = flight.source.shapes[0].nbytes
            scope = parse_scope(flight.source.op_name)
            self.collectives.append(
                Collective(
                    flight.kind,
                    nbytes,
                    times,
                    members,
                    covered,
                    net,
                    scope,
                    flight.hidden,
                    flight.source.name,
                    tuple(flight.hidden_by),
                )
            )

    def _placed(self, flight: _Flight) -> tuple[tuple[AxisSpan, ...] | None, Network, int]:
        """Mesh axes, network and group size."""
        source = flight.source
        if source.opcode == "send":
            axes = tuple(AxisSpan(name, size, size) for name, size in self.mesh.axes if name in self.mesh.dcn)
            return axes or None, "dcn", self.mesh.num_granules
        inside = inner_mesh(self.mesh, self.module.num_partitions)
        if inside is None:
            self.unknown[
                f"the module has {self.module.num_partitions} partitions, mesh {self.mesh} has {self.mesh.size} "
                "devices: "
                "the mesh axes of its collectives cannot be determined"
            ] = None
            return None, "unknown", 0
        # A permute has pairs instead of groups: every device sends to one other.
        if flight.kind == "collective-permute":
            pairs = parse_pairs(source.attributes)
            covered = pair_spans(pairs, inside) if pairs is not None else None
            return covered, network(covered, self.mesh), 2
        groups = parse_groups(source.attributes, inside.size)
        if groups is None:
            self.unknown[f"{source.name}: the format of its replica groups is not recognized"] = None
            return None, "unknown", 0
        covered = spans(groups, inside)
        return covered, network(covered, self.mesh), groups.shape[1]


def _kind(opcode: str) -> str | None:
    base = opcode.removesuffix("-start")
    return base if base in KINDS else None


def _payload(computation: Computation, instruction: Instruction, kind: str) -> tuple[Shape, ...]:
    """The arrays whose bytes count: the gathered result, or what goes in."""
    if kind == "all-gather" and instruction.opcode == "all-gather":
        return instruction.shapes
    operands = tuple(s for name in instruction.operands if (i := computation.by_name.get(name)) for s in i.shapes)
    if kind == "all-gather":
        # A start's result holds the operands, the results, and bookkeeping.
        return instruction.shapes[len(operands) : 2 * len(operands)]
    return operands or instruction.shapes


def _direction(instruction: Instruction) -> int:
    """The direction in which a permute sends most of its data: 1 or -1; 0 for other collectives."""
    pairs = parse_pairs(instruction.attributes)
    # In a ring one pair closes the circle and points the other way, so the majority decides.
    return 0 if pairs is None else int(np.sign(np.sign(pairs[:, 1] - pairs[:, 0]).sum()))


def _scatters(fusion: Instruction, reduce: Instruction) -> bool:
    """Whether a fusion hands on only a part of what it reduces, which is a reduce-scatter."""
    return sum(s.nbytes for s in fusion.shapes) < sum(s.nbytes for s in reduce.shapes)


def _megascale_kind(send: Instruction) -> str:
    name = send.attribute("_xla_megascale_transfer_type") or "transfer"
    return name.lower().replace("_", "-")
