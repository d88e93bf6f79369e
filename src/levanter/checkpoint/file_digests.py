"""Digests of the small files of a checkpoint: those that Orbax and TensorStore write beside the data of arrays.

Values are compared chunk by chunk (`checksums`). The other files (manifests, descriptions of the tree and of shardings)
hold no value, and some of them are read by other programs only. A flipped bit in one shows that the storage or a copy
is not sound, so readers compare these files too, before the first value is read.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor

from levanter.checkpoint.discovery import unreadable_error
from levanter.checkpoint.refs import CheckpointRef
from levanter.io.paths import filesystem

_THREADS = 16
_DATA = "d"
"""The folders in which TensorStore keeps chunks and the nodes of its tree, which have checksums."""


def digest_files(folder: str) -> dict[str, str]:
    """The digest of each small file below a folder of arrays, by its path in it."""
    fs, root = filesystem(folder)
    root = root.rstrip("/")
    # Another process may have written some of them since a listing was cached.
    fs.invalidate_cache()
    # A memory:// root begins with a slash that its paths may lack.
    paths = [path.lstrip("/")[len(root.lstrip("/")) + 1 :] for path in fs.find(root)]
    # Sorted, so that every process divides the files alike.
    small = sorted(path for path in paths if _DATA not in path.split("/")[:-1])
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(small, pool.map(lambda path: _digest(fs.cat_file(f"{root}/{path}")), small), strict=True))


def check_files(ref: CheckpointRef, *, share: int = 0, shares: int = 1) -> None:
    """Compares the small files of a checkpoint with their digests.

    Args:
        ref: the checkpoint; one that was saved without these digests is not compared.
        share: which of the files, where several processes divide the work.
        shares: how many processes there are.

    Raises:
        UnreadableCheckpointError: files are missing or damaged; names all of them.
    """
    fs, root = filesystem(ref.arrays_path)
    root = root.rstrip("/")

    def problem(item: tuple[str, str]) -> str | None:
        path, digest = item
        try:
            content = fs.cat_file(f"{root}/{path}")
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror or error})"
        return None if _digest(content) == digest else f"{path} is damaged: it is not what was saved (digests differ)"

    with ThreadPoolExecutor(_THREADS) as pool:
        problems = [text for text in pool.map(problem, sorted(ref.files.items())[share::shares]) if text is not None]
    # All damaged files in one error: several of them point to the storage and not to one write.
    if problems:
        raise unreadable_error(ref.path, ref.arrays, "; ".join(problems))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
