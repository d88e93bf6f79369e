"""From files and a command line to a configuration: read, merge, translate, decode.

    files ─► one document ─► overrides merged over it ─► old spellings translated ─► frozen dataclasses

Each step collects problems and continues if it can, so that one `ConfigError` lists them all. The command line:

    --config_path X | --config X | --configs A B …      files, merged in order; later ones win
    --a.b.c value   or   --a.b.c=value                  one key; the value is read as YAML
    --help [prefix] | --help_all                        the keys, their types and defaults

All overrides together are one document that is merged last, so `--trainer.mesh.axes '{model: 2}'` and
`--trainer.mesh.axes.model 2` mean the same.
"""

import functools
import inspect
import logging
import os
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Generic, TypeVar, cast

from levanter.base.bounded_json import lone_surrogate
from levanter.config.decode import FILE_FLAGS, INVALID, Decoder
from levanter.config.errors import COMMAND_LINE, ConfigError, Mark, Problem
from levanter.config.explicit_keys import ExplicitKeys
from levanter.config.help import explain
from levanter.config.includes import EXTENDS, read_documents
from levanter.config.schema import TYPE_KEY, config_fields
from levanter.config.upstream import Change, old_keys, translate
from levanter.config.upstream.unsupported import NotCarried, remove_unsupported, unsupported_rows
from levanter.config.yaml_nodes import Entry, ListNode, MapNode, Node, Scalar, compose, from_plain, merged


class HelpRequested(Exception):
    """The command line has `--help`; the message is the help text. Entry points print it and exit with code 0."""


C = TypeVar("C")
R = TypeVar("R")
logger = logging.getLogger(__name__)

TYPE_SUFFIX = f".{TYPE_KEY}"
BAD_CONFIG = 2
_HALF_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates other than those that stand for bytes of a command line that are not UTF-8, as names of files may have."""
"""The exit code of an entry point whose configuration cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Loaded(Generic[C]):
    """A configuration and how it came about.

    Attributes:
        config: the configuration.
        changes: what was translated from old spellings.
        document: the merged and translated document it was decoded from.
        written: the keys that were in it.
    """

    config: C
    changes: tuple[Change, ...]
    document: MapNode
    written: ExplicitKeys


def load(config_class: type[C], argv: Sequence[str] | None = None, *, program: str | None = None) -> C:
    """Loads the configuration of a command line; `load_written` also returns the keys that the user wrote.

    Raises:
        ConfigError: as `load_written`, and for unsupported options, which `ExplicitKeys` would report.
        HelpRequested: with the help text, where `--help` is on the command line.
    """
    return _config_only(load_written(config_class, argv, program=program))


def load_written(
    config_class: type[C],
    argv: Sequence[str] | None = None,
    *,
    program: str | None = None,
    common: Sequence[str] = (),
    example: str = "",
) -> Loaded[C]:
    """Loads the configuration of a command line and logs a warning for each translated key.

    Args:
        config_class: the entry point's dataclass.
        argv: the words after the program's name; `sys.argv[1:]` where None.
        program: what a user types before those words; default the module that the class is in.
        common: the keys that most runs set, with which `--help` begins.
        example: a configuration file to begin with.

    Raises:
        ConfigError: with everything that is wrong.
        HelpRequested: with the help text, where `--help` is on the command line.
    """
    arguments = parse_argv(sys.argv[1:] if argv is None else argv)
    if arguments.help is not None:
        # `--model.type llama --help model` lists the keys of the chosen type.
        chosen = {key.removesuffix(TYPE_SUFFIX): name for key, name in arguments.overrides if key.endswith(TYPE_SUFFIX)}
        first = () if arguments.help_all else common
        text = explain(config_class, arguments.help, chosen, program=program, common=first, example=example)
        raise HelpRequested(text)
    loaded = read(config_class, paths=arguments.paths, overrides=arguments.overrides)
    for change in loaded.changes:
        logger.warning("%s", change)
    return loaded


def parse(
    config_class: type[C],
    *,
    paths: Sequence[str] = (),
    overrides: Mapping[str, object] | Sequence[tuple[str, object]] = (),
) -> C:
    """The configuration of some files with overrides; `read` also returns the changes.

    Args:
        config_class: the entry point's dataclass.
        paths: files, merged in order.
        overrides: dotted keys with values; text is read as on the command line.

    Raises:
        ConfigError: with everything that is wrong, requests for unsupported options included.
    """
    return _config_only(read(config_class, paths=paths, overrides=overrides))


def read(
    config_class: type[C],
    *,
    paths: Sequence[str] = (),
    overrides: Mapping[str, object] | Sequence[tuple[str, object]] = (),
) -> Loaded[C]:
    """As `parse`, with the changes and the document."""
    problems: list[Problem] = []
    document = read_documents(paths, problems)
    pairs = overrides.items() if isinstance(overrides, Mapping) else overrides
    # Overrides are merged before anything is translated, so that old spellings work on the command line too.
    return _decoded(config_class, merged(document, _overrides(pairs)), problems)


