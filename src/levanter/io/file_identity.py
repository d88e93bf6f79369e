"""Versions of files: what changes when a file does, cheaply by what storage says of it, surely by its content."""

import functools
import hashlib

from levanter.io.paths import file_size, filesystem, is_remote, open_read

_TAGS = ("etag", "ETag", "md5Hash", "crc32c", "content_md5", "generation", "version_id")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


def file_version(path: str) -> str | None:
    """What storage says of a file's version: its time on a disk, its tag elsewhere; None where it says nothing.

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
        tag = next((key for key in (*_TAGS, *_TIMES) if info.get(key) is not None), None)
        return None if tag is None else f"{tag} {info[tag]}"
    fs, name = filesystem(path)
    return f"mtime {fs.info(name)['mtime']!r}"


@functools.lru_cache(maxsize=4096)
def _cached_digest(path: str, version: str | None, size: int) -> str:
    del version, size  # a file that changes is read again
    digest = hashlib.sha256()
    with open_read(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def file_digest(path: str, *, remembered: bool = False) -> str:
    """Hex SHA-256 of a file's bytes as stored.

    Args:
        path: the file.
        remembered: whether what this process read before counts, as long as size and version are the same.
    """
    if not remembered:
        return _cached_digest.__wrapped__(path, None, 0)
    return _cached_digest(path, file_version(path), file_size(path))
