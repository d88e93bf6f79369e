"""Shell completion of `levanter`: commands, keys, choices.

`levanter --completion bash` prints a script for `~/.bashrc`, and `levanter --completion zsh` one for `~/.zshrc`. The
script calls `levanter --complete WORD…` with the words up to the cursor, the last of them incomplete, and offers the
lines of its output; where there are none, the shell completes names of files.
"""

import itertools
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, get_args, get_origin

from levanter.commands.catalog import ENTRY_POINTS
from levanter.config.decode import FILE_FLAGS
from levanter.config.help import key_lines
from levanter.config.schema import TYPE_KEY, Annotation, is_choice, offered_names, strip, union_members

SHELLS = ("bash", "zsh")
_BASH = """\
_levanter() {
    local IFS=$'\\n'
    COMPREPLY=($(levanter --complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    # A block is followed by a dot and one of its keys.
    [[ ${COMPREPLY[0]} == *. ]] && compopt -o nospace
}
complete -o default -F _levanter levanter
"""
_ZSH = """\
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""


def main(words: Sequence[str], commands: Collection[str]) -> int:
    """`--completion SHELL` and `--complete WORD…`; returns the exit code.

    Args:
        words: the command line.
        commands: every command.
    """
    if words[0] == "--complete":
        print("\n".join(completions(words[1:], commands)))
        return 0
    shell = words[1] if len(words) > 1 else "bash"
    if shell not in SHELLS:
        print(f"error: --completion {shell}: expected {' or '.join(SHELLS)}", file=sys.stderr)
        return 2
    # Zsh runs bash's functions for completion, except for the option of a single call.
    print(_BASH if shell == "bash" else _ZSH + "\n".join(line for line in _BASH.splitlines() if "nospace" not in line))
    return 0


def completions(words: Sequence[str], commands: Collection[str]) -> list[str]:
    """What the last of some words may become.

    Args:
        words: the words after `levanter`, the last one incomplete (perhaps empty).
        commands: every command.
    """
    *before, word = words or [""]
    # `plan` takes an entry point and then that one's keys.
    command = [w.replace("-", "_") for w in before if not w.startswith("-")][:2]
    if not command or command == ["plan"]:
        names: Collection[str] = ENTRY_POINTS if command else commands
        return sorted(name for name in names if name.startswith(word.replace("-", "_")))
    name = command[1] if command[0] == "plan" else command[0]
    if name not in ENTRY_POINTS:
        return []
    cls = ENTRY_POINTS[name].config_class()
    chosen = {
        key[2:].removesuffix(f".{TYPE_KEY}"): value
        for key, value in itertools.pairwise(before)
        if key.endswith(f".{TYPE_KEY}")
    }
    if before[-1].startswith("--") and "=" not in before[-1]:
        return [value for value in _values(cls, before[-1][2:], chosen) if value.startswith(word)]
    return _keys(cls, word, chosen)


def _keys(cls: type, word: str, chosen: dict[str, str]) -> list[str]:
    """The keys that a word begins, down to the next dot: a class has five hundred."""
    flags = [*FILE_FLAGS, "help", "help_all"]
    depth = word.count(".")
    paths = dict.fromkeys([*flags, *(key.path for key in key_lines(cls, chosen))])
    keys = [path.split(".") for path in paths]
    # A block ends with a dot, so that the next completion lists its keys.
    offered = {".".join(p[: depth + 1]) + ("." if len(p) > depth + 1 else "") for p in keys if len(p) > depth}
    blocks = {path[:-1] for path in offered if path.endswith(".")}
    return sorted(f"--{path}" for path in offered - blocks if f"--{path}".startswith(word))


def _values(cls: type, key: str, chosen: dict[str, str]) -> Iterator[str]:
    """The values of a key that can be listed."""
    block = key.removesuffix(f".{TYPE_KEY}")
    for line in key_lines(cls, chosen):
        if line.path in (key, block) and line.annotation is not None:
            for member in union_members(line.annotation):
                yield from _names(strip(member)) if line.path == key or is_choice(member) else ()
            return


def _names(annotation: Annotation) -> tuple[str, ...]:
    if is_choice(annotation):
        return offered_names(annotation)
    if get_origin(annotation) is Literal:
        return tuple(str(value) for value in get_args(annotation))
    return ("true", "false") if annotation is bool else ()
