"""Paths: one string for a file, wherever it is.

A path is a local path, or a URL of anything fsspec knows: `gs://`, `s3://`, `hf://`, `https://`, `memory://`. A
*pattern* is a path with braces and wildcards: `{1..128}` counts (`{001..128}` with leading zeros), `{a,b}` lists, and
`*`, `?`, `[…]` match file names, `**` any folders. `expand` turns patterns into paths; everything else takes one path.
"""

import contextlib
import itertools
import math
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from levanter.base.input_limits import PATTERN_CHARACTERS, PATTERN_DEPTH, PATTERN_FILES, OutOfBoundsError, capped

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# Also matches chained URLs of fsspec (`simplecache::gs://…`).
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*)(?:::|://)")
_INNERMOST_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"^(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?$")
_WILDCARD = re.compile(r"[*?\[]")
_DESCRIPTOR = re.compile(r"(?:/dev/fd|/proc/(?:self|thread-self)/fd)/(\d+)")
_LINKS = 40
"""The most symbolic links of one path that Linux follows."""
PROBE_BYTES = 4096
CONNECT_SECONDS = 5.0
"""Seconds after which a store counts as unreachable."""
_CONNECTED: set[tuple[str, int]] = set()
"""The hosts and ports that this process has reached."""
_LIBRARY_ERRORS = (
    ("aiohttp", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
)
"""The base classes of errors of the stores' client libraries; most are neither `OSError` nor `ValueError`."""
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "s3a": "s3fs", "http": "aiohttp", "https": "aiohttp"}


class MissingFileError(FileNotFoundError, ValueError):
    """A path names no file, or a pattern matches none: bad input; the message lists the nearest names."""


class UnreadableFileError(OSError, ValueError):
    """A file is there but cannot be opened: bad input, with the reason."""


def is_remote(path: str) -> bool:
    """Whether a path is a URL of something other than the local disk."""
    match = _SCHEME.match(path)
    return match is not None and match.group(1) not in ("file", "local")


def local_path(path: str) -> str:
    """The path of a local file, without `file://` and with `~` expanded."""
    assert not is_remote(path), path
    return os.path.expanduser(_SCHEME.sub("", path, count=1))


def join(base: str, *names: str) -> str:
    """A path below another; an absolute path or a URL among `names` starts anew."""
    for name in names:
        if _SCHEME.match(name):
            base = name
        elif is_remote(base):
            base = base.rstrip("/") + "/" + name.lstrip("/") if name else base
        else:
            base = os.path.join(base, name)
    return base


def base_name(path: str) -> str:
    """The last component of a path."""
    return path.rstrip("/").rsplit("/", 1)[-1]


