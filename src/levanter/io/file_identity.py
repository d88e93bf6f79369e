"""Versions of files: cheaply from the metadata of the storage, reliably from a digest of the content."""

import functools
import hashlib

from levanter.io.paths import file_size, filesystem, is_remote, open_read

_TAGS = ("etag", "ETag", "md5Hash", "crc32c", "content_md5", "generation", "version_id")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


def file_version(path: str) -> str | None:
    """A file's version: its modification time on a disk, its tag elsewhere; None where the storage reports neither.

    Raises:
        MissingFileError: there is no such file.
    """
    if is_remote(path):
        fs, name = filesystem(path)
        try:
            info = fs.info(name)
        except FileNotFoundError:
            file_size(path)  # raises, with what is there instead
            return None
        # A tag changes with the content; a time is the second choice, because a rewrite within its resolution is
        # missed.
        tag = next((key for key in (*_TAGS, *_TIMES) if info.get(key) is not None), None)
        return None if tag is None else f"{tag} {info[tag]}"
    fs, name = filesystem(path)
    # fsspec reports the time as a float of seconds; `repr` keeps all of its digits.
    return f"mtime {fs.info(name)['mtime']!r}"


@functools.lru_cache(maxsize=4096)
def _cached_digest(path: str, version: str | None, size: int) -> str:
    del version, size  # keys of the cache only: a file that changes is read again
    digest = hashlib.sha256()
    with open_read(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def file_digest(path: str, *, remembered: bool = False) -> str:
    """Hex SHA-256 of a file's bytes as stored.

    Args:
        path: the file.
        remembered: whether an earlier digest of this process is reused while size and version are the same.
    """
    if not remembered:
        return _cached_digest.__wrapped__(path, None, 0)
    return _cached_digest(path, file_version(path), file_size(path))
