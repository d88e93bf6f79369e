"""The documents: their fenced blocks, the commands in them with the output pasted below, and how output is compared.

A *pair* is a block of commands and, before the next heading, a block without a language that shows what the first of
them printed; or one block that begins with `$ `. In pasted output a line `…` stands for lines that are left out, and
`…` inside a line for characters. Times, rates, run ids, host memory and versions are not compared: they are the
machine's.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PAGES = (*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/preflight").glob("*.md")))
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *_PAGES)
LEFT_OUT = "…"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_RUNNABLE = re.compile(r"(?:levanter|make|python -m levanter\.[\w.]+) ")
_NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
_MEASURED = [
    (re.compile(rf"\b{_NUMBER}(?:[–-]{_NUMBER})? (?:tokens|windows|rows)/s\b"), "RATE"),
    (re.compile(rf"\b{_NUMBER} [KMG]i?B/s\b"), "RATE"),
    (re.compile(rf"\b{_NUMBER} ?(?:µs|ms|s|min|h)\b"), "TIME"),
    (re.compile(rf"peak host memory {_NUMBER} \w+"), "peak host memory SIZE"),
    (re.compile(r"\blogs/[0-9a-f]{8}/"), "logs/RUN/"),
    (re.compile(r"\bPython \d[\d.]*\w*, jax \d[\d.]*\w*"), "VERSIONS"),
]
MODELLED = "modelled"
"""A line with this word states times that are arithmetic; they are compared."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block.

    Attributes:
        document: the file.
        line: of its fence, from 1.
        language: after the fence; may be empty.
        text: what is inside.
    """

    document: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """`docs/405b.md:18`."""
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> tuple[str, ...]:
        """Its lines, where all of them are commands of this project; continued lines joined, comments cut off."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        lines = [re.split(r"\s{2,}#", line)[0].strip() for line in joined.splitlines() if line.strip()]
        return tuple(lines) if lines and all(_RUNNABLE.match(f"{line} ") for line in lines) else ()


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A command and the output that is pasted below it."""

    command: str
    output: Block

    @property
    def words(self) -> list[str]:
        """The command as a shell splits it."""
        return shlex.split(self.command)


def blocks(document: Path) -> list[Block]:
    """The fenced blocks of a document, in order."""
    text = document.read_text(encoding="utf-8")
    return [
        Block(document=document, line=text.count("\n", 0, found.start()) + 1, language=found[1], text=found[2])
        for found in _BLOCK.finditer(text)
    ]


def pairs(document: Path) -> Iterator[Pair]:
    """Every command of a document whose output is pasted below it."""
    lines = document.read_text(encoding="utf-8").splitlines()
    found = blocks(document)
    for block in found:
        if block.text.startswith("$ "):
            command, _, output = block.text[2:].partition("\n")
            yield Pair(command=command, output=Block(**{**vars(block), "text": output}))
    for block, below in pairwise(found):
        end = block.line + block.text.count("\n") + 1
        between = lines[end : below.line - 1]
        same_section = not any(line.startswith("#") for line in between)
        if len(block.commands) >= 1 and same_section and not below.language and not below.commands:
            # Several commands: the output is that of the first (`make demo` before `make test`).
            yield Pair(command=block.commands[0], output=below)


def same_everywhere(line: str) -> str:
    """A line of output without what is the machine's."""
    line = line.rstrip().replace(str(Path.home()), "~")
    for pattern, name in _MEASURED:
        if name != "TIME" or MODELLED not in line:
            line = pattern.sub(name, line)
    # What is measured has a width of its own.
    return re.sub(r"\s{2,}(TIME|RATE)", r"  \1", line)


def missing(pasted: str, printed: str) -> list[str]:
    """The pasted lines that were not printed, in the order in which they would have to be.

    Args:
        pasted: from a document, with `…` for what is left out.
        printed: by the command.
    """
    actual = [same_everywhere(line) for line in printed.splitlines()]
    at, lost = 0, []
    for run in _runs(pasted):
        where = _find(run, actual, at)
        if where is None:
            lost += _first_lost(run, actual, at)
        else:
            at = where + len(run)
    return lost


def renewed(pasted: str, printed: str) -> str:
    """The pasted text as it would be pasted today: what still holds as it is, the rest from what was printed.

    Raises:
        AssertionError: nothing that was printed resembles a part of it.
    """
    lines = [line.rstrip().replace(str(Path.home()), "~") for line in printed.splitlines()]
    actual = [same_everywhere(line) for line in lines]
    parts, at = [], 0
    for run in _runs(pasted):
        where = _find(run, actual, at)
        if where is None:
            first = _nearest(run[0], actual, at)
            end = _nearest(run[-1], actual, first) + 1
            parts.append(lines[first:end])
            at = end
        else:
            parts.append(run)
            at = where + len(run)
    inside = f"\n{LEFT_OUT}\n".join("\n".join(part) for part in parts)
    ends = [line.strip() == LEFT_OUT for line in (pasted.splitlines()[0], pasted.splitlines()[-1])]
    return f"{LEFT_OUT}\n" * ends[0] + inside + "\n" + f"{LEFT_OUT}\n" * ends[1]


def _nearest(line: str, actual: Sequence[str], start: int) -> int:
    """Where what was printed resembles a pasted line most."""
    alike = [SequenceMatcher(None, same_everywhere(line), other).ratio() for other in actual[start:]]
    assert alike and max(alike) > 0.5, f"nothing like {line!r} is printed"
    return start + alike.index(max(alike))


def _runs(pasted: str) -> Iterator[list[str]]:
    """The pasted lines between those that say that lines are left out."""
    run: list[str] = []
    for line in [*pasted.splitlines(), LEFT_OUT]:
        if line.strip() == LEFT_OUT:
            if run:
                yield run
            run = []
        else:
            run.append(line)


def _matches(pasted: str, actual: str) -> bool:
    parts = [re.escape(part) for part in same_everywhere(pasted).split(LEFT_OUT)]
    return re.fullmatch(".*".join(parts), actual) is not None


def _find(run: Sequence[str], actual: Sequence[str], start: int) -> int | None:
    for at in range(start, len(actual) - len(run) + 1):
        if all(_matches(one, other) for one, other in zip(run, actual[at:], strict=False)):
            return at
    return None


def _first_lost(run: Sequence[str], actual: Sequence[str], start: int) -> list[str]:
    """Of lines that were not printed one below the other: those that were not printed at all, else all of them."""
    absent = [line for line in run if not any(_matches(line, other) for other in actual[start:])]
    return absent or list(run)
