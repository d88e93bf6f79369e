"""Reads configuration files with `extends:` and `!include`.

A document may begin with `extends: base.yaml` (or a list): the bases are merged in order and the document over them.
The value `!include other.yaml` is replaced by the contents of that file. Both paths are relative to the file that
contains them. A path may also be a URL (`gs://…`).
"""

import os
import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

from levanter.base.input_limits import DOCUMENT_BYTES, DOCUMENT_FILES, OutOfBoundsError, read_bounded
from levanter.config.errors import Mark, Problem, nearest
from levanter.config.yaml_nodes import ListNode, MapNode, Node, Scalar, compose, merged

EXTENDS = "extends"
SUFFIXES = ("", ".yaml", ".yml")


class Files:
    """Reads documents with the files that they extend and include; collects errors in `problems`."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._open: list[str] = []
        self._read = 0

    def document(self, path: str, reference: Mark | None = None) -> MapNode | None:
        """The document of a file, its bases merged under it; None where it cannot be read.

        Args:
            path: a file or a URL; `.yaml` or `.yml` may be left out.
            reference: where the file is named, for messages.
        """
        node = self._file(path, reference)
        if node is None or isinstance(node, MapNode):
            return node
        message = f"{path} must contain a mapping (`key: value` lines)"
        self.problems.append(Problem(message=message, mark=node.mark))
        return None

    def _file(self, path: str, reference: Mark | None) -> Node | None:
        location = _locate(path)
        # A path with and without its suffix, or through `..`, is one file.
        # Only files that are being read count: two files may include the same third one.
        if location in self._open:
            chain = " → ".join([*self._open[self._open.index(location) :], location])
            self.problems.append(Problem(message=f"circular !include: {chain}", mark=reference))
            return None
        self._read += 1
        if self._read > DOCUMENT_FILES:
            # Report the limit once, not for every further file.
            if self._read == DOCUMENT_FILES + 1:
                message = f"more than {DOCUMENT_FILES} files are extended and included, the limit"
                self.problems.append(Problem(message=message, mark=reference))
            return None
        text = self._text(location, reference)
        if text is None:
            return None
        self._open.append(location)
        try:
            # `_open` is the stack of files whose composition has begun; the callback below recurses into it.
            node = compose(text, location, self.problems, lambda name, mark: self._file(_sibling(location, name), mark))
            if node is None:
                return MapNode(entries=(), mark=Mark(source=location))
            return self._extended(node, location) if isinstance(node, MapNode) and EXTENDS in node else node
        finally:
            self._open.pop()

    def _extended(self, node: MapNode, path: str) -> Node:
        entry = node.entry(EXTENDS)
        assert entry is not None
        names = entry.node.items if isinstance(entry.node, ListNode) else (entry.node,)
        # Later bases win over earlier ones, and the document over all of them.
        result: Node | None = None
        for name in names:
            if not isinstance(name, Scalar) or not isinstance(name.value, str):
                message = "expected a file name or a list of file names"
                self.problems.append(Problem(message=message, mark=name.mark, key=EXTENDS))
                continue
            base = self.document(_sibling(path, name.text), name.mark)
            if base is not None:
                result = base if result is None else merged(result, base)
        overrides = node.without(EXTENDS)
        return overrides if result is None else merged(result, overrides)

    def _text(self, location: str, reference: Mark | None) -> str | None:
        try:
            if _is_url(location):
                import fsspec

                with fsspec.open(location, "rb") as stream:
                    return read_bounded(cast(IO[bytes], stream), DOCUMENT_BYTES, where=location).decode("utf-8")
            with Path(location).open("rb") as stream:
                return read_bounded(stream, DOCUMENT_BYTES, where=location).decode("utf-8")
        except FileNotFoundError:
            message = f"no such file: {location}{_instead(location)}"
            if reference is not None:
                message += " (paths are relative to the file that names them)"
        except OutOfBoundsError as error:
            message = str(error)
        except UnicodeDecodeError as error:
            message = f"{location} is not UTF-8 text: {error.reason} at byte {error.start}"
        except (OSError, ImportError, ValueError) as error:
            message = f"cannot read {location}: {error}"
        self.problems.append(Problem(message=message, mark=reference))
        return None


def read_documents(paths: Sequence[str], problems: list[Problem]) -> MapNode:
    """Merges the documents of several files, later ones over earlier ones."""
    files = Files()
    result: Node = MapNode(entries=(), mark=Mark(source=paths[0] if paths else "(no file)"))
    for path in paths:
        document = files.document(path)
        if document is not None:
            result = merged(result, document)
    problems += files.problems
    assert isinstance(result, MapNode)
    return result


def _is_url(path: str) -> bool:
    return "://" in path


def _locate(path: str) -> str:
    if _is_url(path):
        return path
    path = os.path.normpath(os.path.expanduser(path))
    return next((path + end for end in SUFFIXES if os.path.isfile(path + end)), path)


def _instead(path: str) -> str:
    """A hint for a missing file: documents of the same folder with similar names."""
    folder, name = os.path.split(path)
    if _is_url(path):
        return ""
    if not os.path.isdir(folder or "."):
        return f"; nor is there a folder {folder}"
    try:
        names = os.listdir(folder or ".")
    except OSError:  # a folder that may not be listed; the caller reports the missing file anyway
        return ""
    # All of them have the same suffixes, which would only raise the similarity.
    candidates = {_stem(other): other for other in names if other.endswith(SUFFIXES[1:])}
    close = [os.path.join(folder, candidates[stem]) for stem in nearest(_stem(name), candidates)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _stem(name: str) -> str:
    return next((name.removesuffix(end) for end in SUFFIXES[1:] if name.endswith(end)), name)


def _sibling(path: str, name: str) -> str:
    """The path `name`, as written in the file `path`."""
    # A path in a file is relative to that file, wherever the command runs.
    if _is_url(name) or os.path.isabs(name) or name.startswith("~"):
        return name
    if _is_url(path):
        scheme, rest = path.split("://", 1)
        return f"{scheme}://{posixpath.normpath(posixpath.join(posixpath.dirname(rest), name))}"
    return os.path.join(os.path.dirname(path), name)
