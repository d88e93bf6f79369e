"""`ConfigError`: everything that is wrong with a configuration, each thing with its place.

A *mark* is a place: a file (or the command line) and a line. A *problem* is one thing that is wrong at a mark. Problems
are collected over the whole document and raised together, because a user who fixes one typo at a time rents a machine
for each of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches

from levanter.base.input_limits import HINT_CHARACTERS, PROBLEMS, capped

COMMAND_LINE = "command line"
LONGEST_KEY = 400
"""Characters of a key that are shown."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where something was written: a source (a file name, or the command line) and a line, counted from 1."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong: where, in which (dotted) key, and what, with what was expected."""

    message: str
    mark: Mark | None = None
    key: str = ""

    def __str__(self) -> str:
        key = self.key if len(self.key) <= LONGEST_KEY else f"{self.key[:LONGEST_KEY]}…"
        head = "".join(f"{part}: " for part in (self.mark, key) if part)
        first, *rest = self.message.splitlines()
        return "\n".join([head + first, *(f"    {line}" for line in rest)])


class ConfigError(ValueError):
    """A configuration cannot be used. The message lists all problems; entry points exit with code 2."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(dict.fromkeys(problems))
        lines = [str(problem) for problem in self.problems[: PROBLEMS + 1]]
        if (count := len(self.problems)) > 1:
            listed = capped([f"[{i}] {p}" for i, p in enumerate(lines, 1)])
            if count > len(lines):
                listed[-1] = f"… and {count - PROBLEMS:,} more ({PROBLEMS} are shown)"
            lines = [f"{count} problems in the configuration:", *listed]
        super().__init__("\n".join(lines))


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The up to three known words that are closest in spelling to `word`, the closest first."""
    if len(word) > HINT_CHARACTERS:
        return []
    close = get_close_matches(word, sorted(set(known)), n=3, cutoff=0.6 if len(word) > 3 else 0.5)
    if not close:
        return []
    best = SequenceMatcher(None, close[0], word).ratio()
    return [name for name in close if SequenceMatcher(None, name, word).ratio() > best - 0.15]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the nearest words, or nothing."""
    close = nearest(word, known)
    return f"; did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""
