"""Memory of a compiled program on one device, and the traffic of its instructions.

`MemoryFigures` holds what `compiled.memory_analysis()` states. `hbm_traffic` counts what one instruction moves.
"""

from dataclasses import dataclass
from typing import Protocol

from haliax_ext.hlo.text import Computation, Instruction, Module, Shape

_SLICING = ("dynamic-slice", "slice", "gather")


@dataclass(frozen=True, kw_only=True)
class MemoryFigures:
    """Bytes on one device.

    Attributes:
        argument: inputs, layout padding included.
        output: results; those aliased to inputs are in both.
        alias: results written over donated inputs.
        temp: everything alive in between, as the compiler reports it.
        generated_code: the program.
        peak: the compiler's own peak of live bytes; `None` where it states none. It is this number that the TPU
            compiler holds against HBM when it refuses a program (seen by growing one until it was refused); it can be
            less than `total` where results and temporaries share room, and for tiny programs more, with on-chip
            memory in it.
    """

    argument: int
    output: int
    alias: int
    temp: int
    generated_code: int
    peak: int | None = None

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


def hbm_traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes one execution of a scheduled instruction reads from and writes to HBM.

    Arrays that the layout places in on-chip memory do not count. An operand of which a fusion only takes a slice
    counts as the slice, and a result that updates an operand in place counts as the update.
    """
    inner = module.computations.get(instruction.attribute("calls") or "") if instruction.opcode == "fusion" else None
    total = 0
    for position, name in enumerate(instruction.operands):
        operand = computation.by_name.get(name)
        if operand is None:
            continue
        whole = _hbm(operand.shapes)
        total += min(whole, _read(inner, position, whole)) if inner else whole
    if instruction.opcode == "dynamic-update-slice":
        update = computation.by_name.get(instruction.operands[1])
        return 2 * _hbm(update.shapes) if update else 0
    if instruction.opcode in _SLICING:
        return 2 * _hbm(instruction.shapes)
    return total + (_written(inner, instruction) if inner else _hbm(instruction.shapes))


def _hbm(shapes: tuple[Shape, ...]) -> int:
    return sum(shape.nbytes for shape in shapes if shape.memory_space == 0)


def _through(computation: Computation, name: str) -> Instruction | None:
    instruction = computation.by_name.get(name)
    while instruction is not None and instruction.opcode in ("bitcast", "copy", "reshape"):
        instruction = computation.by_name.get(instruction.operands[0])
    return instruction


def _read(inner: Computation, position: int, whole: int) -> int:
    """Bytes of a fusion's operand that are read: all of it, or the slices taken."""
    parameter = inner.parameters.get(position)
    if parameter is None:
        return whole
    users = [i for i in inner.instructions if parameter.name in i.operands]
    if users and all(u.opcode in _SLICING and u.operands[0] == parameter.name for u in users):
        return sum(sum(s.nbytes for s in u.shapes) for u in users)
    if users and all(u.opcode == "dynamic-update-slice" and u.operands[0] == parameter.name for u in users):
        return 0
    return whole


def _written(inner: Computation, fusion: Instruction) -> int:
    root = inner.root
    names = root.operands if root.opcode == "tuple" else (root.name,)
    total = 0
    for name, shape in zip(names, fusion.shapes, strict=False):
        if shape.memory_space != 0:
            continue
        source = _through(inner, name)
        if source is not None and source.opcode == "dynamic-update-slice":
            update = inner.by_name.get(source.operands[1])
            total += sum(s.nbytes for s in update.shapes) if update else shape.nbytes
        else:
            total += shape.nbytes
    return total
