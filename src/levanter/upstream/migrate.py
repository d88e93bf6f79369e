"""Rewrites a document of an earlier generation with the current keys, and reports what changed and why.

    python -m levanter.main.migrate old.yaml                            the new document, changes as comments above it
    python -m levanter.main.migrate old.yaml --output new.yaml          the same into a file; the changes are printed
    python -m levanter.main.migrate old.yaml --entry_point eval_lm      and reads the result as that entry point would

Included and extended documents are inlined, and comments of the old document are not kept. Migrating the new document
again changes nothing. The translation is the one every entry point makes when it reads a document
(`levanter.config.upstream`); this only writes it down.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from levanter.commands.catalog import ENTRY_POINTS
from levanter.commands.cli.errors import shell
from levanter.commands.model.defaults import changed_defaults
from levanter.config import ConfigError, read_text
from levanter.config.errors import Problem
from levanter.config.includes import read_documents
from levanter.config.loader import upstream_schema
from levanter.config.schema import config_fields
from levanter.config.upstream import Change, translate
from levanter.config.upstream.changes import PlainDumper
from levanter.config.upstream.model import MODEL, ROW_LENGTH
from levanter.config.yaml_nodes import to_plain
from levanter.io import atomic_write, exists, printable, setup_logging
from levanter.upstream.unsupported.entry_points import ABSENT

CLASSES = {
    **{name: entry.config for name, entry in ENTRY_POINTS.items()},
    "cache_dataset": "CacheDatasetConfig",
}
"""Entry point → its configuration class in its module."""


class MigrateUsageError(ValueError):
    """The command line names nothing that can be migrated."""


@dataclass(frozen=True, kw_only=True)
class Migrated:
    """A document with today's keys.

    Attributes:
        text: the document.
        changes: what was translated.
        notes: keys that the document omits and whose default differs here.
    """

    text: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    @property
    def annotated(self) -> str:
        """The document with its changes and notes as comments above it."""
        messages = [*map(str, self.changes), *(f"note: {note}" for note in self.notes)]
        comments = "".join(f"# {line}\n" for message in messages for line in message.splitlines())
        return comments + ("\n" if comments else "") + self.text


def migrate(path: str, entry_point: str | None = None) -> Migrated:
    """Reads a document and rewrites it.

    Args:
        path: the document.
        entry_point: the entry point that reads it; None if not given.

    Raises:
        ConfigError: the document cannot be read, or contradicts itself.
    """
    problems: list[Problem] = []
    document = read_documents([path], problems)
    reader = None if entry_point is None else config_class(entry_point)
    # The same keys may mean different things to different entry
    # points; without one, only the unambiguous are translated.
    takes, earlier = ((), "") if reader is None else (config_fields(reader), upstream_schema(reader))
    translation = translate(document, takes, earlier)
    problems += translation.problems
    if problems:
        raise ConfigError(problems)
    # Dumped from values, not from the old text: comments and anchors are lost, includes are inlined.
    plain = to_plain(translation.document)
    text = yaml.dump(plain, Dumper=PlainDumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)
    model = plain.get("model")
    # A key that the old document left out had upstream's default; where ours differs, the run would change silently.
    notes = [*changed_defaults(str(model.get("type")), model)] if isinstance(model, dict) else []
    # Early documents had one `seq_len` for the model and for the rows of the data; only some entry points read both.
    old = document.at((*MODEL, "seq_len"))
    if old is not None and entry_point is None and ROW_LENGTH not in document:
        length = to_plain(old.node)
        notes.append(
            f"for eval_lm and viz_logprobs it also sets {ROW_LENGTH}: {length} (written with --entry_point eval_lm)"
        )
    return Migrated(text=text, changes=translation.changes, notes=tuple(notes))


def config_class(entry_point: str) -> type:
    """The configuration class of an entry point, including those that are not implemented yet.

    Raises:
        MigrateUsageError: no entry point has that name.
    """
    if entry_point in CLASSES:
        return getattr(importlib.import_module(f"levanter.main.{entry_point}"), CLASSES[entry_point])
    if entry_point in ABSENT:
        return ABSENT[entry_point].config
    known = ", ".join(sorted({*CLASSES, *ABSENT}))
    raise MigrateUsageError(f"unknown entry point {entry_point!r}; known: {known}")


def main(argv: Sequence[str]) -> int:
    """Runs the command: migrates the document named on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m levanter.main.migrate", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("document", help="the YAML file")
    parser.add_argument("--output", help="file for the new document; it must not exist")
    parser.add_argument("--entry_point", help="the entry point that reads it, whose checks are then applied")
    arguments = parser.parse_args(argv)
    if arguments.output is not None and exists(arguments.output):
        raise MigrateUsageError(f"{arguments.output} already exists; choose another file")
    migrated = migrate(arguments.document, arguments.entry_point)
    if arguments.entry_point is not None:
        # Raises if the entry point would refuse the result, before any file is written.
        read_text(config_class(arguments.entry_point), migrated.text, source=f"{arguments.document}, migrated")
    if arguments.output is None:
        sys.stdout.write(migrated.annotated)
        return 0
    # Written atomically, so that an interrupted run leaves no partial document.
    with atomic_write(arguments.output) as file:
        file.write(migrated.annotated.encode())
    for change in migrated.changes:
        print(printable(str(change)))
    for note in migrated.notes:
        print(printable(f"note: {note}"))
    print(f"{len(migrated.changes)} changes; new document: {arguments.output}")
    return 0


def run(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns exit code 0, or 2 for a document that cannot be read."""
    setup_logging()
    return shell(lambda: main(sys.argv[1:] if argv is None else argv))
