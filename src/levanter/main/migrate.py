"""Writes a document of an earlier generation in today's spelling, and says what was changed and why.

    python -m levanter.main.migrate old.yaml                            the new document, changes as comments above it
    python -m levanter.main.migrate old.yaml --output new.yaml          the same into a file; the changes are printed
    python -m levanter.main.migrate old.yaml --entry_point eval_lm      and reads the result as that entry point would

What is included or extended is written in place, and comments of the old document are not kept. Reading the new
document changes nothing any more. The translation is the one every entry point makes when it reads a document
(`levanter.config.legacy`); this only writes it down.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from levanter.config import ConfigError, parse_text
from levanter.config.errors import Problem
from levanter.config.files import read_documents
from levanter.config.legacy import Change, translate
from levanter.config.nodes import to_plain
from levanter.io import atomic_write, exists, setup_logging
from levanter.main.absent import ABSENT
from levanter.main.entry import shell
from levanter.main.plan import ENTRY_POINTS

CLASSES = {
    **{name: entry.config for name, entry in ENTRY_POINTS.items()},
    "cache_dataset": "CacheDatasetConfig",
}
"""Entry point → its configuration class in its module."""


class MigrateUsageError(ValueError):
    """The command line asks for nothing that can be migrated."""


@dataclass(frozen=True, kw_only=True)
class Migrated:
    """A document in today's spelling.

    Attributes:
        text: the document.
        changes: what was translated.
    """

    text: str
    changes: tuple[Change, ...]

    @property
    def annotated(self) -> str:
        """The document with its changes as comments above it."""
        comments = "".join(f"# {line}\n" for change in self.changes for line in str(change).splitlines())
        return comments + ("\n" if comments else "") + self.text


def migrate(path: str) -> Migrated:
    """Reads a document and writes it anew.

    Raises:
        ConfigError: it cannot be read, or contradicts itself.
    """
    problems: list[Problem] = []
    document = read_documents([path], problems)
    translation = translate(document)
    problems += translation.problems
    if problems:
        raise ConfigError(problems)
    plain = to_plain(translation.document)
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)
    return Migrated(text=text, changes=translation.changes)


def config_class(entry_point: str) -> type:
    """The configuration class of an entry point, of those that are not here yet too.

    Raises:
        MigrateUsageError: there is none of that name.
    """
    if entry_point in CLASSES:
        return getattr(importlib.import_module(f"levanter.main.{entry_point}"), CLASSES[entry_point])
    if entry_point in ABSENT:
        return ABSENT[entry_point].config
    known = ", ".join(sorted({*CLASSES, *ABSENT}))
    raise MigrateUsageError(f"unknown entry point {entry_point!r}; known: {known}")


def main(argv: Sequence[str]) -> int:
    """Migrates the document that a command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m levanter.main.migrate", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("document", help="the YAML file")
    parser.add_argument("--output", help="where the new document is written; it must not exist")
    parser.add_argument("--entry_point", help="read the new document as this entry point would")
    asked = parser.parse_args(argv)
    if asked.output is not None and exists(asked.output):
        raise MigrateUsageError(f"{asked.output} exists already; name another file")
    done = migrate(asked.document)
    if asked.entry_point is not None:
        parse_text(config_class(asked.entry_point), done.text, source=f"{asked.document}, migrated")
    if asked.output is None:
        sys.stdout.write(done.annotated)
        return 0
    with atomic_write(asked.output) as file:
        file.write(done.annotated.encode())
    for change in done.changes:
        print(change)
    print(f"{len(done.changes)} changes; the new document is {asked.output}")
    return 0


def run(argv: Sequence[str] | None = None) -> int:
    """The entry point: exit code 0, or 2 for a document that cannot be read."""
    setup_logging()
    return shell(lambda: main(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(run())