def parse_text(config_class: type[C], text: str, *, source: str = "<text>") -> C:
    """The configuration of a YAML text that extends and includes nothing, such as a canonical dump.

    Raises:
        ConfigError: with everything that is wrong, requests for unsupported options included.
    """
    return _config_only(read_text(config_class, text, source=source))


def read_text(config_class: type[C], text: str, *, source: str = "<text>") -> Loaded[C]:
    """As `parse_text`, with the changes, the document and what was written."""
    problems: list[Problem] = []

    def refuse(name: str, mark: Mark) -> None:
        problems.append(Problem(message=f"!include {name}: only a document in a file may include others", mark=mark))

    node = compose(text, source, problems, refuse)
    document = node if node is not None else MapNode(entries=(), mark=Mark(source=source))
    if isinstance(document, MapNode) and (entry := document.entry(EXTENDS)) is not None:
        problems.append(Problem(message="only a document in a file may extend others", mark=entry.mark, key=EXTENDS))
        document = document.without(EXTENDS)
    return _decoded(config_class, document, problems)


def arguments_for(function: Callable[..., Any], loaded: Loaded[C]) -> tuple[C, dict[str, ExplicitKeys]]:
    """The arguments for a function of a configuration: the keyword `written` where it takes one.

    Raises:
        ConfigError: it takes none, and the document requests unsupported options.
    """
    if "written" in inspect.signature(function).parameters:
        return loaded.config, {"written": loaded.written}
    return _config_only(loaded), {}


def _config_only(loaded: Loaded[C]) -> C:
    """The configuration alone; raises for unsupported options, because the caller has no `ExplicitKeys` to check."""
    # Without `ExplicitKeys` nothing later could report these options, so they are errors here.
    refused = [row for row in loaded.written.not_carried if row.refused]
    if refused:
        raise ConfigError([Problem(message=row.why, mark=loaded.document.mark, key=row.key) for row in refused])
    return loaded.config


def _overrides(pairs: Collection[tuple[str, object]]) -> MapNode:
    texts = [(key, value) for key, value in pairs if isinstance(value, str)]
    result: Node = overrides_document(texts)
    mark = Mark(source=COMMAND_LINE)
    for key, value in pairs:
        # Values from Python keep their types; only text is parsed like a word of the command line.
        if not isinstance(value, str):
            node = from_plain(value, mark)
            # The dotted key becomes nested mappings, from the inside out.
            for part in reversed(key.split(".")):
                node = MapNode(entries=(Entry(key=part, node=node, mark=mark),), mark=mark)
            result = merged(result, node)
    assert isinstance(result, MapNode)
    return result


def upstream_schema(config_class: type) -> str:
    """The upstream command whose documents a class also accepts: its `EARLIER`; "" for none."""
    return getattr(config_class, "EARLIER", "")


def _decoded(config_class: type[C], document: Node, problems: list[Problem]) -> Loaded[C]:
    changes: tuple[Change, ...] = ()
    unsupported: tuple[NotCarried, ...] = ()
    takes = config_fields(config_class) if is_dataclass(config_class) else ()
    if isinstance(document, MapNode):
        translation = translate(document, takes, upstream_schema(config_class))
        document, changes = translation.document, translation.changes
        problems += translation.problems
        # After the translation, so that rows for unsupported options need only the current spelling.
        document, unsupported = remove_unsupported(document, takes)
    decoder = Decoder(config_class, lambda path: (*old_keys(path), *unsupported_rows(path, takes)))
    value = decoder.decode(document, config_class)
    problems += [*decoder.problems, *_unencodable(document, "")]
    if problems:
        raise ConfigError(problems)
    assert value is not INVALID and isinstance(document, MapNode)
    return Loaded(
        config=cast(C, value),
        changes=changes,
        document=document,
        written=ExplicitKeys(frozenset(decoder.written), unsupported),
    )


def _unencodable(node: Node, key: str) -> Iterator[Problem]:
    """A problem for each text that neither UTF-8 nor the name of a file can hold (`"\\ud800"` in YAML)."""
    if isinstance(node, MapNode):
        for entry in node:
            if (half := lone_surrogate(entry.key)) is not None:
                message = f"{entry.key!r} is no text: character {half} is half of a surrogate pair, or was not UTF-8"
                yield Problem(message=message, mark=entry.mark, key=key, value=entry.key)
            yield from _unencodable(entry.node, f"{key}.{entry.key}" if key else entry.key)
    elif isinstance(node, ListNode):
        for n, item in enumerate(node.items):
            yield from _unencodable(item, f"{key}[{n}]")
    elif (half := _HALF_SURROGATE.search(node.text)) is not None:
        message = f"character {half.start()} is half of a surrogate pair, which neither text nor a file name can have"
        yield Problem(message=message, mark=node.mark, key=key, value=node.text)


