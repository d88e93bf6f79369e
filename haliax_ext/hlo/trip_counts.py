"""The number of times that the body of a while loop runs.

A counted loop carries an integer in its state, starts it at a constant, adds a constant in the body, and compares it
with a constant in the condition. All three are looked up, since a step of 2 is common (the loops in which the
partitioner interleaves a matmul with its collective are unrolled once). CPU and GPU compilers print the count. Where
neither way gives a count it is `None`.
"""

import math
import re
from collections.abc import Callable

from haliax_ext.hlo.parser import Computation, Instruction, Module

Initial = Callable[[int], int | None]
"""Position in the loop's state → the constant that this element starts at; None where it is no constant."""
_COPIES = ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start", "broadcast")


def trip_count(module: Module, parent: Computation, loop: Instruction) -> int | None:
    """The number of times the body of `loop`, an instruction of `parent`, runs; `None` if it is not determined."""
    printed = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if printed:
        return int(printed.group(1))
    condition = module.computations[loop.attribute("condition") or ""]
    body = module.computations[loop.attribute("body") or ""]
    compare = _comparison(module, condition)
    if compare is None:
        return None
    lhs, rhs, direction = compare
    state = parent.by_name.get(loop.operands[0])

    # The initial state is known only where the loop's operand is a tuple that its parent builds.
    def initial(index: int) -> int | None:
        if state is None or state.opcode != "tuple":
            return None
        return _constant(parent, state.operands[index])

    # The counter may be on either side of the compare; on the right side the direction is reversed.
    counter, limit = _state_index(condition, lhs), _value(condition, rhs, body, initial)
    if counter is None:
        counter, limit = _state_index(condition, rhs), _value(condition, lhs, body, initial)
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    start = initial(counter) if counter is not None else None
    step = _step(body, counter, initial) if counter is not None else None
    # Without a limit, a start or a step other than 0 the count is not determined.
    if limit is None or start is None or not step:
        return None
    return _iterations(start, limit, step, direction)


def _iterations(start: int, limit: int, step: int, direction: str) -> int | None:
    """How many values `start`, `start + step`, … satisfy the compare with `limit` before the first that does not.

    `None` where the counter moves away from the limit or jumps over it: only a wrap-around of the integer would end
    such a loop.
    """
    if direction == "NE":
        return (limit - start) // step if (limit - start) % step == 0 and (limit - start) * step >= 0 else None
    if direction == "EQ":
        return int(start == limit)
    # A counter that counts down is the mirror image of one that counts up.
    if direction in ("GT", "GE"):
        start, limit, step = -start, -limit, -step
    span = limit - start + (direction in ("LE", "GE"))
    if span <= 0:
        return 0
    return math.ceil(span / step) if step > 0 else None


def _comparison(module: Module, condition: Computation) -> tuple[str, str, str] | None:
    """Operands and direction of the compare at the condition's root, looking through a fusion that wraps it."""
    root = condition.root
    if root.opcode == "fusion":
        inner = module.computations[root.attribute("calls") or ""]
        if inner.root.opcode != "compare":
            return None
        outer: list[str] = []
        # The compare's operands are parameters of the fusion, whose printed operand is their number: they are
        # translated to the operands of the fusion, which belong to the condition.
        for name in inner.root.operands:
            parameter = inner.by_name[name]
            if parameter.opcode != "parameter":
                return None
            outer.append(root.operands[int(parameter.operands[0])])
        return outer[0], outer[1], inner.root.attribute("direction") or ""
    if root.opcode != "compare":
        return None
    return root.operands[0], root.operands[1], root.attribute("direction") or ""


def _resolve(computation: Computation, name: str) -> Instruction | None:
    """The instruction behind `name`, looking through copies."""
    instruction = computation.by_name.get(name)
    while instruction is not None and instruction.opcode in _COPIES:
        instruction = computation.by_name.get(instruction.operands[0])
    return instruction


def _constant(computation: Computation, name: str) -> int | None:
    instruction = _resolve(computation, name)
    if instruction is None or instruction.opcode != "constant":
        return None
    return int(instruction.operands[0]) if re.fullmatch(r"-?\d+", instruction.operands[0]) else None


def _state_index(computation: Computation, name: str) -> int | None:
    """Which element of the loop's state `name` reads."""
    instruction = _resolve(computation, name)
    if instruction is None or instruction.opcode != "get-tuple-element":
        return None
    source = computation.by_name.get(instruction.operands[0])
    if source is None or source.opcode != "parameter":
        return None
    return int(instruction.attribute("index") or 0)


def _value(computation: Computation, name: str, body: Computation, initial: Initial) -> int | None:
    """A constant, or an element of the state that the body hands on unchanged and that starts as a constant."""
    constant = _constant(computation, name)
    if constant is not None:
        return constant
    # A limit or step may be an element of the state instead of a literal; it is constant if the body's result
    # has the same element of its own parameter at the same position.
    index = _state_index(computation, name)
    if index is None or body.root.opcode != "tuple":
        return None
    unchanged = _state_index(body, body.root.operands[index]) == index
    return initial(index) if unchanged else None


def _step(body: Computation, counter: int, initial: Initial) -> int | None:
    """The constant that the body adds to the counter; None if there is none."""
    if body.root.opcode != "tuple":
        return None
    update = _resolve(body, body.root.operands[counter])
    if update is None or update.opcode not in ("add", "subtract"):
        return None
    sign = 1 if update.opcode == "add" else -1
    # Addition commutes: the counter may be either operand. `c - counter` is no step: it changes sign at each iteration.
    orders = (update.operands, update.operands[::-1]) if update.opcode == "add" else (update.operands,)
    for counted, added in orders:
        if _state_index(body, counted) == counter:
            step = _value(body, added, body, initial)
            return None if step is None else sign * step
    return None
