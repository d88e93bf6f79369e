"""Measures the source: `python tests/arch/measure.py` prints every number in one table.

    python tests/arch/measure.py --list words --package serving   # file:line:name of each forbidden name
    python tests/arch/measure.py --list functions                 # what another number counts
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from arch import source, words

CEILINGS = Path(__file__).with_name("ceilings.json")


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


def numbers(modules: Mapping[str, source.Module]) -> list[Number]:
    """Every number that is read from the source alone."""
    graph = {name: source.imports(module, modules) for name, module in modules.items()}
    circles = source.circles(graph)
    long = [
        f"{name}: {lines}"
        for module in modules.values()
        for name, lines in source.functions(module)
        if lines > source.LONGEST_FUNCTION
    ]
    missing, public = source.undocumented(modules)
    any_lines = source.any_lines(modules)
    main = [m for m in modules.values() if m.package == "main"]
    arrows = sorted(source.package_arrows(modules, graph))
    forbidden = forbidden_names(modules)

    def line_count(counted: Sequence[source.Module]) -> int:
        return sum(m.text.count("\n") for m in counted)

    return [
        Number(name="files", value=len(modules), meaning="files of src/levanter and haliax_ext"),
        Number(name="lines", value=line_count([*modules.values()]), meaning="lines in them"),
        Number(name="main", value=line_count(main), meaning="lines in main/"),
        Number(name="circles", value=len(circles), meaning="circles of imports", items=[", ".join(c) for c in circles]),
        Number(
            name="functions",
            value=len(long),
            meaning=f"functions over {source.LONGEST_FUNCTION} lines",
            items=long,
        ),
        Number(
            name="docstrings", value=len(missing), meaning=f"of {public} public names have no docstring", items=missing
        ),
        Number(name="any", value=len(any_lines), meaning="lines that annotate with a bare Any", items=any_lines),
        Number(
            name="arrows",
            value=len(arrows),
            meaning="pairs of packages of which one imports the other",
            items=[f"{a} -> {b}" for a, b in arrows],
        ),
        Number(
            name="words", value=len(forbidden), meaning="forbidden names (words.py)", items=[str(n) for n in forbidden]
        ),
    ]


def ceilings() -> dict[str, dict[str, int]]:
    """What `ceilings.json` allows: for each kind of number, its parts by name."""
    return json.loads(CEILINGS.read_text(encoding="utf-8"))


def lowered(allowed: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """`ceilings.json` with the present values, where these are no higher in sum: what moves takes its count along."""
    counts = words.by_package(forbidden_names(source.modules()))
    total = sum(allowed["words"].values())
    return {**allowed, "words": dict(sorted(counts.items())) if counts.total() <= total else dict(allowed["words"])}


def _in_package(item: str, package: str | None) -> bool:
    folder = (package or "").strip("/").removeprefix("src/").removeprefix("levanter/").replace(".", "/")
    path = item.removeprefix("src/").removeprefix("levanter/").removeprefix("levanter.").replace(".", "/")
    return not folder or re.match(rf"{re.escape(folder)}(\W|$)", path) is not None


def main() -> None:
    """Prints the numbers, or what one of them counts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--list", metavar="NAME", help="what this number counts, one line each; `all`: of every number")
    parser.add_argument("--package", help="with --list: only this package or folder, e.g. serving, commands/train")
    parser.add_argument("--word", help="with --list words: only this word, e.g. found, '*_of'")
    parser.add_argument("--lower", action="store_true", help="write lower ceilings to ceilings.json")
    args = parser.parse_args()
    if args.lower:
        CEILINGS.write_text(json.dumps(lowered(ceilings()), indent=1) + "\n", encoding="utf-8")
        return
    modules = source.modules()
    if args.list == "words":
        for name in forbidden_names(modules):
            if (args.word or name.word) == name.word and _in_package(name.path, args.package):
                print(f"{name}  ({name.word}{' in ' if name.scope else ''}{name.scope})")
        return
    for number in numbers(modules):
        if args.list not in (None, "all", number.name):
            continue
        print(f"{number.name:12} {number.value:>8}  {number.meaning}")
        if args.list:
            print(*(f"    {item}" for item in number.items if _in_package(item, args.package)), sep="\n")
    if args.list is None:
        forbidden = forbidden_names(modules)
        for title, counts in (("by word", words.by_word(forbidden)), ("by package", words.by_package(forbidden))):
            print(f"forbidden names {title}: " + ", ".join(f"{key} {n}" for key, n in counts.most_common()))


if __name__ == "__main__":
    main()
