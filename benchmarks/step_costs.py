"""What the cycles of a compiled step are spent on, from the compiler's own text. No TPU, and nothing is compiled.

    python benchmarks/step_costs.py FOLDER/train_step.hlo.txt [OTHER/train_step.hlo.txt …] [--layers 80] [--top 12]

`benchmarks/published_step_times.py --keep-text FOLDER` leaves such texts. Several are shown side by side, in millions
of cycles: what an experiment was worth is the difference of two columns. Each instruction with an estimate counts as
often as it runs, and is of one *kind*:

- *matmuls*: whatever has a product inside, with what the compiler fused to it,
- *zeros*: arrays of zeros that pieces of weights are written into, to be added up to whole ones by an all-reduce,
- *rotation and layout*: rotary embeddings, and what lays queries, keys, values and their gradients out for the
  attention kernel and back again; the kernel itself has no cycles,
- *norms*, *head and table*, *optimizer*: by the module that they are of, as far as they are no matmuls,
- *weights*: what lies between a shard and what is multiplied by: casts, layouts, cuts out of the stack of layers,
- *saved*: activations written into the stack of all layers or cut out of it,
- *stream*: sums of the residual stream and of its gradients,
- *other*.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from haliax_ext.hlo.op_metadata import UNNAMED, Scope, parse_scope
from haliax_ext.hlo.parser import Computation, Instruction, Module, parse_module
from haliax_ext.hlo.trip_counts import trip_count

SHALLOW = 7
"""Layers of a shallow compile (`published_step_times`), which are counted as `--layers`."""
MATMULS = "matmuls"
_PRODUCTS = frozenset(("dot", "convolution"))
_STACKED = frozenset(("dynamic-slice", "dynamic-update-slice"))
_OF_MODULE = {"optimizer": "optimizer", "lm_head": "head and table", "embeddings": "head and table"}


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Cycles of one instruction, over all its executions.

    Attributes:
        kind: of those that the module's text lists.
        scope: its module and pass.
        cycles: the compiler's estimate times executions.
        times: executions.
        what: its name, result and opcodes, for people.
    """

    kind: str
    scope: Scope
    cycles: int
    times: int
    what: str


def spent(text: str, *, layers: int | None = None) -> list[Spent]:
    """Every estimated instruction of a compiled step, largest first.

    Args:
        text: what the compiler prints.
        layers: the true depth of a step that was compiled with `SHALLOW` layers; None where it was compiled with all.
    """
    module = parse_module(text)
    trips = {} if layers is None else {SHALLOW: layers}
    return sorted(_walk(module, module.entry, 1, trips), key=lambda each: -each.cycles)


def sums(found: Sequence[Spent]) -> dict[str, int]:
    """Cycles by kind, largest first."""
    added: Counter[str] = Counter()
    for each in found:
        added[each.kind] += each.cycles
    return dict(added.most_common())


def _walk(module: Module, computation: Computation, times: int, trips: Mapping[int, int]) -> Iterator[Spent]:
    for instruction in computation.instructions:
        if instruction.opcode == "while":
            count = trip_count(module, computation, instruction) or 1
            body = module.computations[instruction.attribute("body") or ""]
            yield from _walk(module, body, times * trips.get(count, count), trips)
        elif instruction.opcode in ("call", "conditional"):
            for name in instruction.called():
                yield from _walk(module, module.computations[name], times, trips)
        elif instruction.estimated_cycles is not None:
            yield _one(module, instruction, times)


def _one(module: Module, instruction: Instruction, times: int) -> Spent:
    inside = list(_inside(module, instruction))
    names = [each.op_name for each in (instruction, *reversed(inside)) if "/" in each.op_name]
    scope = parse_scope(names[0] if names else "")
    opcodes = {each.opcode for each in inside} - {"parameter", "constant", "bitcast"}
    result = re.sub(r"\{[^{}]*\}", "", instruction.result)
    return Spent(
        kind=kind_of(scope, opcodes),
        scope=scope,
        cycles=times * (instruction.estimated_cycles or 0),
        times=times,
        what=f"{instruction.name} {result[:60]} of {', '.join(sorted(opcodes))[:60]}",
    )


def _inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The instruction, or what it fuses."""
    if instruction.opcode != "fusion":
        yield instruction
        return
    for each in module.computations[instruction.attribute("calls") or ""].instructions:
        yield from _inside(module, each)


def kind_of(scope: Scope, opcodes: set[str]) -> str:
    """The kind of an instruction.

    Args:
        scope: its module.
        opcodes: its own, or of what it fuses.
    """
    path = [name for name in scope.module.split(".") if name != "microbatch"] or [UNNAMED]
    if opcodes & _PRODUCTS:
        return MATMULS
    if path == [UNNAMED] and opcodes == {"broadcast"}:
        return "zeros"
    if "rope" in path or path[-1] == "attention":
        return "rotation and layout"
    if any("norm" in name for name in path):
        return "norms"
    if path[0] in _OF_MODULE:
        return _OF_MODULE[path[0]]
    if path[-1].endswith("_proj"):
        return "weights"
    if path == ["layers"]:
        return "saved" if opcodes & _STACKED else "stream"
    return "other"


def table(columns: Mapping[str, Sequence[Spent]]) -> list[str]:
    """Kinds and their cycles in each text, as lines of Markdown."""
    added = {name: sums(found) for name, found in columns.items()}
    kinds = Counter({kind: cycles for each in reversed(added.values()) for kind, cycles in each.items()})
    lines = [f"| | {' | '.join(added)} |", "|---" * (len(added) + 1) + "|"]
    for kind, _ in kinds.most_common():
        cells = [
            f"{each.get(kind, 0) / 1e6:,.0f} M ({each.get(kind, 0) / sum(each.values()):.1%})"
            for each in added.values()
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return [*lines, f"| all | {' | '.join(f'{sum(each.values()) / 1e6:,.0f} M' for each in added.values())} |"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--layers", type=int, help="the true depth of steps that were compiled with 7 layers")
    parser.add_argument("--top", type=int, default=0, help="so many of the largest instructions that are no matmuls")
    asked = parser.parse_args()
    columns = {str(path.parent): spent(path.read_text(), layers=asked.layers) for path in asked.texts}
    print("\n".join(table(columns)))
    for name, found in columns.items():
        others = [each for each in found if each.kind != MATMULS]
        for each in others[: asked.top]:
            module = f"{each.scope.module} ({each.scope.during})"
            print(f"{name}: {each.cycles / 1e6:,.0f} M, {each.times} times, {each.kind}: {module}: {each.what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