def main(
    function: Callable[[Any], R] | None = None, *, args: Sequence[str] | None = None
) -> Callable[[], R] | Callable[[Callable[[Any], R]], Callable[[], R]]:
    """Turns a function of a configuration into a program: `main(run)()`, or `@main(args=[…])`.

    The configuration class is the annotation of the function's first argument. Where the function has a keyword
    `written`, it receives the keys that the user wrote. A `ConfigError` becomes its message on standard error and
    exit code 2.
    """
    if function is None:
        return functools.partial(main, args=args)  # type: ignore[return-value]

    @functools.wraps(function)
    def program() -> R:
        parameters = inspect.signature(function).parameters
        # The class is taken from the annotation: user scripts pass no class.
        config_class = typing.get_type_hints(function)[next(iter(parameters))]
        try:
            loaded = load_written(config_class, args)
            config, arguments = arguments_for(function, loaded)
        except HelpRequested as help_text:
            _show(help_text)
            raise SystemExit(0) from None
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
            raise SystemExit(BAD_CONFIG) from None
        return function(config, **arguments)

    return program


def _show(text: object) -> None:
    """Prints a help text."""
    try:
        sys.stdout.write(str(text))
        sys.stdout.flush()
    except BrokenPipeError:
        # `… --help | head`: the reader has gone; Python's own last flush must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


HELP_ALL = ("--help_all", "--help-all")
_HERE = Mark(source=COMMAND_LINE)


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A parsed command line.

    Attributes:
        paths: configuration files, in order.
        overrides: pairs (dotted key, text).
        help: None, or the prefix of the keys to explain ("" for all).
        help_all: whether `--help_all` was given.
    """

    paths: tuple[str, ...] = ()
    overrides: tuple[tuple[str, str], ...] = ()
    help: str | None = None
    help_all: bool = False


def parse_argv(argv: Sequence[str]) -> CommandLine:
    """Splits a command line into files and overrides.

    >>> arguments = parse_argv(["--config", "train.yaml", "--trainer.seed=1"])
    >>> arguments.paths, arguments.overrides
    (('train.yaml',), (('trainer.seed', '1'),))

    Raises:
        ConfigError: with everything that cannot be understood.
    """
    problems: list[Problem] = []
    paths: dict[str, list[str]] = {}
    overrides: list[tuple[str, str]] = []
    wants_help: str | None = None
    help_all = False
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            # `--help` may be followed by the prefix of the keys to explain.
            wants_help = rest.pop(0).removeprefix("--") if rest and not rest[0].startswith("-") else ""
            continue
        if word in HELP_ALL:
            wants_help, help_all = "", True
            continue
        if not word.startswith("--") or word == "--":
            is_file = word.lower().endswith((".yaml", ".yml", ".json"))
            hint = f"; did you mean --config_path {word}?" if is_file else ""
            problems.append(Problem(message=f"expected --key value, got {word!r}{hint}", mark=_HERE))
            continue
        key, equals, text = word[2:].partition("=")
        # After `--configs` several words are values; any other key takes one.
        values = [text] if equals else _values(rest, takes_many=key == "configs")
        if not values:
            problems.append(Problem(message=f"--{key} needs a value", mark=_HERE))
        elif key in FILE_FLAGS:
            paths.setdefault(key, []).extend(values)
        elif not all(key.split(".")):
            problems.append(Problem(message=f"--{key} is not a key such as --trainer.seed", mark=_HERE))
        else:
            overrides.append((key, values[0]))
    # Two kinds of file flags, or one given twice, leave the order of merging open.
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
        help_all=help_all,
    )


def _values(rest: list[str], *, takes_many: bool) -> list[str]:
    """Takes the value of a key off the words that follow it; all up to the next key for `takes_many`."""
    words: list[str] = []
    while rest and not rest[0].startswith("--") and (takes_many or not words):
        words.append(rest.pop(0))
    return words


def overrides_document(overrides: Iterable[tuple[str, str]]) -> MapNode:
    """The overrides as one document. Later ones win.

    >>> from levanter.config.yaml_nodes import to_plain
    >>> to_plain(overrides_document([("trainer.seed", "1"), ("trainer.mesh.axes", "{model: 2}")]))
    {'trainer': {'seed': 1, 'mesh': {'axes': {'model': 2}}}}
    """
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
    """The node with the command line as its mark; the line number of a single word means nothing."""
    if isinstance(node, Scalar):
        return Scalar(text=node.text, mark=_HERE, plain=node.plain)
    if isinstance(node, MapNode):
        entries = (Entry(key=e.key, node=_on_command_line(e.node, None), mark=_HERE) for e in node)
        return MapNode(entries=tuple(entries), mark=_HERE, text=text)
    return type(node)(items=tuple(_on_command_line(item, None) for item in node.items), mark=_HERE, text=text)
