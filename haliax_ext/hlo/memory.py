"""Memory of a compiled program on one device, and the traffic of its instructions.

`MemoryFigures` holds what `compiled.memory_analysis()` states. `hbm_traffic` counts what one instruction moves.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from haliax_ext.hlo.parser import Computation, Instruction, Module, Shape

_SLICING = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "reshape", "transpose", "copy", "convert", "bitcast-convert")
"""Operations that compilers fuse in front of a slice: only the elements that the slice needs are computed."""
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that update their first operand in place → the position of the operand that is the update."""
_ASYNC_COPIES = ("copy-done", "slice-done", "dynamic-slice-done", "dynamic-update-slice-done")


@dataclass(frozen=True, kw_only=True)
class MemoryFigures:
    """Bytes on one device.

    Attributes:
        argument: inputs, layout padding included.
        output: results; those aliased to inputs are in both.
        alias: results written over donated inputs.
        temp: everything alive in between, as the compiler reports it. On TPUs it is up to half more than what is in
            HBM: arrays count in it that never are there together.
        generated_code: the program.
        peak: the compiler's own peak of live bytes; `None` where it states none. On TPUs up to 1 % less than `heap`,
            because arrays cannot be packed without gaps; more for tiny programs, where it includes on-chip memory.
        heap: inputs, new results and temporaries as they are packed into HBM, gaps included; `None` where it is not
            known. The TPU compiler refuses a program by this number, without the program's code.
    """

    argument: int
    output: int
    alias: int
    temp: int
    generated_code: int
    peak: int | None = None
    heap: int | None = None

    @property
    def total(self) -> int:
        """Inputs, outputs that are not inputs, temporaries and code, as if nothing were shared between them."""
        return self.argument + self.output - self.alias + self.temp + self.generated_code


class MemoryStats(Protocol):
    """JAX's `CompiledMemoryStats`, as far as it is read."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    generated_code_size_in_bytes: int


def memory_figures(analysis: MemoryStats) -> MemoryFigures:
    """Reads JAX's `CompiledMemoryStats`."""
    return MemoryFigures(
        argument=analysis.argument_size_in_bytes,
        output=analysis.output_size_in_bytes,
        alias=analysis.alias_size_in_bytes,
        temp=analysis.temp_size_in_bytes,
        generated_code=analysis.generated_code_size_in_bytes,
        peak=getattr(analysis, "peak_memory_in_bytes", None) or None,
    )


def hbm_traffic(module: "Module", computation: "Computation", instruction: "Instruction") -> int:
    """Bytes one execution of a scheduled instruction reads from and writes to HBM.

    Arrays that the layout places in on-chip memory do not count. An operand of which only a slice is taken counts as
    the slice, however the fusion looks at it first (bitcasts, reshapes, conversions, fusions inside the fusion), and a
    result that updates an operand in place counts as the update. The result of a copy that runs beside other work
    counts where the copy ends.
    """
    opcode, operands = instruction.opcode, instruction.operands
    if (fusion := executed_fusion(computation, instruction)) is not None:
        inner = module.computations.get(fusion.attribute("calls") or "")
        if inner is None:
            return _whole(computation, instruction)
        # The start of an asynchronous fusion has its operands, and its end has its results.
        return _operands_read(module, computation, fusion, inner) + _fusion_written(module, inner, instruction)
    if opcode == "fusion-start":
        return 0
    if opcode in _ASYNC_COPIES:
        return _copied(computation, instruction)
    if opcode in _IN_PLACE:
        # The array itself is not read or written as a whole: the compiler updates its buffer in place.
        return _updated(computation, operands[0], operands[_IN_PLACE[opcode]], adds=opcode == "scatter")
    source = computation.by_name.get(operands[0]) if operands else None
    if opcode in _SLICING and source is not None:
        # A slice reads as many bytes as it returns, unless its source is already in on-chip memory.
        read_bytes = sum(shape.nbytes for shape in instruction.shapes) if _hbm(source.shapes) else 0
        return read_bytes + _hbm(instruction.shapes)
    return _whole(computation, instruction)


def executed_fusion(computation: "Computation", instruction: "Instruction") -> "Instruction | None":
    """The instruction with the operands of the fusion that an instruction executes or ends; None for others.

    Compilers for GPUs start some fusions beside other work (`fusion-start`); they count where they end (`fusion-done`).
    """
    if instruction.opcode == "fusion-done":
        return computation.by_name.get(instruction.operands[0])
    return instruction if instruction.opcode == "fusion" else None


def _whole(computation: "Computation", instruction: "Instruction") -> int:
    read = (computation.by_name.get(name) for name in instruction.operands)
    return sum(_hbm(operand.shapes) for operand in read if operand is not None) + _hbm(instruction.shapes)


def _hbm(shapes: "tuple[Shape, ...]") -> int:
    return sum(shape.nbytes for shape in shapes if shape.memory_space == 0)


def _updated(computation: "Computation", array: str, update: str, *, adds: bool) -> int:
    """Bytes of an update in place: it is read, and written to the array, which an addition reads too."""
    target, values = computation.by_name.get(array), computation.by_name.get(update)
    if target is None or values is None:
        return 0
    in_hbm = sum(shape.nbytes for shape in values.shapes) if _hbm(target.shapes) else 0
    return _hbm(values.shapes) + in_hbm * (2 if adds else 1)


