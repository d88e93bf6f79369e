"""Golden files: reviewed results under `tests/golden/` that a test's result must equal.

*Facts* (numbers, names, places) are JSON: one file a case, compared key by key, untouched by a change of wording.
*Samples* are whole texts, two of each report at most: there the wording is reviewed. *Compiled* facts come out of a
compiler, so their file names the one that made it and they hold for that one only.

`make golden` (and `make golden-compiled`) writes them anew; the change is then reviewed as a diff.
`tests/golden/README.md` lists them.
"""

import importlib.metadata
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

GOLDEN = Path(__file__).parent.parent / "golden"
WIDTH = 120
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"


def assert_golden(name: str, text: str) -> None:
    """Compares `text` with the sample `tests/golden/<name>`, or writes it where `UPDATE_GOLDEN` is set."""
    text = text.rstrip("\n") + "\n"
    if updating():
        _write(name, text)
    assert text == _read(name), f"differs from {GOLDEN / name}; `make golden` writes it anew"


def assert_golden_json(name: str, facts: Mapping[str, Json]) -> None:
    """Compares `facts` with those of `tests/golden/<name>`, or writes them where `UPDATE_GOLDEN` is set.

    A failure lists every fact that differs, by its path: `groups.mlp: 5 → 6`.
    """
    if updating():
        _write(name, json_text(facts) + "\n")
    _assert_same(name, json.loads(_read(name)), facts, anew="make golden")


def assert_golden_compiled(name: str, facts: Mapping[str, Json], *, compiler: str = "libtpu") -> None:
    """Like `assert_golden_json`, for what a compiler said: the file names the compiler's package and the JAX of it.

    Where another version is installed the figures are not compared: the test is skipped with both names. So this comes
    last, after everything that holds with any compiler.
    """
    if updating():
        _write(name, json_text({"made_with": made_with(compiler), **facts}) + "\n")
    kept = json.loads(_read(name))
    skip_on_another_compiler(name, kept.pop("made_with"), compiler=compiler)
    _assert_same(name, kept, facts, anew="make golden-compiled")


def made_with(compiler: str = "libtpu") -> dict[str, str]:
    """What compiles here: the versions of a compiler's package and of JAX."""
    return {package: importlib.metadata.version(package) for package in (compiler, "jax")}


def skip_on_another_compiler(name: str, maker: Mapping[str, str], *, compiler: str = "libtpu") -> None:
    """Skips the test, saying why, unless the compiler that is installed is the one that made a golden file."""
    here = made_with(compiler)
    if here[compiler] != maker[compiler]:
        theirs, ours = (", ".join(f"{what} {one[what]}" for what in maker) for one in (maker, here))
        pytest.skip(
            f"tests/golden/{name} was made with {theirs}; installed: {ours}. Its figures are not compared; "
            "`make golden-compiled` writes them anew"
        )


def updating() -> bool:
    """Whether golden files are being written and not compared."""
    return bool(os.environ.get("UPDATE_GOLDEN"))


def figures(prose: str) -> list[str]:
    """The numbers, quoted names and `name → place` of a sentence, in order: what another wording leaves alone."""
    return re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?|'[\w.*]+'|`[^`\n]+`|\w+ → \w+", prose)


def fragments(prose: str) -> list[str]:
    """What a message offers to copy: the YAML in braces and brackets, in order."""
    return re.findall(r"\{[^{}]*\}|(?<=: )\[[^\[\]]*\]", prose)


def json_text(value: Json, indent: int = 0, key: str = "") -> str:
    """JSON with everything that fits on a line on one line, so that a diff shows one fact a line."""
    head = " " * indent + (f"{json.dumps(key, ensure_ascii=False)}: " if key else "")
    short = head + json.dumps(value, ensure_ascii=False)
    if (indent and len(short) < WIDTH) or not value or not isinstance(value, Mapping | list | tuple):
        return short
    if isinstance(value, Mapping):
        rows = [json_text(one, indent + 1, name) for name, one in value.items()]
        return head + "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}"
    rows = [json_text(one, indent + 1) for one in value]
    return head + "[\n" + ",\n".join(rows) + "\n" + " " * indent + "]"


def _assert_same(name: str, kept: Json, found: Json, *, anew: str) -> None:
    # Tuples are lists, and keys are text, in a file.
    differing = list(_differences(kept, json.loads(json.dumps(found))))
    listed = "\n".join(f"  {line}" for line in differing)
    assert not differing, f"{GOLDEN / name} has other facts (golden → now); `{anew}` writes it anew:\n{listed}"


def _differences(kept: Json, found: Json, at: str = "") -> Iterator[str]:
    """One line for every fact that is not the same, with its path."""
    if isinstance(kept, dict) and isinstance(found, dict):
        for key in dict.fromkeys([*kept, *found]):
            path = f"{at}.{key}" if at else key
            if key not in kept or key not in found:
                side, value = ("no longer", kept[key]) if key in kept else ("new", found[key])
                yield f"{path}: {side}: {json.dumps(value, ensure_ascii=False)}"
            else:
                yield from _differences(kept[key], found[key], path)
    elif isinstance(kept, list) and isinstance(found, list) and len(kept) == len(found):
        for n, (one, other) in enumerate(zip(kept, found, strict=True)):
            yield from _differences(one, other, f"{at}[{n}]")
    elif kept != found or isinstance(kept, bool) != isinstance(found, bool):
        yield f"{at}: {json.dumps(kept, ensure_ascii=False)} → {json.dumps(found, ensure_ascii=False)}"


def _write(name: str, text: str) -> None:
    path = GOLDEN / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _read(name: str) -> str:
    path = GOLDEN / name
    assert path.exists(), f"{path} is missing; `make golden` writes it"
    return path.read_text(encoding="utf-8")
