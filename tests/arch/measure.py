"""What the plan of the house looks like in numbers: `python tests/arch/measure.py [--list]`.

Prints, for `src/levanter` and `haliax_ext`: circles of files, functions over the limit, public docstrings, `Any` in
annotations, the size of `main/`, and the arrows between rooms. Only the standard library is used, and nothing of the
project is imported: files are read as text. An import counts wherever it stands, under `TYPE_CHECKING` and inside of
functions too.
"""

import argparse
import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_FUNCTION = 80
"""Lines of a function, from `def` to its last line, its docstring not counted."""

ANY = re.compile(r"(:|->) Any\b")


@dataclass(frozen=True, kw_only=True)
class Module:
    """A file of the project.

    Attributes:
        name: as it is imported.
        path: where it lies.
        tree: its syntax.
        text: its source.
    """

    name: str
    path: Path
    tree: ast.Module
    text: str

    @property
    def room(self) -> str:
        """The folder below `levanter` that it is in, or `haliax_ext`; the file itself, where it is in none."""
        parts = self.name.split(".")
        return parts[0] if parts[0] == "haliax_ext" or len(parts) == 1 else parts[1]

    @property
    def package(self) -> str:
        """What a relative import starts from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def modules(root: Path = ROOT) -> dict[str, Module]:
    """Every file of `src/levanter` and `haliax_ext`, by its import name."""
    found = {}
    for base in (root / "src", root):
        for package in ("levanter", "haliax_ext"):
            for path in sorted((base / package).rglob("*.py")):
                parts = path.relative_to(base).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                text = path.read_text(encoding="utf-8")
                found[name] = Module(name=name, path=path, tree=ast.parse(text), text=text)
    return found


def imports(module: Module, known: Mapping[str, Module]) -> set[str]:
    """The project's files that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.package.split(".")
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            # `from package import file` is an import of the file, `from file import name` one of the file as well.
            found |= {name if (name := f"{base}.{alias.name}") in known else base for alias in node.names}
    return {name for name in found if name in known and name != module.name}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of files each of which reaches all others of its set (Tarjan, 1972), without single files."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            circle = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return sorted(found)


def functions(module: Module) -> Iterator[tuple[str, int]]:
    """Every function's qualified name and its lines, the docstring not counted."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{prefix}.{child.name}"
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (child.end_lineno or child.lineno) - child.lineno + 1
                if ast.get_docstring(child) is not None:
                    first = child.body[0]
                    lines -= (first.end_lineno or first.lineno) - first.lineno + 1
                yield inner, lines
            yield from walk(child, inner)

    return walk(module.tree, module.name)


def _overload_or_setter(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    texts = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(text.endswith(("overload", ".setter")) for text in texts)


def undocumented(known: Mapping[str, Module]) -> tuple[list[str], int]:
    """Public names without a docstring, and how many public names there are.

    Public are modules, classes, functions and methods none of whose names begins with an underscore. A method that
    overrides one of a base class in the project (found by name, through all its bases) is documented by that one.
    """
    classes: dict[str, ast.ClassDef] = {}
    for module in known.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, node)

    def documented_above(node: ast.ClassDef, method: str, seen: frozenset[str] = frozenset()) -> bool:
        for base in node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).split(".")[-1]
            above = classes.get(name)
            if above is None or name in seen:
                continue
            for each in above.body:
                if isinstance(each, ast.FunctionDef) and each.name == method and ast.get_docstring(each):
                    return True
            if documented_above(above, method, seen | {name}):
                return True
        return False

    missing, count = [], 0

    def visit(node: ast.Module | ast.ClassDef, prefix: str) -> None:
        nonlocal count
        for child in node.body:
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if child.name.startswith("_"):
                continue
            name = f"{prefix}.{child.name}"
            if isinstance(child, ast.ClassDef):
                count += 1
                if not ast.get_docstring(child):
                    missing.append(name)
                visit(child, name)
            elif not _overload_or_setter(child):
                count += 1
                inherited = isinstance(node, ast.ClassDef) and documented_above(node, child.name)
                if not ast.get_docstring(child) and not inherited:
                    missing.append(name)

    for module in known.values():
        if any(part.startswith("_") and part != "__init__" for part in module.name.split(".")):
            continue
        count += 1
        if module.tree.body and not ast.get_docstring(module.tree):
            missing.append(module.name)
        visit(module.tree, module.name)
    return missing, count


def any_lines(known: Mapping[str, Module]) -> list[str]:
    """Lines that annotate with a bare `Any`."""
    return [
        f"{module.name}:{number}: {line.strip()}"
        for module in known.values()
        for number, line in enumerate(module.text.splitlines(), 1)
        if ANY.search(line)
    ]


def room_arrows(known: Mapping[str, Module], graph: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second."""
    return {
        (known[name].room, known[other].room)
        for name, others in graph.items()
        for other in others
        if known[name].room != known[other].room
    }


def main() -> None:
    """Prints the numbers, and what is behind them where `--list` is given."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--list", action="store_true", help="what each number counts, one line each")
    args = parser.parse_args()
    known = modules()
    graph = {name: imports(module, known) for name, module in known.items()}
    found = circles(graph)
    long = [(name, n) for module in known.values() for name, n in functions(module) if n > LONGEST_FUNCTION]
    missing, public = undocumented(known)
    anys = any_lines(known)
    doors = sum(m.text.count("\n") for m in known.values() if m.room == "main")
    arrows = room_arrows(known, graph)
    lines = sum(m.text.count("\n") for m in known.values())

    def show(title: str, listed: list[str]) -> None:
        print(title)
        if args.list:
            print(*(f"    {line}" for line in listed), sep="\n")

    show(f"{len(known)} files, {lines} lines", [])
    show(f"{len(found)} circles of files, {sum(map(len, found))} files in them", [", ".join(c) for c in found])
    show(f"{len(long)} functions over {LONGEST_FUNCTION} lines", [f"{name}: {n}" for name, n in long])
    show(
        f"{public - len(missing)} of {public} public names have docstrings ({1 - len(missing) / public:.1%})",
        missing,
    )
    show(f"{len(anys)} lines annotate with a bare Any", anys)
    show(f"{doors} lines in main/", [])
    show(f"{len(arrows)} arrows between rooms", [f"{a} -> {b}" for a, b in sorted(arrows)])


if __name__ == "__main__":
    main()