def _copied(computation: "Computation", done: "Instruction") -> int:
    """Bytes of an asynchronous copy or slice, from its last instruction: as much arrives as was read."""
    start = computation.by_name.get(done.operands[0])
    if start is None or not start.operands:
        return 0
    if start.opcode == "dynamic-update-slice-start":
        return _updated(computation, start.operands[0], start.operands[1], adds=False)
    source = computation.by_name.get(start.operands[0])
    arriving = sum(shape.nbytes for shape in done.shapes)
    from_hbm = source is not None and _hbm(source.shapes) > 0
    return (arriving if from_hbm else 0) + _hbm(done.shapes)


def _operands_read(module: "Module", computation: "Computation", fusion: "Instruction", inner: "Computation") -> int:
    total = 0
    for position, name in enumerate(fusion.operands):
        operand = computation.by_name.get(name)
        parameter = inner.parameters.get(position)
        if operand is None or parameter is None:
            continue
        whole = _hbm(operand.shapes)
        if whole:
            use = _use(module, inner, parameter.name)
            # A result that is the operand in another layout reads all of it; one that is only another view of it reads
            # nothing. Several slices may overlap, so their sum is capped at the array.
            share = 1.0 if use.passed_on and use.moved else min(1.0, use.share)
            total += math.ceil(whole * share)
    return total


@dataclass(frozen=True)
class _Use:
    """What a computation does with an array: the share it reads, and whether its result is a view of the array.

    `moved` is true if the array's elements must be read to make that view, because it is more than another shape.
    """

    share: float = 0.0
    passed_on: bool = False
    moved: bool = False

    def __add__(self, other: "_Use") -> "_Use":
        return _Use(self.share + other.share, self.passed_on or other.passed_on, self.moved or other.moved)


def _use(module: "Module", computation: "Computation", name: str) -> _Use:
    """The use of `name` by all of its users inside a fusion."""
    elements = _elements(computation.by_name[name])
    # An operand that is itself the fusion's result is passed on, not read.
    use = _Use(passed_on=computation.root.name == name)
    for user in computation.instructions:
        for position, operand in enumerate(user.operands):
            # A parameter's operand is its number, which could be another instruction's name.
            if operand == name and user.opcode not in ("parameter", "constant"):
                use += _one_use(module, computation, user, position, elements)
    return use


def _one_use(module: "Module", computation: "Computation", user: "Instruction", position: int, elements: int) -> _Use:
    if user.opcode in _VIEWS:
        # A bitcast only changes the shape; any other view must read the elements to make its result.
        return _use(module, computation, user.name) + _Use(moved=user.opcode != "bitcast")
    if user.opcode == "tuple" and user.is_root:
        return _Use(passed_on=True)
    if user.opcode == "fusion":
        inner = module.computations.get(user.attribute("calls") or "")
        parameter = inner.parameters.get(position) if inner else None
        if inner is None or parameter is None:
            return _Use(1.0)
        within = _use(module, inner, parameter.name)
        # Looking into the inner fusion keeps a slice inside it from counting as a read of the whole operand.
        # Elements that the inner fusion passes on are read by the users of its result.
        after = _use(module, computation, user.name) if within.passed_on else _Use()
        return _Use(within.share) + after + _Use(moved=within.moved)
    if position == 0 and user.opcode in _SLICING:
        return _Use(_elements(user) / elements if elements else 1.0)
    if position == 0 and user.opcode in _IN_PLACE and _is_result(computation, user):
        # A scatter adds to what is there; an update overwrites it.
        update = computation.by_name.get(user.operands[_IN_PLACE[user.opcode]])
        adds = user.opcode == "scatter" and update is not None and elements
        return _Use(_elements(update) / elements if adds and update is not None else 0.0)
    return _Use(1.0)


def _elements(instruction: "Instruction") -> int:
    return sum(math.prod(shape.sizes) for shape in instruction.shapes)


def _is_result(computation: "Computation", instruction: "Instruction") -> bool:
    """Whether an instruction is used inside its fusion only as the fusion's result."""
    users = [user for user in computation.instructions if instruction.name in user.operands]
    return all(user.opcode == "tuple" or (user.opcode == "bitcast" and _is_result(computation, user)) for user in users)


def _fusion_written(module: "Module", inner: "Computation", fusion: "Instruction") -> int:
    root = inner.root
    names = root.operands if root.opcode == "tuple" else (root.name,)
    # Only the updated part of a result that is updated in place is written, and results in on-chip memory are not in
    # HBM.
    return sum(
        min(shape.nbytes, _written(module, inner, name, shape.nbytes))
        for name, shape in zip(names, fusion.shapes, strict=False)
        if shape.memory_space == 0
    )


def _written(module: "Module", computation: "Computation", name: str, nbytes: int) -> int:
    """Bytes written of a result of `nbytes` that the instruction `name` makes: all, or the update in place."""
    instruction = computation.by_name.get(name)
    while instruction is not None and instruction.opcode == "bitcast":
        instruction = computation.by_name.get(instruction.operands[0])
    if instruction is None:
        return nbytes
    if instruction.opcode == "parameter":
        return 0  # the result is an operand, passed on
    if instruction.opcode == "fusion" and len(instruction.shapes) == 1:
        inner = module.computations.get(instruction.attribute("calls") or "")
        return _written(module, inner, inner.root.name, nbytes) if inner else nbytes
    if instruction.opcode in _IN_PLACE:
        update = computation.by_name.get(instruction.operands[_IN_PLACE[instruction.opcode]])
        return sum(shape.nbytes for shape in update.shapes) if update else nbytes
    return nbytes
