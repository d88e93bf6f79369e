"""Books: reading texts, and the identity of a run: everything that its results depend on.

A text is UTF-8; a leading byte order mark is dropped and Windows line endings become `\\n`, as in a program that opens
it in text mode. Characters are counted in that text.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from haliax_ext.sources import TensorSource
from levanter.io import open_read
from levanter.memorization.conventions import WindowConvention, preset_name

_SMALL_TENSORS = 8


class TextError(ValueError):
    """A file that cannot be read as text."""


@dataclass(frozen=True, kw_only=True)
class BookText:
    """A book.

    Attributes:
        text: the text that is scored.
        sha256: of the file's bytes.
        notes: the changes that were made when reading it.
    """

    text: str = field(repr=False)
    sha256: str
    notes: tuple[str, ...] = ()


def read_book(path: str) -> BookText:
    """Reads a book.

    Raises:
        MissingFileError: there is no such file; the message has the nearest names.
        TextError: it is empty, or not UTF-8 (with the first offending byte).
    """
    with open_read(path) as file:
        # The hash is of the bytes as stored, before any change, so that it can be compared with published files.
        content = file.read()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path}: not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start:,}\n"
            f"  → convert it, e.g.: iconv -f WINDOWS-1252 -t UTF-8"
        ) from error
    notes = []
    if text.startswith("\ufeff"):
        text = text[1:]
        notes.append("dropped a leading byte order mark")
    # Also a lone `\r`, as Python's text mode does.
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        notes.append("converted Windows line endings to \\n")
    if not text.strip():
        raise TextError(f"{path}: contains no text to score")
    return BookText(text=text, sha256=hashlib.sha256(content).hexdigest(), notes=tuple(notes))


def slug(title: str) -> str:
    """A title as a folder's name: lower case, words joined by `_`."""
    return re.sub(r"[^\w.-]+", "_", title.strip().lower()).strip("_.") or "book"


def weights_digest(source: TensorSource) -> str:
    """SHA-256 that distinguishes checkpoints without reading them in full: names, shapes, dtypes, the smallest tensors.

    The smallest are norms and biases, which change in any fine-tuning that changes all weights.
    """
    digest = hashlib.sha256()
    for name, info in sorted(source.tensors.items()):
        digest.update(repr((name, tuple(info.shape), info.dtype.name)).encode())
    # Ties in size are ordered by name, so that the same tensors are read every time.
    smallest = sorted(source.tensors.items(), key=lambda item: (item[1].nbytes, item[0]))[:_SMALL_TENSORS]
    for name, info in smallest:
        digest.update(source.read(name, tuple(slice(0, size) for size in info.shape)).tobytes())
    return digest.hexdigest()


def windows_identity(book: BookText, convention: WindowConvention, *, max_windows: int | None) -> dict[str, Any]:
    """The part of a run's identity that covers the text and its windows."""
    identity: dict[str, Any] = {"text.sha256": book.sha256, "text.characters": len(book.text)}
    identity |= flat("windows", asdict(convention.windowing))
    return identity | {"windows.max": max_windows, "preset": preset_name(convention), "scheme": convention.scheme.name}


def flat(prefix: str, value: object) -> dict[str, Any]:
    """A nested mapping as dotted keys."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    flattened: dict[str, Any] = {}
    for key, item in value.items():
        flattened |= flat(f"{prefix}.{key}", item)
    return flattened
