"""Names that DESIGN forbids, in `src/levanter` and `haliax_ext`.

A *name* is what a file binds: the file itself, a class, a function, a parameter, a variable (loop variables and those
of comprehensions too), a field, an attribute that is assigned, the alias of an import. A name counts once in each scope
(module, class or function) that binds it, at the first line that does. Leading and trailing underscores are dropped
and capitals split, so `_found` is `found` and `TextParts` is `text_parts`.

- `WHOLE` words count where they are the whole name: `left`, not `left_padding`.
- `COMPONENTS` count as any word of a name: `asked_axes`, `beyond_room`.
- `*_of` is a function, method or nested function whose name ends in `_of`.

`ALLOWED` names mean what DESIGN keeps the word for, or implement an interface of a library.
"""

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

WHOLE = frozenset({"found", "left", "given", "held", "places", "parts"})
COMPONENTS = frozenset({"asked", "beside", "each", "exchange", "made", "own", "room", "said", "there", "told"})
SUFFIX = "_of"
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "places": ("src/levanter/models/decoder/", "src/levanter/models/stack.py", "src/levanter/trainer/loss.py"),
    "parts": ("src/levanter/layers/layer.py",),
    "left": ("src/levanter/data/template_sandbox.py",),
    "connection_made": ("src/levanter/serving/",),
}
"""Name → the files or folders that may use it: slots of a scan period, sublayers, a parameter of Jinja's
`call_binop`, a method of `asyncio.Protocol`."""


@dataclass(frozen=True, kw_only=True, order=True)
class ForbiddenName:
    """One name that is refused.

    Attributes:
        path: the file, from the root of the repository.
        line: where the scope first binds it; 1 for the name of the file.
        name: as it is written.
        word: the forbidden word: one of `WHOLE` or `COMPONENTS`, or `*_of`.
        scope: the qualified name of the function or class that binds it; empty for a module.
    """

    path: str
    line: int
    name: str
    word: str
    scope: str

    @property
    def package(self) -> str:
        """The folder below `levanter`, the file where there is none, or `haliax_ext`."""
        parts = PurePath(self.path).parts
        return parts[0] if parts[0] == "haliax_ext" else parts[2].removesuffix(".py")

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.name}"


@functools.cache
def snake_case(name: str) -> str:
    """The name in lower case with its words separated by `_`, without the underscores around it."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


def forbidden_words(name: str, *, function: bool = False) -> list[str]:
    """The forbidden words of a name."""
    plain = snake_case(name)
    words = [plain] if plain in WHOLE else sorted(COMPONENTS.intersection(plain.split("_")))
    if function and plain.endswith(SUFFIX):
        words.append("*" + SUFFIX)
    return words


STORE = ast.Store()
NAME_FIELDS: Mapping[type[ast.AST], str] = {
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ClassDef: "name",
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.arg: "arg",
    ast.alias: "asname",
    ast.ExceptHandler: "name",
    ast.MatchAs: "name",
    ast.MatchStar: "name",
    ast.MatchMapping: "rest",
}
"""Nodes that bind a name, where their context does not say that they only read it, and the field that holds it."""
WITHOUT_NAMES = frozenset({ast.Constant, ast.Load, ast.Store, ast.Pass})


class Binding(NamedTuple):
    """A name that a scope binds: `scope` is the qualified name of its function or class."""

    scope: str
    name: str
    line: int
    function: bool = False


def bindings(tree: ast.Module) -> Iterator[Binding]:
    """Every binding of a file; a name may come more than once in a scope, in no particular order."""
    stack: list[tuple[ast.AST, str]] = [(tree, "")]
    while stack:
        node, scope = stack.pop()
        attribute = NAME_FIELDS.get(type(node))
        if attribute is not None:
            name = getattr(node, attribute)
            stored = isinstance(getattr(node, "ctx", STORE), ast.Store)
            if name is not None and stored:
                function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                yield Binding(scope, name, getattr(node, "lineno", 1), function)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                scope = f"{scope}.{name}" if scope else node.name
        stack += [(child, scope) for child in ast.iter_child_nodes(node) if type(child) not in WITHOUT_NAMES]


def forbidden_names(path: PurePath, tree: ast.Module) -> list[ForbiddenName]:
    """The forbidden names of one file, its own name included, each once a scope.

    Args:
        path: the file, from the root of the repository.
        tree: its syntax.
    """
    stem = path.parent.name if path.name == "__init__.py" else path.stem
    listed = [
        ForbiddenName(path=str(path), line=1, name=path.name, word=word, scope="") for word in forbidden_words(stem)
    ]
    first: dict[tuple[str, str], Binding] = {}
    for binding in bindings(tree):
        key = (binding.scope, binding.name)
        if key not in first or binding.line < first[key].line:
            first[key] = binding
    for binding in first.values():
        if str(path).startswith(ALLOWED.get(binding.name, ())):
            continue
        listed += [
            ForbiddenName(path=str(path), line=binding.line, name=binding.name, word=word, scope=binding.scope)
            for word in forbidden_words(binding.name, function=binding.function)
        ]
    return sorted(listed)


def by_word(names: Iterable[ForbiddenName]) -> Counter[str]:
    """How often each word is used."""
    return Counter(name.word for name in names)


def by_package(names: Iterable[ForbiddenName]) -> Counter[str]:
    """How many forbidden names each package has."""
    return Counter(name.package for name in names)
