"""The source files of `src/levanter` and `haliax_ext` as syntax trees, and what can be counted in them.

Only the standard library is used, and nothing of the project is imported: files are read as text. An import counts
wherever it is written, under `TYPE_CHECKING` and inside functions too.
"""

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
        path: its file, absolute.
        relative: the same, from the root of the repository.
        tree: its syntax.
        text: its source.
    """

    name: str
    path: Path
    relative: Path
    tree: ast.Module
    text: str

    @property
    def package(self) -> str:
        """The folder below `levanter` that it is in, or `haliax_ext`; the file itself, where it is in none."""
        parts = self.name.split(".")
        return parts[0] if parts[0] == "haliax_ext" or len(parts) == 1 else parts[1]

    @property
    def import_base(self) -> str:
        """The package that a relative import starts from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def modules(root: Path = ROOT) -> dict[str, Module]:
    """Every file of `src/levanter` and `haliax_ext`, by its import name."""
    by_name = {}
    for base in (root / "src", root):
        for package in ("levanter", "haliax_ext"):
            for path in sorted((base / package).rglob("*.py")):
                parts = path.relative_to(base).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                text = path.read_text(encoding="utf-8")
                by_name[name] = Module(
                    name=name, path=path, relative=path.relative_to(root), tree=ast.parse(text), text=text
                )
    return by_name


def imports(module: Module, known: Mapping[str, Module]) -> set[str]:
    """The project's files that a file imports, wherever in it."""
    imported: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.import_base.split(".")
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            # `from package import file` is an import of the file, `from file import name` one of the file as well.
            imported |= {name if (name := f"{base}.{alias.name}") in known else base for alias in node.names}
    return {name for name in imported if name in known and name != module.name}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of files each of which reaches all others of its set (Tarjan, 1972), without single files."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

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
                components.append(sorted(circle))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return sorted(components)


def functions(module: Module) -> Iterator[tuple[str, int]]:
    """Every function's qualified name and its lines, the docstring not counted."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                continue
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
            for member in above.body:
                if isinstance(member, ast.FunctionDef) and member.name == method and ast.get_docstring(member):
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


def package_arrows(known: Mapping[str, Module], graph: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """Pairs of packages of which the first imports the second."""
    return {
        (known[name].package, known[other].package)
        for name, others in graph.items()
        for other in others
        if known[name].package != known[other].package
    }
