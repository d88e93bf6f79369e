"""Measures the source and the paths through it: `python tests/arch/measure.py` prints every number in one table.

    python tests/arch/measure.py --list words --package serving   # file:line:name of each forbidden name
    python tests/arch/measure.py --list functions                 # what another number counts
    python tests/arch/measure.py --list "request files"           # the same of a path (half a minute)
    python tests/arch/measure.py --source                         # without the paths
    python tests/arch/measure.py --table                          # the table of CONTRIBUTING.md
    python tests/arch/measure.py --lower                          # write the present values to ceilings.json

`ceilings.json` holds the values that `test_house.py` allows. They only fall: `--lower` writes the present values where
these are no higher.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from arch import files, paths, source, words

CEILINGS = Path(__file__).with_name("ceilings.json")
BEFORE = Path(__file__).with_name("before.json")
"""Number → its value at commit a94be62, its aim, and its name in CONTRIBUTING.md."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """One measured number.

    Attributes:
        name: what `--list` calls it.
        value: the number.
        meaning: what is counted.
        items: one line for each thing that is counted, beginning with its module or its file.
    """

    name: str
    value: float
    meaning: str
    items: Sequence[str] = ()


def forbidden_names(modules: Mapping[str, source.Module]) -> list[words.ForbiddenName]:
    """The forbidden names of all files, by file and line."""
    return sorted(name for module in modules.values() for name in words.forbidden_names(module.relative, module.tree))


def size_numbers(modules: Mapping[str, source.Module], graph: Mapping[str, set[str]]) -> list[Number]:
    """Files, lines, comments, and what is too long or too small."""
    functions = [pair for module in modules.values() for pair in source.functions(module)]
    long_functions = [f"{name}: {lines}" for name, lines in functions if lines > source.LONGEST_FUNCTION]
    long_files = [f"{name}: {lines}" for name, lines in files.long_files(modules).items()]
    single = [f"{name} -> {importer}" for name, importer in files.single_importers(modules, graph).items()]
    lines = {name: files.line_count(module) for name, module in modules.items()}
    toolkit = [lines[name] for name, module in modules.items() if module.package == "haliax_ext"]
    main = [files.line_count(module) for module in modules.values() if module.package == "main"]
    density = files.comment_density(modules.values())
    by_package = [f"{package}: {value}" for package, value in files.comments_by_package(modules.values()).items()]
    small = f"files under {files.SMALL_FILE} lines with one importer, in their folder"
    return [
        Number(name="files", value=len(lines) - len(toolkit), meaning="files of src/levanter"),
        Number(name="lines", value=sum(lines.values()) - sum(toolkit), meaning="lines in them"),
        Number(name="haliax_ext files", value=len(toolkit), meaning="files of haliax_ext"),
        Number(name="haliax_ext lines", value=sum(toolkit), meaning="lines in them"),
        Number(name="main", value=sum(main), meaning="lines in main/"),
        Number(name="long", value=len(long_files), meaning=f"files over {files.LONGEST_FILE} lines", items=long_files),
        Number(
            name="functions",
            value=len(long_functions),
            meaning=f"functions over {source.LONGEST_FUNCTION} lines",
            items=long_functions,
        ),
        Number(name="single", value=len(single), meaning=small, items=single),
        Number(name="comments", value=density, meaning="comment lines in a hundred", items=by_package),
    ]


def name_numbers(modules: Mapping[str, source.Module], graph: Mapping[str, set[str]]) -> list[Number]:
    """Imports, docstrings, annotations and names."""
    circles = [", ".join(circle) for circle in source.circles(graph)]
    missing, public = source.undocumented(modules)
    any_lines = source.any_lines(modules)
    arrows = [f"{a} -> {b}" for a, b in sorted(source.package_arrows(modules, graph))]
    forbidden = [str(name) for name in forbidden_names(modules)]
    undocumented = f"of {public} public names have no docstring"
    pairs = "pairs of packages of which one imports the other"
    return [
        Number(name="circles", value=len(circles), meaning="circles of imports", items=circles),
        Number(name="arrows", value=len(arrows), meaning=pairs, items=arrows),
        Number(name="docstrings", value=len(missing), meaning=undocumented, items=missing),
        Number(name="any", value=len(any_lines), meaning="lines that annotate with a bare Any", items=any_lines),
        Number(name="words", value=len(forbidden), meaning="forbidden names (words.py)", items=forbidden),
    ]


def ceilings() -> dict[str, Any]:
    """What `ceilings.json` allows, by the names that `--list` knows."""
    return json.loads(CEILINGS.read_text(encoding="utf-8"))


def lowered(allowed: Mapping[str, Any]) -> dict[str, Any]:
    """`ceilings.json` with the present values, where these are better in sum: a file that moves takes its count along.

    The density of comments is a floor, rounded down to a twentieth so that a deleted comment is no error.
    """
    modules = source.modules()
    graph = {name: source.imports(module, modules) for name, module in modules.items()}
    counts = words.by_package(forbidden_names(modules))
    single = sorted(files.single_importers(modules, graph))
    path_values = {name: value for name, (value, _) in paths.numbers().items() if name in allowed["paths"]}
    floor = int(20 * files.comment_density(modules.values())) / 20
    return {
        **allowed,
        "words": min(allowed["words"], dict(sorted(counts.items())), key=lambda by_package: sum(by_package.values())),
        "single": min(allowed["single"], single, key=len),
        "comments": max(allowed["comments"], floor),
        "paths": {name: min(allowed["paths"][name], value) for name, value in path_values.items()},
    }


def _in_package(item: str, package: str | None) -> bool:
    folder = (package or "").strip("/").removeprefix("src/").removeprefix("levanter/").replace(".", "/")
    path = item.removeprefix("src/").removeprefix("levanter/").removeprefix("levanter.").replace(".", "/")
    return not folder or re.match(rf"{re.escape(folder)}(\W|$)", path) is not None


def list_words(names: Sequence[words.ForbiddenName], package: str | None, word: str | None) -> None:
    """Prints the forbidden names of a package, one a line."""
    for name in names:
        if (word or name.word) == name.word and _in_package(name.path, package):
            print(f"{name}  ({name.word}{' in ' if name.scope else ''}{name.scope})")


def source_numbers() -> list[Number]:
    """Every number that is read from the source alone."""
    modules = source.modules()
    graph = {name: source.imports(module, modules) for name, module in modules.items()}
    return size_numbers(modules, graph) + name_numbers(modules, graph)


def path_numbers() -> list[Number]:
    """Every number that real runs give."""
    return [
        Number(name=name, value=value, meaning="paths.py", items=items)
        for name, (value, items) in paths.numbers().items()
    ]


def table(shown: Sequence[Number]) -> str:
    """The numbers as the Markdown table of CONTRIBUTING.md, beside those of `BEFORE` and the aims."""
    now = {number.name: number.value for number in shown}
    rows = ["| | before | now | aim |", "|---|---:|---:|---|"]
    for name, (before, aim, meaning) in json.loads(BEFORE.read_text(encoding="utf-8")).items():
        rows.append(f"| {meaning} | {before:,} | {now[name]:,} | {aim} |")
    return "\n".join(rows)


def main() -> None:
    """Prints the numbers, or what one of them counts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--list", metavar="NAME", help="what this number counts, one line each; `all`: of every number")
    parser.add_argument("--package", help="with --list: only this package or folder, e.g. serving, commands/train")
    parser.add_argument("--word", help="with --list words: only this word, e.g. found, '*_of'")
    parser.add_argument("--source", action="store_true", help="only the numbers that are read from the source")
    parser.add_argument("--table", action="store_true", help="the table of CONTRIBUTING.md")
    parser.add_argument("--lower", action="store_true", help="write lower ceilings to ceilings.json")
    args = parser.parse_args()
    if args.lower:
        CEILINGS.write_text(json.dumps(lowered(ceilings()), indent=1) + "\n", encoding="utf-8")
        return
    if args.list == "words":
        list_words(forbidden_names(source.modules()), args.package, args.word)
        return
    shown = source_numbers()
    if not args.source and args.list not in {number.name for number in shown}:
        shown += path_numbers()
    if args.table:
        print(table(shown))
        return
    for number in shown:
        if args.list in (None, "all", number.name):
            print(f"{number.name:28} {number.value:>8}  {number.meaning}")
        if args.list in ("all", number.name):
            print(*(f"    {item}" for item in number.items if _in_package(item, args.package)), sep="\n")
    if args.list is None:
        forbidden = forbidden_names(source.modules())
        for title, counts in (("by word", words.by_word(forbidden)), ("by package", words.by_package(forbidden))):
            print(f"forbidden names {title}: " + ", ".join(f"{key} {n}" for key, n in counts.most_common()))


if __name__ == "__main__":
    main()
