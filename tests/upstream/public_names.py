"""Collects the public names of a version of upstream: `python tests/upstream/public_names.py PACKAGE KEY SOURCE`.

PACKAGE is its folder `levanter`, in a checkout or as pip installs it; it is parsed, not imported. The names of each
module go into `tests/golden/legacy/public_names.json` below KEY, and `tests/levanter/upstream/test_legacy_imports.py`
imports every one of them: each is there, or refused with what replaces it. SOURCE says which version it was.

A public name is a function, a class or a variable that a module defines, or lists in `__all__`, without a leading
underscore. Loggers, type variables and what only `if __name__ == "__main__"` defines are left out.
"""

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "golden" / "legacy" / "public_names.json"
LOGGERS = {"logger", "pylogger"}
TYPE_VARIABLES = {"TypeVar", "ParamSpec", "TypeVarTuple"}


def defined(body: Sequence[ast.stmt]) -> Iterator[str]:
    """The names that statements define, also below `if`, `try` and `with`."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from _assigned(node)
        elif isinstance(node, ast.If) and "__name__" not in ast.unparse(node.test):
            yield from defined((*node.body, *node.orelse))
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            yield from defined((*node.body, *node.orelse, *handlers, *node.finalbody))
        elif isinstance(node, ast.With):
            yield from defined(node.body)


def _assigned(node: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    value = node.value
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in TYPE_VARIABLES:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Name) and target.id == "__all__" and isinstance(value, ast.List | ast.Tuple):
            yield from (item.value for item in value.elts if isinstance(item, ast.Constant))  # type: ignore[misc]
        yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def public_names(package: Path) -> dict[str, list[str]]:
    """The names of every module of a package."""
    names: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names[module] = sorted({name for name in defined(tree.body) if not name.startswith("_")} - LOGGERS)
    return names


def main() -> int:
    """Writes the names of one version beside those of the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="the folder `levanter` of that version")
    parser.add_argument("key", help="its key in the file")
    parser.add_argument("source", help="which version it is")
    arguments = parser.parse_args()
    data = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {"sources": []}
    data[arguments.key] = public_names(arguments.package)
    data["sources"] = sorted({*data["sources"], f"{arguments.key}: {arguments.source}"})
    # One module a line: the file is read as a diff when a version is added.
    blocks = []
    for key, value in sorted(data.items()):
        if key == "sources":
            blocks.append(f'"sources": {json.dumps(value)}')
        else:
            lines = ",\n".join(f" {json.dumps(module)}: {json.dumps(names)}" for module, names in value.items())
            blocks.append(f"{json.dumps(key)}: {{\n{lines}\n}}")
    DATA.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
