"""Sizes of files, files that belong into their only importer, and the share of comments.

A *single-importer file* has fewer than `SMALL_FILE` lines and one importer, another file of its own folder: it is read
faster inside its importer. An `__init__.py` that re-exports a file's names is not an importer in this sense. A file is
not counted if its importer would have more than `LONGEST_FILE` lines with it, nor a file of `main/`: these are run by
name.

A *comment line* is a line with a comment, alone or after code. `# type:`, `# pyright:`, `# noqa` and `# fmt:` are not
comments in this sense: they address a tool.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from arch.source import Module

LONGEST_FILE = 600
"""Lines of a file."""
SMALL_FILE = 120
"""A file with fewer lines needs a second importer, or one in another folder."""
FOR_TOOLS = re.compile(r"#\s*(type:|pyright:|noqa|fmt:|!)")

STRING_OR_COMMENT = re.compile(
    r"""(?P<quote>\"{3}|'{3})(?:\\.|.)*?(?P=quote)
    | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
    | (?P<comment>\#[^\n]*)""",
    re.VERBOSE | re.DOTALL,
)


def line_count(module: Module) -> int:
    """The lines of a file."""
    return module.text.count("\n")


def long_files(modules: Mapping[str, Module]) -> dict[str, int]:
    """Files of more than `LONGEST_FILE` lines, with their lines."""
    return {name: n for name, module in modules.items() if (n := line_count(module)) > LONGEST_FILE}


def single_importers(modules: Mapping[str, Module], graph: Mapping[str, set[str]]) -> dict[str, str]:
    """Single-importer files, each with its importer.

    Args:
        modules: every file.
        graph: what each of them imports.
    """
    importers: dict[str, set[str]] = defaultdict(set)
    for name, imported in graph.items():
        for other in imported:
            importers[other].add(name)
    pairs = {}
    for name, module in modules.items():
        if len(importers[name]) != 1 or line_count(module) >= SMALL_FILE or module.path.name == "__init__.py":
            continue
        if module.package == "main":
            continue
        importer = modules[next(iter(importers[name]))]
        merged = line_count(module) + line_count(importer)
        same_folder = importer.path.parent == module.path.parent and importer.path.name != "__init__.py"
        if same_folder and merged <= LONGEST_FILE:
            pairs[name] = importer.name
    return pairs


def comment_lines(text: str) -> int:
    """The comment lines of one file: what `tokenize` calls a comment, in a tenth of its time."""
    comments = (match["comment"] for match in STRING_OR_COMMENT.finditer(text))
    return sum(comment is not None and not FOR_TOOLS.match(comment) for comment in comments)


def comments_by_package(modules: Iterable[Module]) -> dict[str, float]:
    """Comment lines in a hundred lines of each package, to two decimals."""
    comments: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for module in modules:
        comments[module.package] += comment_lines(module.text)
        lines[module.package] += line_count(module)
    return {package: round(100 * comments[package] / n, 2) for package, n in sorted(lines.items()) if n}


def comment_density(modules: Iterable[Module]) -> float:
    """Comment lines in a hundred lines of all files, to two decimals."""
    listed = list(modules)
    return round(100 * sum(comment_lines(m.text) for m in listed) / sum(map(line_count, listed)), 2)
