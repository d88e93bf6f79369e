"""What JAX compiles during a run, beside what its plan says: an entry point that notes both, here or as a process.

python compilations.py FILE ENTRY_POINT ARGUMENT…

Every computation goes through `jax._src.compiler.compile_or_get_cached`, those of single operations and those that are
found in a folder of compiled programs included; what it is given has the computation's name and its arguments' types.
"""

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jax._src import compiler
from jax._src.lib.mlir import ir

from levanter.commands.catalog import ENTRY_POINTS
from levanter.commands.cli.runner import run
from levanter.runplan import EntryPoint


@dataclass(frozen=True)
class Compilation:
    """One computation that was compiled.

    Attributes:
        name: of the function that was jitted, as HLO has it.
        arguments: the types of its arguments, as MLIR writes them.
        largest: bytes of the largest one, over all devices.
    """

    name: str
    arguments: tuple[str, ...]
    largest: int


@dataclass(frozen=True)
class Heard:
    """What was compiled and what was planned.

    Attributes:
        planned: names of the plan's Programs, as HLO has them, in order.
        compiled: all computations, in order.
    """

    planned: tuple[str, ...]
    compiled: tuple[Compilation, ...]

    @property
    def names(self) -> list[str]:
        """Of the computations that the plan has."""
        return [each.name for each in self.compiled if each.name in self.planned]

    @property
    def unplanned(self) -> list[Compilation]:
        """What is not in the plan."""
        return [each for each in self.compiled if each.name not in self.planned]

    @classmethod
    def read(cls, path: Path) -> "Heard":
        """What a process wrote."""
        found = json.loads(path.read_text())
        compiled = [Compilation(name, tuple(arguments), largest) for name, arguments, largest in found["compiled"]]
        return cls(tuple(found["planned"]), tuple(compiled))


@contextlib.contextmanager
def compilations() -> Iterator[list[Compilation]]:
    """Collects what is compiled."""
    found: list[Compilation] = []
    own = compiler.compile_or_get_cached

    def listening(backend, computation, *rest, **more):
        found.append(_of_module(computation))
        return own(backend, computation, *rest, **more)

    compiler.compile_or_get_cached = listening
    try:
        yield found
    finally:
        compiler.compile_or_get_cached = own


def hlo_name(program: str) -> str:
    """A Program's name as its HLO module has it."""
    return re.sub(r"[^\w.-]", "_", program)


def _of_module(module: ir.Module) -> Compilation:
    name = ir.StringAttr(module.operation.attributes["sym_name"]).value
    (main,) = [op for op in module.body.operations if ir.StringAttr(op.attributes["sym_name"]).value == "main"]
    types = [str(each) for each in ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).inputs]
    return Compilation(name.removeprefix("jit_"), tuple(types), max(map(_bytes, types), default=0))


def _bytes(ranked: str) -> int:
    """Bytes of a `tensor<8x16xf32>`."""
    *sizes, dtype = ranked.removeprefix("tensor<").removesuffix(">").split("x")
    bits = re.search(r"\d+", dtype)
    return int(np.prod([int(size) for size in sizes], dtype=np.int64)) * (int(bits[0]) if bits else 64) // 8


def heard_in(entry: EntryPoint, argv: Sequence[str]) -> tuple[int, Heard]:
    """Runs a command in this process; its exit code, and what was heard."""
    planned: list[str] = []

    def execute(plan, mesh, session):
        planned.extend(hlo_name(program.name) for program in plan.programs)
        return entry.execute(plan, mesh, session)

    with compilations() as compiled:
        code = run(replace(entry, execute=execute), argv)
    return code, Heard(tuple(planned), tuple(compiled))


def main() -> None:
    """Runs a command and writes what was heard beside the number of the process."""
    path, name, *argv = sys.argv[1:]
    code, heard = heard_in(ENTRY_POINTS[name].load(), argv)
    compiled = [(each.name, each.arguments, each.largest) for each in heard.compiled]
    written = {"planned": heard.planned, "compiled": compiled}
    Path(f"{path}.{os.environ.get('LEVANTER_PROCESS_ID', 0)}").write_text(json.dumps(written))
    sys.exit(code)


if __name__ == "__main__":
    main()
