"""XLA's printed modules as values: a `Module` of `Computation`s of `Instruction`s, in schedule order.

What a compiler prints is read here once, and only here: names, opcodes, operands, result shapes, and the raw
attributes, from which the other files of this package take what they need. One line is one instruction, except that
quoted attributes may contain line breaks; a computation ends with a line that is a brace and nothing else.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
    "f4e2m1fn": 4, "f8e8m0fnu": 8, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8,
    "f8e5m2": 8, "f8e5m2fnuz": 8,
}  # fmt: skip


class HloTextError(ValueError):
    """Text that does not read as an optimized HLO module."""


@dataclass(frozen=True)
class Shape:
    """One array of an instruction's result: element type, sizes, and the memory space of its layout (0 is HBM)."""

    dtype: str
    sizes: tuple[int, ...]
    memory_space: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes without layout padding; 0 for tokens and opaque values."""
        return math.ceil(_BITS.get(self.dtype, 0) * math.prod(self.sizes) / 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: unique in the module, without the percent sign.
        opcode: as printed, e.g. `fusion` or `all-gather-start`.
        result: text of the result's shape.
        operands: names of the operands (for constants and parameters: the literal).
        attributes: everything after the operands, as printed.
    """

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool = False

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result, tuples flattened."""
        return parse_shapes(self.result)

    @cached_property
    def op_name(self) -> str:
        """The origin in the source program, e.g. `jit(step)/jvp(layers)/while/body/mlp/dot_general`."""
        match = re.search(r'metadata=\{[^}]*?op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""

    @cached_property
    def estimated_cycles(self) -> int | None:
        """The TPU compiler's own estimate of one execution; `None` where it made none."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(match.group(1)) if match else None

    @cached_property
    def channel(self) -> str | None:
        """The id of the channel that pairs sends with receives; None where the instruction has none."""
        return self.attribute("channel_id")

    def attribute(self, name: str) -> str | None:
        """The plain value of `name=value`, without a percent sign; `None` where it is absent."""
        # A plain value is a word, number or quoted word, which of calls on GPUs has a dollar sign in it; values in
        # braces (`replica_groups`, metadata) have readers of their own.
        match = re.search(rf"(?:^|[\s,]){name}=%?([\w.\-\"$]+)", self.attributes)
        return match.group(1).strip('"') if match else None

    def called(self) -> tuple[str, ...]:
        """Computations that an execution of this instruction runs (not the scalar ones that reductions apply)."""
        names = [self.attribute(key) for key in ("calls", "condition", "body", "true_computation", "false_computation")]
        # `to_apply` of a reduce, scatter or sort is a scalar function; of a `call` it is the computation that runs.
        if self.opcode == "call":
            names.append(self.attribute("to_apply"))
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if branches:
            names += [part.strip().lstrip("%") for part in branches.group(1).split(",")]
        return tuple(name for name in names if name)


@dataclass(frozen=True)
class Computation:
    """A named sequence of instructions, in schedule order: the entry, a loop's body, a fusion."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        # Where no instruction is marked ROOT, the last one is the result.
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        return {int(i.operands[0]): i for i in self.instructions if i.opcode == "parameter"}


@dataclass(frozen=True)
class Module:
    """An optimized, scheduled module as one device runs it."""

    name: str
    computations: dict[str, Computation]
    entry: Computation
    num_partitions: int


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """The arrays in a printed shape, in order: `(f32[2,3]{1,0:T(8,128)S(1)}, u32[])` has two.

    >>> [(shape.dtype, shape.nbytes) for shape in parse_shapes("(f32[2,3]{1,0:T(8,128)S(1)}, u32[])")]
    [('f32', 24), ('u32', 4)]
    """
    shapes: list[Shape] = []
    # A layout reads `{1,0:T(8,128)S(1)}`: axes from minor to major, tiles, and the memory space, which is left out for
    # HBM.
    for match in re.finditer(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?", text):
        dtype, sizes, layout = match.groups()
        space = re.search(r"S\((\d+)\)", layout or "")
        shapes.append(Shape(dtype, tuple(int(s) for s in sizes.split(",") if s), int(space.group(1)) if space else 0))
    return tuple(shapes)


_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")
# A computation of another core, such as a TPU's sparse cores, names its thread after the closing brace.
_END = re.compile(r"\}(, execution_thread=\"[\w.\-]+\")?\s*$")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")


def parse_module(text: str) -> Module:
    """Reads what `compiled.as_text()` prints.

    Raises:
        HloTextError: no entry computation is found.
    """
    header = text[: text.find("\n")]
    computations: dict[str, Computation] = {}
    entry = None
    for is_entry, name, lines in _blocks(text):
        parsed = Computation(name, tuple(_instruction(line) for line in lines))
        computations[name] = parsed
        entry = parsed if is_entry else entry
    if entry is None:
        raise HloTextError(f"no ENTRY computation in {header[:60]!r}…; expected the text of a compiled module")
    partitions = re.search(r"num_partitions=(\d+)", header)
    name = re.match(r"HloModule ([^,\s]+)", header)
    return Module(
        name=name.group(1) if name else "",
        computations=computations,
        entry=entry,
        num_partitions=int(partitions.group(1)) if partitions else 1,
    )


def _blocks(text: str) -> Iterator[tuple[bool, str, list[str]]]:
    """(is entry, name, instruction lines) of every computation, continuation lines joined."""
    current: tuple[bool, str] | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if current is None:
            # A header is `%name (parameters) -> result {`; everything between two computations is skipped.
            if match := _COMPUTATION.match(line):
                current, lines = (match.group(1) is not None, match.group(2)), []
        elif _END.match(line):
            yield (*current, lines)
            current = None
        elif _INSTRUCTION.match(line):
            lines.append(line)
        # Not an instruction of its own: the continuation of a quoted attribute that contains a line break.
        elif lines:
            lines[-1] += line


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    raise HloTextError(f"unbalanced parentheses in {text[:120]!r}…")


def _instruction(line: str) -> Instruction:
    head = _INSTRUCTION.match(line)
    assert head is not None
    at = head.end()
    # A tuple result is in parentheses, which nest; any other result ends at the first space.
    end = _closing(line, at) + 1 if line[at] == "(" else line.index(" ", at)
    result = line[at:end]
    # Tiles such as T(8,128) put parentheses into the result too, so the search begins behind it.
    open_paren = line.index("(", end)
    close = _closing(line, open_paren)
    inside = line[open_paren + 1 : close]
    opcode = line[end:open_paren].strip()
    if opcode in ("parameter", "constant"):
        operands = (inside,)
    else:
        # Operands carry a percent sign in the long form; in the short form the last word of each part is the name.
        operands = tuple(re.findall(r"%([\w.\-]+)", inside)) or tuple(
            part.split()[-1] for part in inside.split(",") if part.strip()
        )
    return Instruction(head.group(2), opcode, result, operands, line[close + 1 :], head.group(1) is not None)
