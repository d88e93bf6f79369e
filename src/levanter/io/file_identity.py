"""Versions of files: what changes when a file does, cheaply by what storage says of it, surely by its content."""

import functools
import hashlib

from levanter.io.paths import file_size, filesystem, is_remote, open_read

_TAGS = ("etag", "ETag", "md5Hash", "crc32c", "content_md5", "generation", "version_id")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


def version_of(path: str) -> str | None:
    """What storage says of a file's version: its time on a disk, its tag elsewhere; None where it says nothing.

    Raises:
        MissingFileError: there is no such file.
    """
    if is_remote(path):
        fs, name = filesystem(path)
        try:
            told = fs.info(name)
        except FileNotFoundError:
            file_size(path)  # raises, with what is there instead
            return None
        found = next((key for key in (*_TAGS, *_TIMES) if told.get(key) is not None), None)
        return None if found is None else f"{found} {told[found]}"
    fs, name = filesystem(path)
    return f"mtime {fs.info(name)['mtime']!r}"


@functools.lru_cache(maxsize=4096)
def _digest_of(path: str, version: str | None, size: int) -> str:
    del version, size  # a file that changes is read again
    digest = hashlib.sha256()
    with open_read(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def digest_of(path: str, *, remembered: bool = False) -> str:
    """Hex SHA-256 of a file's bytes as stored.

    Args:
        path: the file.
        remembered: whether what this process read before counts, as long as size and version are the same.
    """
    if not remembered:
        return _digest_of.__wrapped__(path, None, 0)
    return _digest_of(path, version_of(path), file_size(path))
