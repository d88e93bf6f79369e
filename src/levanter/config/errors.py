"""`ConfigError` lists every mistake in a configuration, each with its file and line.

A *mark* is a position: a file (or the command line) and a line. A *problem* is one mistake at a mark; its fields hold
the key, the value, what was expected and the nearest valid names, so that programs need not parse the message. Problems
are collected over the whole document and raised together, because a user who fixes one typo at a time rents a machine
for each of them. `docs/errors.md` shows a sample of each kind.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from heapq import nsmallest

from levanter.base.input_limits import HINT_CHARACTERS, HINTS, PROBLEMS, capped

COMMAND_LINE = "command line"
KEY_CHARACTERS = 100
"""Characters of an unknown name in a request that are shown."""
LONGEST_KEY = 400
"""Characters of a key that are shown."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The position of a key or value: a source (a file name, or the command line) and a line, counted from 1.

    >>> str(Mark(source="train.yaml", line=3)), str(Mark(source=COMMAND_LINE))
    ('train.yaml:3', 'command line')
    """

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One mistake in a configuration.

    Attributes:
        message: what is wrong and how to fix it; the first line stands behind the mark and the key.
        mark: the file and line; None where the mistake is in no single line.
        key: the dotted key; "" where there is none.
        value: the value or name that was refused, as the message shows it; None where the message names none.
        expected: the type, range or names that are valid there; None where the message names none.
        nearest: the valid names whose spelling is closest, the closest first.

    >>> print(Problem(message="unknown key", mark=Mark(source="train.yaml", line=3), key="trainer.sed"))
    train.yaml:3: trainer.sed: unknown key
    """

    message: str
    mark: Mark | None = None
    key: str = ""
    value: str | None = None
    expected: str | None = None
    nearest: tuple[str, ...] = ()

    def __str__(self) -> str:
        key = self.key if len(self.key) <= LONGEST_KEY else f"{self.key[:LONGEST_KEY]}…"
        head = "".join(f"{part}: " for part in (self.mark, key) if part)
        first, *rest = self.message.splitlines()
        return "\n".join([head + first, *(f"    {line}" for line in rest)])


class ConfigError(ValueError):
    """A configuration cannot be used. The message lists all problems; entry points exit with code 2."""

    def __init__(self, problems: Iterable[Problem]):
        # A file that is included twice reports the same problem twice.
        self.problems = tuple(dict.fromkeys(problems))
        # One more than are shown is enough to know that some are not.
        lines = [str(problem) for problem in self.problems[: PROBLEMS + 1]]
        if (count := len(self.problems)) > 1:
            listed = capped([f"[{i}] {p}" for i, p in enumerate(lines, 1)])
            if count > len(lines):
                listed[-1] = f"… and {count - PROBLEMS:,} more ({PROBLEMS} are shown)"
            lines = [f"{count} problems in the configuration:", *listed]
        super().__init__("\n".join(lines))


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The up to three known words that are closest in spelling to `word`, the closest first.

    >>> nearest("sed", ["seed", "steps", "mesh"])
    ['seed']
    """
    # The comparison takes time in proportion to the product of both lengths.
    if len(word) > HINT_CHARACTERS:
        return []
    close = get_close_matches(word, sorted(set(known)), n=3, cutoff=0.6 if len(word) > 3 else 0.5)
    if not close:
        return []
    # difflib's cutoff is absolute. Of `mlp` and `mlps` only the clearly better match should be suggested.
    best = SequenceMatcher(None, close[0], word).ratio()
    return [name for name in close if SequenceMatcher(None, name, word).ratio() > best - 0.15]


def unknown_names(names: Iterable[str], known: Iterable[str], what: str) -> list[str]:
    """`name: what; did you mean …?` for names that are not known, sorted.

    Only the first `HINTS` are listed and get a suggestion, which takes time in proportion to the names; the last line
    counts the others.

    >>> unknown_names(["sed", "xyzzy"], ["seed", "steps"], "not a field")
    ['sed: not a field; did you mean `seed`?', 'xyzzy: not a field']
    """
    names, known = set(names), sorted(known)
    listed = nsmallest(HINTS, names)
    lines = [f"{name[:KEY_CHARACTERS]}: {what}{did_you_mean(name, known)}" for name in listed]
    more = len(names) - len(listed)
    return [*lines, f"{more:,} further names: {what}"] if more else lines


SAME_KEYS: Mapping[str, str] = {
    "hf_checkpoint": "initialize_from_hf",
    "initialize_from_hf": "hf_checkpoint",
    "batch_size": "train_batch_size",
    "max_tune_length": "train_seq_len",
    "train_split": "splits",
    "validation_split": "splits",
    "lr": "learning_rate",
    "max_lr": "learning_rate",
    "bs": "train_batch_size",
    "max_steps": "num_train_steps",
    "num_steps": "num_train_steps",
    "seq_len": "train_seq_len",
}
"""Keys of some commands and scripts → the key of the same thing where it has another name."""


def same_key(word: str, known: Iterable[str]) -> str:
    """`; here it is …`, if a known key is another name of the same thing; otherwise an empty text."""
    name = SAME_KEYS.get(word)
    return f"; here it is `{name}`" if name is not None and name in set(known) else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the nearest words, or an empty text.

    >>> did_you_mean("sed", ["seed", "steps"])
    '; did you mean `seed`?'
    >>> did_you_mean("xyzzy", ["seed", "steps"])
    ''
    """
    close = nearest(word, known)
    return f"; did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""
