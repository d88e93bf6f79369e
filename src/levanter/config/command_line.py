"""The command line: which files, and one more document over them.

    --config_path X | --config X | --configs A B …      files, merged in order; later ones win
    --a.b.c value   or   --a.b.c=value                  one key; the value is read as YAML
    --help [prefix]                                     the keys, their types and defaults

All overrides together are one document that is merged last, so `--trainer.mesh.axes '{model: 2}'` and
`--trainer.mesh.axes.model 2` mean the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from levanter.config.errors import COMMAND_LINE, ConfigError, Mark, Problem
from levanter.config.yaml_nodes import Entry, MapNode, Node, Scalar, compose, merged

FILE_FLAGS = ("config_path", "config", "configs")
_HERE = Mark(source=COMMAND_LINE)


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What was asked for on a command line.

    Attributes:
        paths: configuration files, in order.
        overrides: pairs (dotted key, text).
        help: None, or the prefix of the keys to explain ("" for all).
    """

    paths: tuple[str, ...] = ()
    overrides: tuple[tuple[str, str], ...] = ()
    help: str | None = None


def parse_argv(argv: Sequence[str]) -> CommandLine:
    """Splits a command line into files and overrides.

    Raises:
        ConfigError: with everything that cannot be understood.
    """
    problems: list[Problem] = []
    paths: dict[str, list[str]] = {}
    overrides: list[tuple[str, str]] = []
    wants_help: str | None = None
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            wants_help = rest.pop(0).removeprefix("--") if rest and not rest[0].startswith("-") else ""
            continue
        if not word.startswith("--") or word == "--":
            problems.append(Problem(message=f"expected --key value, got {word!r}", mark=_HERE))
            continue
        key, equals, text = word[2:].partition("=")
        values = [text] if equals else _values(rest, many=key == "configs")
        if not values:
            problems.append(Problem(message=f"--{key} needs a value", mark=_HERE))
        elif key in FILE_FLAGS:
            paths.setdefault(key, []).extend(values)
        elif not all(key.split(".")):
            problems.append(Problem(message=f"--{key} is not a key such as --trainer.seed", mark=_HERE))
        else:
            overrides.append((key, values[0]))
    if len(paths) > 1 or any(len(occurrences) > 1 for flag, occurrences in paths.items() if flag != "configs"):
        message = (
            "give one of --config_path X, --config X and --configs A B … (to merge several files, list them after "
            "--configs)"
        )
        problems.append(Problem(message=message, mark=_HERE))
    if problems:
        raise ConfigError(problems)
    return CommandLine(
        paths=tuple(path for occurrences in paths.values() for path in occurrences),
        overrides=tuple(overrides),
        help=wants_help,
    )


def _values(rest: list[str], *, many: bool) -> list[str]:
    """Takes the value of a key off the words that follow it; all up to the next key for `many`."""
    words: list[str] = []
    while rest and not rest[0].startswith("--") and (many or not words):
        words.append(rest.pop(0))
    return words


def overrides_document(overrides: Iterable[tuple[str, str]]) -> MapNode:
    """The overrides as one document. Later ones win."""
    result: Node = MapNode(entries=(), mark=_HERE)
    for key, text in overrides:
        node = value_node(text)
        for part in reversed(key.split(".")):
            node = MapNode(entries=(Entry(key=part, node=node, mark=_HERE),), mark=_HERE)
        result = merged(result, node)
    assert isinstance(result, MapNode)
    return result


def value_node(text: str) -> Node:
    """The text of an override as a node: lists, mappings and quoted text by YAML, everything else verbatim."""
    if text[:1] in ("[", "{", '"', "'"):
        problems: list[Problem] = []
        node = compose(text, COMMAND_LINE, problems, lambda *_: None)
        if node is not None and not problems:
            return _on_command_line(node, text)
    return Scalar(text=text, mark=_HERE)


def _on_command_line(node: Node, text: str | None) -> Node:
    """The node with the command line as its place (a line number would mean nothing there)."""
    if isinstance(node, Scalar):
        return Scalar(text=node.text, mark=_HERE, plain=node.plain)
    if isinstance(node, MapNode):
        entries = (Entry(key=e.key, node=_on_command_line(e.node, None), mark=_HERE) for e in node)
        return MapNode(entries=tuple(entries), mark=_HERE, text=text)
    return type(node)(items=tuple(_on_command_line(item, None) for item in node.items), mark=_HERE, text=text)