def filesystem(path: str) -> tuple[Any, str]:
    """The fsspec file system of a path, and the path without the protocol.

    Raises:
        ValueError: no installed package knows the URL's scheme.
    """
    # Commands that only read a configuration need no file system.
    import fsspec

    if not is_remote(path):
        return fsspec.filesystem("file"), os.path.abspath(local_path(path))
    scheme = path.split(":", 1)[0]
    try:
        fs, name = fsspec.core.url_to_fs(path)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        hint = f": pip install {package} (or 'levanter-fork[remote]')" if package else f" ({error})"
        raise ValueError(f"{path}: {scheme}:// needs one more package{hint}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if scheme in ("gs", "gcs"):
        _check_connection(path, getattr(fs, "base", ""))
    return fs, name


def _check_connection(path: str, url: str) -> None:
    """Connects to Google's store once a process, since its library would try for a minute at each call.

    Raises:
        UnreadableFileError: there is no connection.
    """
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    address = urlsplit(url)
    host, port = address.hostname, address.port or (80 if address.scheme == "http" else 443)
    # A proxy resolves names by itself.
    if host is None or (host, port) in _CONNECTED or getproxies().keys() & {"http", "https", "all"}:
        return
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise UnreadableFileError(
            f"{path}: there is no connection to {host}:{port} ({error.strerror or error})\n"
            "  → check the network of this machine, or use local paths"
        ) from error
    _CONNECTED.add((host, port))


def store_error(path: str, error: BaseException) -> UnreadableFileError | None:
    """The error of a store's client library in our words; None for any other error.

    Only libraries that are imported already are considered: one that is not has raised nothing.
    """
    kinds = (getattr(sys.modules[module], name) for module, name in _LIBRARY_ERRORS if module in sys.modules)
    if not isinstance(error, tuple(kinds)):
        return None
    hint = ""
    if re.search(r"credential|token|401|403|denied|forbidden", f"{type(error).__name__} {error}", re.IGNORECASE):
        hint = "\n  → log in for this store on this machine (gcloud auth application-default login; aws configure)"
    return UnreadableFileError(f"{path}: the store cannot be read ({str(error) or type(error).__name__}){hint}")


@contextlib.contextmanager
def _store_errors(path: str) -> Iterator[None]:
    """Errors of a store's client library become `UnreadableFileError`, with the path."""
    try:
        yield
    except (MissingFileError, UnreadableFileError):
        raise
    except Exception as error:
        if not is_remote(path) or (reworded := store_error(path, error)) is None:
            raise
        raise reworded from error


def exists(path: str) -> bool:
    """Whether a file or folder exists.

    Raises:
        UnreadableFileError: the store cannot be asked.
    """
    fs, name = filesystem(path)
    with _store_errors(path):
        return fs.exists(name)


def is_file(path: str) -> bool:
    """Whether a path is a file (not a folder)."""
    fs, name = filesystem(path)
    with _store_errors(path):
        return fs.isfile(name)


def file_size(path: str) -> int:
    """The bytes a file occupies, as stored.

    Raises:
        MissingFileError: there is no such file.
    """
    fs, name = filesystem(path)
    try:
        with _store_errors(path):
            return int(fs.size(name) or 0)
    except FileNotFoundError as error:
        raise missing_file(path) from error


def special_kind(path: str) -> str | None:
    """The kind of a local path that is no ordinary file or folder; None for these and for absent paths."""
    name = os.path.abspath(local_path(path))
    try:
        mode = os.stat(name).st_mode
    except OSError:
        return None
    if stat.S_ISFIFO(mode):
        return "pipe"
    if stat.S_ISCHR(mode):
        return "device"
    if stat.S_ISBLK(mode):
        return "disk"
    if stat.S_ISSOCK(mode):
        return "socket"
    return "stream" if stat.S_ISREG(mode) and process_descriptor(name) is not None else None


def process_descriptor(name: str) -> int | None:
    """The descriptor of this process that a name (`/dev/stdout`), or one that it links to, stands for."""
    for _ in range(_LINKS):
        # `/dev/stdout` links to `/proc/self/fd/1`, whose own link names the file behind it. Stop before that last link:
        # a rename over that file would not reach the open descriptor.
        match = _DESCRIPTOR.fullmatch(name.replace(f"/proc/{os.getpid()}/", "/proc/self/"))
        if match is not None:
            return int(match[1])
        if not os.path.islink(name):
            return None
        name = os.path.normpath(os.path.join(os.path.dirname(name), os.readlink(name)))
    return None


def check_writable(folder: str) -> None:
    """Writes and deletes a small file; a folder that cannot be written is so reported before the work begins.

    Raises:
        OSError: the folder cannot be written.
    """
    # A random name: several processes may test the same folder at once.
    fs, name = filesystem(join(folder, f".probe-{secrets.token_hex(4)}"))
    fs.makedirs(name.rpartition("/")[0], exist_ok=True)
    try:
        fs.pipe_file(name, b"levanter" * (PROBE_BYTES // 8))
    except BaseException:
        # A full disk may have created the file without its content.
        with contextlib.suppress(Exception):
            fs.rm_file(name)
        raise
    fs.rm_file(name)


def open_read(path: str, *, once: bool = False) -> IO[bytes]:
    """Opens a file for reading its bytes as stored (nothing is decompressed).

    Args:
        path: a local path or a URL.
        once: whether the caller reads the file only once, so that it may be a pipe (`<(pass show key)`).

    Raises:
        MissingFileError: there is no such file; the message has the nearest names in the folder.
        UnreadableFileError: no permission, the store refuses, or it is a pipe, a socket or a device.
    """
    fs, name = filesystem(path)
    # Opening a pipe that nobody writes to would wait forever.
    if not once and (problem := _special_problem(path)) is not None:
        raise UnreadableFileError(problem)
    try:
        with _store_errors(path):
            return fs.open(name, "rb")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise missing_file(path) from error
    except UnreadableFileError:
        raise
    except OSError as error:
        raise UnreadableFileError(f"{path}: cannot be opened ({error.strerror or error})") from error


def expand(patterns: str | Iterable[str]) -> list[str]:
    """The files that patterns name: braces expanded in order, wildcards matched and sorted by name.

    A path that exists as it is written is taken literally, whatever characters it contains. Local results stay local
    paths, remote ones URLs.

    Raises:
        MissingFileError: listing every path that does not exist and every pattern without a match.
        ValueError: unbalanced braces.
    """
    files, problems = [], []
    for pattern in [patterns] if isinstance(patterns, str) else list(patterns):
        for path in list(expand_braces(pattern)):
            try:
                with _store_errors(path):
                    files += _match(path)
            except MissingFileError as error:
                problems.append(str(error))
    if problems:
        raise MissingFileError("\n".join(capped(problems)))
    return files


def expand_braces(pattern: str) -> Iterator[str]:
    """Expands `{1..128}`, `{001..128}`, `{0..8..2}` and `{a,b}`, inner braces first, in the order of a shell.

    Raises:
        ValueError: an unbalanced brace, a step of zero.
    """
    if len(pattern) > PATTERN_CHARACTERS:
        problem = f"{len(pattern):,} characters; a path has {PATTERN_CHARACTERS:,} at most"
        raise OutOfBoundsError(f"{pattern[:60]}…: {problem}")
    if _brace_depth(pattern) > PATTERN_DEPTH:
        raise OutOfBoundsError(f"{pattern}: braces are nested more than {PATTERN_DEPTH} deep, the limit")
    if pattern.count("{") != pattern.count("}"):
        raise ValueError(f"{pattern}: braces do not match")
    innermost = _INNERMOST_BRACES.search(pattern)
    if innermost is None:
        if "{" in pattern:
            raise ValueError(f"{pattern}: braces do not match")
        yield pattern
        return
    groups = []
    position = 0
    # Split into literal text and top-level groups; each group's alternatives are expanded on their own.
    while position < len(pattern):
        start = pattern.find("{", position)
        if start < 0:
            groups.append([pattern[position:]])
            break
        stop = _closing(pattern, start)
        groups.append([pattern[position:start]])
        # One more than the limit suffices to detect that it is exceeded; `{1..10000000000}` must not fill the memory.
        groups.append(list(itertools.islice(_alternatives(pattern[start + 1 : stop], pattern), PATTERN_FILES + 1)))
        # The product of the groups so far, so that nested and adjacent braces are limited together.
        if math.prod(map(len, groups)) > PATTERN_FILES:
            problem = f"names more than {PATTERN_FILES:,} files, the limit for a pattern"
            raise OutOfBoundsError(f"{pattern}: {problem}")
        position = stop + 1
    for combination in itertools.product(*groups):
        yield "".join(combination)


def missing_file(path: str) -> MissingFileError:
    """The error for a file that does not exist, with the nearest names in its folder.

    Raises:
        UnreadableFileError: the store cannot be asked.
    """
    with _store_errors(path):
        return _missing_file(path)


def _missing_file(path: str) -> MissingFileError:
    fs, name = filesystem(path)
    folder, _, base = name.rstrip("/").rpartition("/")
    if fs.isdir(name):
        return MissingFileError(f"{path}: is a folder; expected a file (for all files in it: {path.rstrip('/')}/*)")
    if (problem := _special_problem(path)) is not None:
        return MissingFileError(problem)
    names = _names_in(fs, folder)
    if names is None:
        return MissingFileError(f"{path}: no such file, and no folder {folder or '/'}")
    close = get_close_matches(base, names, n=3, cutoff=0.5)
    if close:
        return MissingFileError(f"{path}: no such file; did you mean {' or '.join(close)}?")
    shown = ", ".join(sorted(names)[:5]) or "nothing"
    return MissingFileError(f"{path}: no such file; {folder or '/'} holds {shown}{', …' if len(names) > 5 else ''}")


def _special_problem(path: str) -> str | None:
    """Why a local path cannot be read although it exists; None for files, folders and absent paths."""
    kind = None if is_remote(path) else special_kind(path)
    # `/dev/stdin` of a shell's `< file` is that file.
    if kind in (None, "stream"):
        return None
    again = "; files are read more than once" if kind == "pipe" else ""
    return f"{path}: is a {kind}, not a regular file{again}\n  → write its content into a file, and name that"


def _names_in(fs: "AbstractFileSystem", folder: str) -> list[str] | None:
    try:
        return [base_name(entry) for entry in fs.ls(folder or "/", detail=False)]
    except (OSError, NotImplementedError):
        return None


def _match(path: str) -> list[str]:
    fs, name = filesystem(path)
    # A literal match comes first: file names may contain `[` or `?`.
    if fs.isfile(name):
        return [path]
    if not _WILDCARD.search(path):
        raise missing_file(path)
    if not is_remote(path):
        matches = sorted(entry for entry in fs.glob(name) if fs.isfile(entry))
        # fsspec globs absolute paths; results are returned in the form in which the pattern was given.
        relative = not os.path.isabs(local_path(path))
        matches = [os.path.relpath(entry) if relative else entry for entry in matches]
    else:
        matches = [fs.unstrip_protocol(entry) for entry in sorted(fs.glob(name)) if fs.isfile(entry)]
    if not matches:
        folder = name[: _WILDCARD.search(name).start()].rpartition("/")[0]  # type: ignore[union-attr]
        names = _names_in(fs, folder)
        if names is None:
            raise MissingFileError(f"{path}: matches no file; there is no folder {folder or '/'}")
        shown = ", ".join(sorted(names)[:5]) or "nothing"
        raise MissingFileError(
            f"{path}: matches no file; {folder or '/'} holds {shown}{', …' if len(names) > 5 else ''}"
        )
    return matches


def _brace_depth(pattern: str) -> int:
    depths = itertools.accumulate({"{": 1, "}": -1}.get(character, 0) for character in pattern)
    return max(depths, default=0)


def _closing(pattern: str, start: int) -> int:
    depth = 0
    for position in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[position], 0)
        if depth == 0:
            return position
    raise ValueError(f"{pattern}: braces do not match")


def _alternatives(body: str, pattern: str) -> Iterator[str]:
    counted = _RANGE.match(body)
    if counted:
        first, last, step = counted.group(1), counted.group(2), counted.group(3)
        # As in bash, a leading zero in either bound pads all numbers to the longer bound, its sign included.
        padded = any(len(n.lstrip("-")) > 1 and n.lstrip("-").startswith("0") for n in (first, last))
        width = max(len(first), len(last)) if padded else 0
        start, stop = int(first), int(last)
        stride = abs(int(step)) if step is not None else 1
        if stride == 0:
            raise ValueError(f"{pattern}: {{{body}}} has a step of zero")
        # As in bash, a range may descend, and the sign of the step does not matter.
        direction = 1 if stop >= start else -1
        for number in range(start, stop + direction, direction * stride):
            yield f"{number:0{width}d}"
        return
    alternatives, depth, current = [], 0, ""
    for character in body:
        if character == "," and depth == 0:
            alternatives.append(current)
            current = ""
            continue
        depth += {"{": 1, "}": -1}.get(character, 0)
        current += character
    alternatives.append(current)
    if len(alternatives) == 1:  # `{name}` is no list: it stays as it is, as in a shell
        for inner in expand_braces(body):
            yield "{" + inner + "}"
        return
    for part in alternatives:
        yield from expand_braces(part)


def cache_folder() -> Path:
    """The cache of this user: `$LEVANTER_CACHE`, else `levanter` in the system's cache folder."""
    if override := os.environ.get("LEVANTER_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "levanter"
