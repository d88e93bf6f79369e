"""The working tree as an archive for the hosts: files that git does not ignore, and none that may hold secrets."""

import fnmatch
import gzip
import io
import subprocess
import tarfile
from pathlib import Path

from levanter.infra.errors import UsageError

LEFT_OUT = (".env", ".env.*", "*.env", ".levanter.yaml", ".netrc", "*.pem", "*.key", "id_rsa*", "id_ed25519*",
            "*credentials*.json", "*service_account*.json")  # fmt: skip
"""Names of files that more often hold secrets than source."""

LARGEST = 256 * 2**20


def list_files(tree: Path) -> list[str]:
    """The files of a working tree to copy: tracked ones and new ones that git does not ignore.

    Raises:
        UsageError: it is not a git repository, or git is not installed.
    """
    try:
        listed = subprocess.run(
            ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            check=True,
        ).stdout.decode()
    except FileNotFoundError as error:
        raise UsageError(
            "git is not on PATH; it decides which files of the tree are copied (or give --install)"
        ) from error
    except subprocess.CalledProcessError as error:
        raise UsageError(
            f"{tree} is not a git repository, so the files to copy are unknown: run this in the project's folder, "
            "or give --install 'levanter[tpu] @ git+https://…' or --image"
        ) from error
    names = sorted({name for name in listed.split("\0") if name})
    return [name for name in names if (tree / name).is_file() and not _left_out(name)]


def _left_out(name: str) -> bool:
    base = name.rsplit("/", 1)[-1]
    return any(fnmatch.fnmatch(base, pattern) for pattern in LEFT_OUT)


def pack(tree: Path, archive: Path) -> int:
    """Writes the archive and returns its number of files; the same files give the same bytes.

    Raises:
        UsageError: no repository, no pyproject.toml in it, or more than 256 MiB.
    """
    names = list_files(tree)
    if "pyproject.toml" not in names:
        raise UsageError(
            f"{tree} has no pyproject.toml to install: run this in the project's folder, or give --install"
        )
    size = sum((tree / name).stat().st_size for name in names)
    if size > LARGEST:
        large = sorted(names, key=lambda name: -(tree / name).stat().st_size)[:3]
        raise UsageError(
            f"{tree}: {size / 2**20:.0f} MiB would be copied to every host; the limit is {LARGEST / 2**20:.0f} MiB. "
            f"Largest: {', '.join(large)}. Add them to .gitignore, or give --install or --image"
        )
    with (
        archive.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name in names:
            content = (tree / name).read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755 if (tree / name).stat().st_mode & 0o100 else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return len(names)
