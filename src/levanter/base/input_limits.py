"""Limits on input: the largest size, depth, count and time for every reader.

A document, a checkpoint, a tokenizer, a template or a data file may be damaged or malicious. A reader never allocates
memory only because a file announces a size, never recurses deeper than the limits here, and stops what would take
minutes. Every limit is in this module, far above any legitimate need, and every error names its limit.
"""

from collections.abc import Iterator, Sequence
from typing import IO

MIB = 1 << 20

DOCUMENT_BYTES = 4 * MIB
"""Of a configuration file."""
DOCUMENT_DEPTH = 64
"""Lists and mappings inside one another in a configuration."""
DOCUMENT_NODES = 200_000
"""Values of a configuration, with everything that aliases repeat."""
DOCUMENT_FILES = 256
"""Files that one configuration extends and includes."""
JSON_BYTES = 512 * MIB
"""Of a JSON file that describes something: config.json, tokenizer.json, an index, metadata."""
JSON_DEPTH = 256
"""Lists and objects inside one another in JSON."""
RECORD_BYTES = 256 * MIB
"""Of a line of a data file, and of a document that was compressed."""
PATTERN_CHARACTERS = 4096
"""Of a path with braces and wildcards."""
PATTERN_DEPTH = 32
"""Braces inside one another."""
PATTERN_FILES = 200_000
"""Files that one pattern may name."""
HINTS = 20
"""Misspelt keys that are compared with those that there are; further ones are only named."""
HINT_CHARACTERS = 80
"""Of a word that is compared with others."""
PROBLEMS = 100
"""Problems that are shown of one document."""
TEMPLATE_CHARACTERS = 16 * MIB
"""Of a chat template's text for one conversation, and of any text that it makes on the way."""
TEMPLATE_ITEMS = 1_000_000
"""Of a list that a chat template makes."""
TEMPLATE_SECONDS = 10.0
"""That a chat template may take for one conversation."""
HEADER_AXES = 4
"""Of a tensor in a GGUF file."""
HEADER_DEPTH = 4
"""Arrays inside one another in the metadata of a GGUF file."""


class OutOfBoundsError(ValueError):
    """Something from outside is larger, deeper or longer than anything that is sensible."""


def read_bounded(file: IO[bytes], limit: int, *, where: str) -> bytes:
    """All of an open file.

    Raises:
        OutOfBoundsError: it has more than `limit` bytes; at most one byte more than that is read.
    """
    # One byte more than the limit, to tell a file of exactly that size from a larger one.
    pieces, rest = [], limit + 1
    while rest > 0 and (piece := file.read(min(rest, 8 * MIB))):
        pieces.append(piece)
        rest -= len(piece)
    if rest <= 0:
        raise OutOfBoundsError(f"{where}: more than {shown_bytes(limit)}, the limit for such a file")
    return b"".join(pieces)


def shown_bytes(count: int) -> str:
    """A number of bytes that is a power of two, in MiB or KiB."""
    return f"{count // MIB:,} MiB" if count >= MIB else f"{count // 1024:,} KiB"


def lines_bounded(file: IO[bytes], *, where: str, before: int = 0) -> Iterator[bytes]:
    """The lines of a file, with their ends.

    Args:
        file: the file.
        where: its name, for messages.
        before: lines of it that were read before, which numbers in messages include.

    Raises:
        OutOfBoundsError: one has more than `RECORD_BYTES`.
    """
    number = before
    # A file without newlines would otherwise be read into memory as one line.
    while line := file.readline(RECORD_BYTES + 1):
        number += 1
        if len(line) > RECORD_BYTES:
            message = f"a line has more than {shown_bytes(RECORD_BYTES)}, the limit for a line"
            raise OutOfBoundsError(f"{where}:{number}: {message}")
        yield line


def capped(lines: Sequence[str], *, most: int = PROBLEMS) -> list[str]:
    """The first lines, and how many more there are."""
    if len(lines) <= most:
        return list(lines)
    return [*lines[:most], f"… and {len(lines) - most:,} more ({most} are shown)"]


LINE_CHARACTERS = 4_000
"""Characters of a line of an error: a value of a file may have millions."""
LINES = 1_000
"""Lines of an error."""


def bounded_message(text: str) -> str:
    """A message whose long lines lack their middle: a line begins with the place, and may end with a way out."""
    lines = text.split("\n") if len(text) > LINE_CHARACTERS else [text]
    return "\n".join(capped([_bounded_line(line) for line in lines], most=LINES))


def _bounded_line(line: str) -> str:
    if len(line) <= LINE_CHARACTERS:
        return line
    left_out = len(line) - LINE_CHARACTERS
    return f"{line[: LINE_CHARACTERS * 3 // 4]} … ({left_out:,} characters) … {line[-LINE_CHARACTERS // 4 :]}"
