"""The Hugging Face Hub as a `Repository`: metadata on opening, weights on first read.

Opening requests the commit and its file list from the Hub, so that all files come from one commit. Small files and the
headers of large ones are fetched individually; a weight file is downloaded into the Hub's cache when its first tensor
is read. Without a network (or with `HF_HUB_OFFLINE=1`), a cached snapshot is used as it is; files that it lacks are
missing.
"""

import contextlib
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from levanter.compat.hf.errors import CorruptFileError, MissingCheckpointFileError, UnreachableError
from levanter.compat.hf.readers import ByteReader, LocalFile, with_retry
from levanter.compat.hf.repository import LocalFolder, Repository

TIMEOUT_SECONDS = 10.0
"""How long to wait for the Hub's response."""


def network_errors() -> tuple[type[BaseException], ...]:
    """The exceptions of `huggingface_hub` for a failing network, for either HTTP library that it may use."""
    from huggingface_hub.errors import HfHubHTTPError

    # Its first base is the HTTP library's own base error (httpx or requests).
    return (OSError, HfHubHTTPError.__bases__[0])


def open_hub(repo_id: str, revision: str | None) -> Repository:
    """A repository of the Hub.

    Raises:
        MissingCheckpointFileError: the Hub knows no such repository or revision, or it needs a login.
        UnreachableError: neither the Hub nor a cached snapshot is available.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import validate_repo_id

    name = f"{repo_id}@{revision}" if revision else repo_id
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise MissingCheckpointFileError(
            name,
            "it cannot be the name of a repository of the Hub: 96 characters at most, of letters, digits, -, _ and .",
            suggestion="a local folder is written ./name",
        ) from error
    # The client would refuse every request; the cache is read directly, so that the message names the variable.
    if constants.HF_HUB_OFFLINE:
        return _cached(repo_id, revision, name, "HF_HUB_OFFLINE is set")
    try:
        # `info.sha` pins the commit: files that are fetched later come from it even if the branch moves meanwhile.
        info = HfApi().model_info(repo_id, revision=revision, timeout=TIMEOUT_SECONDS)
    # Gated first: GatedRepoError is a subclass of RepositoryNotFoundError.
    except GatedRepoError as error:
        raise MissingCheckpointFileError(
            name, "this repository is gated: its terms must be accepted on the Hub first", suggestion="hf auth login"
        ) from error
    except RevisionNotFoundError as error:
        raise MissingCheckpointFileError(name, f"the Hub has the repository, but no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise MissingCheckpointFileError(
            name,
            "the Hub has no such repository (or it is private)",
            suggestion=(
                "check the spelling; a local folder is written ./name; private repositories need `hf auth login`"
            ),
        ) from error
    except network_errors() as error:
        return _cached(repo_id, revision, name, str(error).split("\n")[0])
    assert info.sha is not None
    _remember(repo_id, revision, files := frozenset(file.rfilename for file in info.siblings or ()))
    return HubRepository(repo_id, info.sha, files)


def _remember(repo_id: str, revision: str | None, files: frozenset[str]) -> None:
    """Makes the cache record the branch's commit, so that a later run without a network finds it.

    Downloads by commit, as all of ours are, do not record it; downloading one small file by the branch's name does.
    """
    from huggingface_hub import hf_hub_download

    small = next((file for file in ("config.json", ".gitattributes", "README.md") if file in files), None)
    if small is not None:
        # Only a convenience for later runs: its failure must not fail this one.
        with contextlib.suppress(*network_errors()):
            hf_hub_download(repo_id, small, revision=revision)


def _cached(repo_id: str, revision: str | None, name: str, reason: str) -> LocalFolder:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return LocalFolder(Path(snapshot_download(repo_id, revision=revision, local_files_only=True)))
    except LocalEntryNotFoundError as error:
        raise UnreachableError(
            name,
            f"it is not in the Hub's local cache, and the Hub cannot be reached ({reason})",
            suggestion="download it where there is a network, or give a local folder (./name)",
        ) from error


@dataclass(frozen=True)
class HubRepository:
    """One commit of a repository on the Hub."""

    repo_id: str
    commit: str
    files: frozenset[str]

    @property
    def name(self) -> str:
        """The repository and the first digits of its commit."""
        return f"{self.repo_id}@{self.commit[:12]}"

    def where(self, file: str) -> str:
        """The repository's name followed by the file's."""
        return f"{self.name}/{file}"

    def text(self, file: str) -> bytes:
        """The content of a small file, from the local cache or downloaded into it."""
        return self.local_path(file).read_bytes()

    def reader(self, file: str) -> ByteReader:
        """A reader of a file, which is downloaded into the cache when its tensors are first read."""
        return HubFile(self, file)

    def local_path(self, file: str) -> Path:
        """The file in the local cache, downloaded if it is missing."""
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(self.repo_id, file, revision=self.commit))
        except network_errors() as error:
            raise UnreachableError(self.where(file), f"the download failed ({str(error).splitlines()[0]})") from error


@dataclass(frozen=True)
class HubFile:
    """A large file on the Hub: its header is read by range requests; reading data downloads it once."""

    repository: HubRepository
    file: str
    max_gap: int = LocalFile.max_gap
    page: int = LocalFile.page
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The file's name in messages."""
        return self.repository.where(self.file)

    @cached_property
    def _cached_file(self) -> LocalFile | None:
        from huggingface_hub import try_to_load_from_cache

        # The result is a path, None, or a sentinel for "known to be missing": only a str is a file.
        path = try_to_load_from_cache(self.repository.repo_id, self.file, revision=self.repository.commit)
        return LocalFile(Path(path)) if isinstance(path, str) else None

    @cached_property
    def _url(self) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.repository.repo_id, self.file, revision=self.repository.commit)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    @cached_property
    def _size(self) -> int:
        from huggingface_hub import get_hf_file_metadata

        if self._cached_file is not None:
            return self._cached_file.size
        size = with_retry(lambda: get_hf_file_metadata(self._url, timeout=TIMEOUT_SECONDS).size, what=self.name)
        if size is None:
            raise CorruptFileError(self.name, "the Hub does not report the file's size")
        return size

    def peek(self, start: int, stop: int) -> bytes:
        """A few bytes of metadata, by an HTTP range request if the file is not in the cache."""
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        if self._cached_file is not None:
            return self._cached_file.peek(start, stop)

        def once() -> bytes:
            # Compression would change the number of bytes, so that the length could not be checked.
            headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
            response = get_session().get(self._url, headers=headers, timeout=TIMEOUT_SECONDS)
            hf_raise_for_status(response)
            # A proxy may ignore the Range header and send the complete file, or cut the answer short.
            if len(response.content) != stop - start:
                raise OSError(f"asked for {stop - start} bytes at {start}, got {len(response.content)}")
            return response.content

        return with_retry(once, what=self.name)

    @cached_property
    def _downloaded(self) -> LocalFile:
        return LocalFile(self.repository.local_path(self.file))

    def _local(self) -> LocalFile:
        # Readers are called from many threads: one downloads, the others wait for its file.
        with self._lock:
            return self._downloaded

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fills `buffer` from the cached file, which is downloaded first if needed."""
        self._local().read_into(start, buffer)

    def read_blocks(self, starts, span: int, buffer: memoryview) -> None:
        """Fills `buffer` with blocks of the cached file, which is downloaded first if needed."""
        self._local().read_blocks(starts, span, buffer)


def cached_dataset_files(id: str, name: str | None, split: str) -> list[str]:
    """The Parquet files of a split in the newest cached snapshot of a data set, where data sets usually have them.

    Args:
        id: of the data set.
        name: its configuration; None for the default one.
        split: the split.
    """
    from huggingface_hub import constants

    snapshots = Path(constants.HF_HUB_CACHE, "datasets--" + id.replace("/", "--"), "snapshots")
    newest = max(snapshots.glob("*"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return []
    folders = [name] if name is not None else ["data", "default", "."]
    patterns = (f"{split}-*.parquet", f"{split}/*.parquet", f"{split}.parquet")
    candidates = [sorted(map(str, newest.glob(f"{folder}/{p}"))) for folder in folders for p in patterns]
    return next((paths for paths in candidates if paths), [])
