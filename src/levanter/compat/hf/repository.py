"""Repositories: the named files of a checkpoint on disk, behind a URL, or on the Hugging Face Hub.

`LocalFolder` is a folder on disk and uses no network. `RemoteFolder` reads a URL by ranges and stores nothing.
`hub.HubRepository` is the Hugging Face Hub through its cache. All implement the same protocol.
"""

import io
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from haliax_ext.errors import nearest
from levanter.base.bounded_json import parse_json
from levanter.base.input_limits import JSON_BYTES, OutOfBoundsError, read_bounded
from levanter.compat.hf.errors import CheckpointError, CorruptFileError, MissingCheckpointFileError
from levanter.compat.hf.readers import ByteReader, LocalFile, RemoteFile, with_retry
from levanter.io import ranges
from levanter.io.paths import filesystem

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
KNOWN_FILES = (
    "config.json",
    INDEX,
    SINGLE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
    "tokenizer.model",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""The names that transformers gives the files of a checkpoint."""


PROBE_THREADS = 16
"""Threads that check whether files exist."""


def stays_inside(file: str) -> bool:
    """Whether a name is a plain relative path without steps upwards, on any operating system."""
    # Empty parts are refused, too: a leading or double slash could make the path absolute.
    plain = all(part not in ("", ".", "..") for part in file.split("/"))
    # Backslash and colon are separators or drives on Windows, and NUL ends a C string.
    return plain and not any(sign in file for sign in ("\\", ":", "\0"))


class Repository(Protocol):
    """Named files of a checkpoint."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    @property
    def files(self) -> frozenset[str]:
        """Its files, as paths relative to it."""
        ...

    def where(self, file: str) -> str:
        """The name of one of its files in messages."""
        ...

    def text(self, file: str) -> bytes:
        """The content of a small file."""
        ...

    def reader(self, file: str) -> ByteReader:
        """A reader of a large file, by ranges."""
        ...

    def local_path(self, file: str) -> Path:
        """A path on disk with the file's content, fetched if needed."""
        ...


@dataclass(frozen=True)
class LocalFolder:
    """A folder on a mounted file system."""

    path: Path

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def files(self) -> frozenset[str]:
        """Its files, as paths relative to it."""
        return self._files

    @cached_property
    def _files(self) -> frozenset[str]:
        # Recursive, with paths relative to the folder, as the Hub lists files.
        return frozenset(str(p.relative_to(self.path)) for p in self.path.rglob("*") if p.is_file())

    def where(self, file: str) -> str:
        """The file's path."""
        return str(self.path / file)

    def text(self, file: str) -> bytes:
        """The content of a small file."""
        with (self.path / file).open("rb") as stream:
            # Bounded: a huge or endless file (a device) under this name would fill the memory.
            return read_bounded(stream, JSON_BYTES, where=self.where(file))

    def reader(self, file: str) -> ByteReader:
        """The file, read by ranges."""
        return LocalFile(self.path / file)

    def local_path(self, file: str) -> Path:
        """The file's path; nothing is fetched."""
        return self.path / file


@dataclass(frozen=True)
class RemoteFolder:
    """A folder behind a URL: on a web server, which cannot list it, or in a store that fsspec can list."""

    url: str

    @property
    def name(self) -> str:
        """The URL."""
        return self.url

    @cached_property
    def _filesystem(self) -> tuple[Any, str]:
        return filesystem(self.url)

    @property
    def files(self) -> frozenset[str]:
        """Its files, as paths relative to it."""
        return self._files

    @cached_property
    def _files(self) -> frozenset[str]:
        # HTTP has no listing of folders; object stores and file systems have one.
        if ranges.is_web(self.url):
            return self._probe()
        fs, root = self._filesystem
        try:
            paths = with_retry(lambda: fs.find(root), what=self.url)
        except FileNotFoundError:
            raise MissingCheckpointFileError(self.url, "there is no such folder") from None
        # A memory:// root begins with a slash that its paths may lack.
        root = root.strip("/") + "/"
        return frozenset(path.lstrip("/")[len(root) :] for path in paths if path.lstrip("/").startswith(root))

    def _probe(self) -> frozenset[str]:
        """The files on a web server, which cannot list a folder: known names, and those that the index names."""
        # One request per known name; shards have names that only the index lists.
        present = self._existing(KNOWN_FILES)
        if INDEX in present:
            try:
                named = set(parse_json(self.text(INDEX).decode())["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError):
                return frozenset(present)  # `open_weights` reads the index again and reports its problem
            present |= self._existing(file for file in named if isinstance(file, str) and stays_inside(file))
        return frozenset(present)

    def _existing(self, files: Iterable[str]) -> set[str]:
        candidates = list(files)
        # One request for each name; they are independent, so they run in parallel.
        with ThreadPoolExecutor(PROBE_THREADS) as pool:
            return {file for file, exists in zip(candidates, pool.map(self._has, candidates), strict=True) if exists}

    def _has(self, file: str) -> bool:
        return self._fetcher.ask(self._web_file(file).exists, what=self.where(file))

    def where(self, file: str) -> str:
        """The file's URL."""
        return f"{self.url}/{file}"

    def text(self, file: str) -> bytes:
        """The content of a small file, with retries of requests that fail transiently."""
        if ranges.is_web(self.url):
            web_file = self._web_file(file)
            content = self._fetcher.ask(lambda: web_file.whole(JSON_BYTES), what=self.where(file))
            return read_bounded(io.BytesIO(content), JSON_BYTES, where=self.where(file))
        fs, root = self._filesystem
        return with_retry(lambda: fs.cat_file(f"{root.rstrip('/')}/{file}"), what=self.where(file))

    def reader(self, file: str) -> ByteReader:
        """The file, read by range requests."""
        return RemoteFile(ranges.remote_file(self.where(file), self._connections), self._fetcher)

    def _web_file(self, file: str) -> "ranges.HttpFile":
        web_file = ranges.remote_file(self.where(file), self._connections)
        assert isinstance(web_file, ranges.HttpFile), self.url
        return web_file

    @cached_property
    def _connections(self) -> "ranges.Connections":
        return ranges.Connections()

    @cached_property
    def _fetcher(self) -> "ranges.RangeFetcher":
        """One fetcher for all files, so that its limits hold for the network, however many shards there are."""
        return ranges.RangeFetcher()

    def local_path(self, file: str) -> Path:
        """Refuses: such a file must be copied to a local disk first."""
        raise CheckpointError(
            self.where(file),
            "this kind of file must be on a local disk",
            suggestion="copy it to a local disk and give the copy",
        )


def require_file(repository: Repository, file: str, *, purpose: str) -> None:
    """Checks that a file exists.

    Raises:
        MissingCheckpointFileError: it does not; suggests the most similar name.
    """
    if file in repository.files:
        return
    close = nearest(file, repository.files)
    present = f"; it has {', '.join(sorted(repository.files)[:8])}" if repository.files else "; it has no files"
    raise MissingCheckpointFileError(
        repository.name,
        f"there is no {file} ({purpose}){present}",
        suggestion=f"did you mean {close[0]}?" if close else None,
    )


def read_json(repository: Repository, file: str, *, purpose: str) -> Mapping[str, Any]:
    """Reads a JSON object of a repository.

    Raises:
        MissingCheckpointFileError: there is no such file.
        CorruptFileError: it is not a JSON object.
    """
    require_file(repository, file, purpose=purpose)
    try:
        document = parse_json(repository.text(file).decode("utf-8"))
    except OutOfBoundsError as error:
        raise CorruptFileError(repository.where(file), str(error)) from None
    except ValueError as error:
        raise CorruptFileError(repository.where(file), f"it is not UTF-8 JSON ({error})") from None
    if not isinstance(document, dict):
        raise CorruptFileError(repository.where(file), "it is not a JSON object")
    return document
