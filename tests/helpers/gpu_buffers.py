"""A second count of the buffers of a program that is compiled for GPUs, from its scheduled text alone.

It shares no code with `haliax_ext.hlo`. A *buffer* is what one instruction writes; views of it (bitcasts, elements of
tuples, loops' states, results that update an operand in place) have the buffer of their operand. A buffer is live from
the instruction that writes it to the last one that reads it. What a computation needs at one time is the largest sum
over its schedule, with the needs of the loops and calls at that place.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ITEM = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4}
ITEM |= {"u32": 4, "f64": 8, "s64": 8, "u64": 8, "c64": 8}
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
LINE = re.compile(r"^\s*(ROOT )?%([\w.\-]+) = (.*)$")
VIEWS = ("bitcast", "get-tuple-element", "tuple", "while", "opt-barrier", "optimization-barrier")
ALIGNED = 128


@dataclass(frozen=True)
class Counted:
    """Bytes on one device: inputs, results that no input is donated for, and the most of all others at one time."""

    inputs: int
    results: int
    temporaries: int


@dataclass
class Line:
    name: str
    root: bool
    result: str
    opcode: str
    operands: list[str]
    rest: str
    arrays: list[int] = field(default_factory=list)


def sizes(text: str) -> list[int]:
    """Bytes of each array in a printed shape."""
    return [
        ITEM[dtype] * math.prod(int(part) for part in shape.split(",") if part)
        for dtype, shape in ARRAY.findall(re.sub(r"\{[^}]*\}", "", text))
        if dtype in ITEM
    ]


def matching(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise AssertionError(text[:200])


def read(line: str) -> Line | None:
    match = LINE.match(line)
    if match is None:
        return None
    root, name, rest = match.groups()
    end = matching(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result = rest[:end]
    begin = rest.index("(", end)
    close = matching(rest, begin)
    return Line(
        name=name,
        root=root is not None,
        result=result,
        opcode=rest[end:begin].strip(),
        operands=re.findall(r"%([\w.\-]+)", rest[begin:close]) or [rest[begin + 1 : close]],
        rest=rest[close:],
        arrays=sizes(result),
    )


def computations(text: str) -> tuple[dict[str, list[Line]], str]:
    """Every computation's lines by name, and the name of the entry."""
    bodies: dict[str, list[Line]] = {}
    entry, current = "", None
    for row in text.splitlines():
        if current is None and (match := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", row)):
            current = bodies.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif row.startswith("}"):
            current = None
        elif current is not None and (line := read(row)) is not None:
            current.append(line)
    return bodies, entry


@dataclass
class Program:
    bodies: Mapping[str, Sequence[Line]]

    def called(self, line: Line) -> list[str]:
        names = re.findall(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)", line.rest)
        for branches in re.findall(r"branch_computations=\{([^}]*)\}", line.rest):
            names += [name.strip().lstrip("%") for name in branches.split(",")]
        return names

    def in_place(self, line: Line) -> dict[int, str]:
        """By number of the result, the operand whose buffer an instruction writes it to."""
        stated = re.search(r"output_to_operand_aliasing=\{(.*?)\}\)", line.rest)
        if stated:
            pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", stated[0])
            return {int(number or 0): line.operands[int(operand)] for number, operand in pairs}
        if line.opcode in ("dynamic-update-slice", "scatter"):
            return {0: line.operands[0]}
        if line.opcode != "fusion":
            return {}
        inner = self.bodies[self.called(line)[0]]
        by_name = {each.name: each for each in inner}
        root = next(each for each in inner if each.root)
        updated = {}
        for number, name in enumerate(root.operands if root.opcode == "tuple" else [root.name]):
            each = by_name[name]
            updates = False
            while each.opcode in ("bitcast", "dynamic-update-slice", "scatter", "copy", "convert") and each.operands:
                updates |= each.opcode in ("dynamic-update-slice", "scatter")
                if each.opcode in ("copy", "convert"):
                    break
                each = by_name[each.operands[0]]
            if each.opcode == "parameter" and updates:
                updated[number] = line.operands[int(each.operands[0])]
        return updated

    def elementwise(self, line: Line) -> bool:
        """Whether each element of a result depends on the same element of operands of its size alone."""
        if line.opcode in ("convert", "add", "multiply", "copy", "all-reduce", "all-reduce-start"):
            return True
        if line.opcode != "fusion":
            return False
        moving = "transpose dynamic-slice slice gather reverse concatenate pad dot reduce reduce-window fusion iota"
        moving += " copy dynamic-update-slice scatter convolution"
        return not any(each.opcode in moving.split() for each in self.bodies[self.called(line)[0]])

    def peak(self, name: str, donated: Mapping[int, int] | None = None) -> int:
        """The most bytes of buffers that a computation writes at one time, without those that its caller owns.

        Args:
            name: of the computation.
            donated: by number of the result, the parameter whose buffer it is written to. From the last reading of the
                parameter to the writing of the result, others may use it.
        """
        lines = self.bodies[name]
        owners: dict[str, list[tuple[str, int]]] = {}
        bytes_of: dict[tuple[str, int], int] = {}
        inner: dict[int, int] = {}
        for place, line in enumerate(lines):
            owners[line.name], new = self.results(line, owners)
            bytes_of |= {key: -(-size // ALIGNED) * ALIGNED for key, size in new.items()}
            if line.opcode in ("while", "call", "conditional") or line.opcode.endswith("async-start"):
                inner[place] = max((self.peak(each) for each in self.called(line)), default=0)
        root = next(line for line in lines if line.root)
        # What leaves the computation is written where its caller keeps it.
        outside = {*owners[root.name]}
        last: dict[tuple[str, int], int] = {}
        first: dict[tuple[str, int], int] = {}
        for place, line in enumerate(lines):
            for key in owners[line.name]:
                first.setdefault(key, place)
                last.setdefault(key, place)
            # A view reads nothing: what reads the view does.
            if line.opcode not in ("tuple", "get-tuple-element", "bitcast"):
                last.update(dict.fromkeys((key for name in line.operands for key in owners.get(name, ())), place))
        most = 0
        changes: dict[int, int] = {}
        for key, size in bytes_of.items():
            if key in outside:
                continue
            begin, end = first[key], last[key]
            changes[begin] = changes.get(begin, 0) + size
            changes[end + 1] = changes.get(end + 1, 0) - size
        for number, parameter in (donated or {}).items():
            key = owners[root.name][number]
            line = next(one for one in lines if one.opcode == "parameter" and one.operands == [str(parameter)])
            read = last[owners[line.name][0]] + 1
            if key in bytes_of and read < first[key]:
                changes[read] = changes.get(read, 0) - bytes_of[key]
                changes[first[key]] = changes.get(first[key], 0) + bytes_of[key]
        live = 0
        for place, line in enumerate(lines):
            live += changes.get(place, 0)
            most = max(most, live - self.shared(line, place, owners, last, bytes_of, outside) + inner.get(place, 0))
        return most

    def shared(self, line, place, owners, last, bytes_of, outside) -> int:
        """Bytes of a result that takes the place of an operand of its size that nothing reads afterwards."""
        if not self.elementwise(line):
            return 0
        dying = [
            bytes_of[key]
            for name in line.operands
            for key in owners.get(name, ())
            if key in bytes_of and key not in outside and last[key] == place
        ]
        total = 0
        for key in owners[line.name]:
            size = bytes_of.get(key, 0)
            if key[0] == line.name and key not in outside and size in dying:
                dying.remove(size)
                total += size
        return total

    def results(self, line: Line, owners: Mapping[str, list]) -> tuple[list[tuple[str, int]], dict]:
        """The buffers of an instruction's results, and those among them that are new, with their bytes."""
        taken = [key for name in line.operands for key in owners.get(name, ())]
        if line.opcode in ("parameter", "constant"):
            return [(f"{line.opcode} {line.name}", number) for number in range(len(line.arrays))], {}
        if line.opcode == "get-tuple-element":
            number = int(line.rest.split("index=")[1].split(",")[0].split()[0])
            return self.element(line, owners, number), {}
        if line.opcode in VIEWS:
            return taken, {}
        if line.opcode.endswith("-done"):
            # A start returns its operands, its results and a context; the results have as many arrays as the end has.
            kept = owners[line.operands[0]]
            start = [key for key in kept if key[0] == line.operands[0]]
            return start[: len(line.arrays)], {}
        if line.opcode.endswith("-start"):
            count = len(taken)
            fresh = {(line.name, number): size for number, size in enumerate(line.arrays[count:])}
            return [*taken, *fresh], fresh
        updates = self.in_place(line)
        keys, fresh = [], {}
        for number, size in enumerate(line.arrays):
            operand = updates.get(number)
            if operand is not None and owners.get(operand):
                keys += owners[operand][:1]
            else:
                keys.append((line.name, number))
                fresh[line.name, number] = size
        return keys, fresh

    def element(self, line: Line, owners: Mapping[str, list], number: int) -> list[tuple[str, int]]:
        # Tuples here hold arrays only, so an element is one buffer; a start's nested operands are never taken apart.
        return owners[line.operands[0]][number : number + 1]


def count(text: str) -> Counted:
    """The bytes of a program."""
    bodies, entry = computations(text)
    program = Program(bodies)
    lines = bodies[entry]
    inputs = sum(sum(line.arrays) for line in lines if line.opcode == "parameter")
    root = next(line for line in lines if line.root)
    header = text[: text.index("\n")]
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}, (?:may|must)-alias\)", header)
    donated = {int(number or 0): int(parameter) for number, parameter in pairs}
    results = sum(size for number, size in enumerate(root.arrays) if number not in donated)
    return Counted(inputs=inputs, results=results, temporaries=program.peak(entry, donated))
