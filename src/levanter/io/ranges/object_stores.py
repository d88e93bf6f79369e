"""Object stores as web servers: the URLs and credentials with which `gs://` and `s3://` files are read over HTTP.

The store's own client library (gcsfs, s3fs) finds files and signs; the bytes themselves are received over our own
connections, directly into the destination. A store that does not accept such requests is read through its library
(`LibraryFile`), which takes more CPU time but is equally correct.
"""

from collections.abc import Mapping
from typing import Protocol, cast

from levanter.io.paths import filesystem
from levanter.io.ranges.connections import Connections, is_web, shown_url
from levanter.io.ranges.fsspec_file import Library, LibraryFile
from levanter.io.ranges.http import FixedAddress, HttpFile
from levanter.io.ranges.request import Attempt, FileIdentity, Pieces, RangeError, RangeSource, TransientError

SIGNED_SECONDS = 6 * 3600
"""Seconds for which a signed URL is valid; a URL that is refused is signed again."""


class _GoogleCredentials(Protocol):
    def maybe_refresh(self) -> None: ...


class _GoogleLibrary(Library, Protocol):
    credentials: _GoogleCredentials

    def url(self, path: str, generation: object) -> str: ...

    def _get_headers(self, headers: None) -> dict[str, str]: ...


class _SigningLibrary(Library, Protocol):
    def sign(self, path: str, expiration: int) -> str: ...


class GoogleAddress:
    """A `gs://` file of one generation, with the token of gcsfs."""

    def __init__(self, fs: Library, path: str):
        self._fs, self._path = cast(_GoogleLibrary, fs), path
        # With the generation in the URL, Google serves this version of the object or none, even if it is replaced
        # meanwhile.
        self._generation = fs.info(path).get("generation")

    def __call__(self, *, renewed: bool) -> tuple[str, Mapping[str, str]]:
        """URL and headers; the library renews an expired token."""
        if renewed:
            self._fs.credentials.maybe_refresh()
        return self._fs.url(self._path, generation=self._generation), self._fs._get_headers(None)


class SignedAddress:
    """An `s3://` file, read from a URL that s3fs signs."""

    def __init__(self, fs: Library, path: str):
        self._fs, self._path = cast(_SigningLibrary, fs), path
        self._url: str | None = None

    def __call__(self, *, renewed: bool) -> tuple[str, Mapping[str, str]]:
        """The URL, signed again if the last one was refused."""
        if self._url is None or renewed:
            self._url = str(self._fs.sign(self._path, expiration=SIGNED_SECONDS))
        return self._url, {}


_ADDRESSES = {"gs": GoogleAddress, "gcs": GoogleAddress, "s3": SignedAddress, "s3a": SignedAddress}


class StoreFile:
    """A file of an object store: read over HTTP where the store accepts that, else through its library.

    Attributes:
        name: the file's name in messages.
    """

    def __init__(self, name: str, fs: Library, path: str, scheme: str, connections: Connections):
        self.name = name
        self._library = LibraryFile(fs, path, name)
        self._scheme, self._connections = scheme, connections
        self._chosen: RangeSource = self._library
        self._why = ""

    @property
    def can_be_cut_short(self) -> bool:
        """Whether a cancelled attempt ends at once."""
        return self._chosen.can_be_cut_short

    @property
    def why_by_library(self) -> str:
        """Why the library reads the file; empty if our own connections do."""
        return self._why

    def describe(self) -> FileIdentity:
        """The file's size and version; also chooses whether HTTP or the library reads it."""
        description = self._library.describe()
        try:
            address = _ADDRESSES[self._scheme](self._library.filesystem, self._library.path)
            direct = HttpFile(self.name, address, self._connections)
            direct_description = direct.describe()
            # The URL may lead to another object than the library's path (a proxy, a custom endpoint); the sizes must
            # agree.
            if direct_description.size != description.size:
                raise RangeError(
                    f"{self.name}: {description.size:,} bytes by its library, {direct_description.size:,} by its URL"
                )
        except Exception as error:
            # Overload says nothing about whether HTTP works here; the caller waits and describes the file again.
            if isinstance(error, TransientError) and error.overloaded:
                raise
            self._chosen, self._why = self._library, f"{type(error).__name__}: {error}"
            return description
        self._chosen = direct
        return direct_description

    def fetch(self, start: int, into: Pieces, attempt: Attempt) -> None:
        """Fills the pieces with the bytes from `start` on; see `RangeSource`."""
        self._chosen.fetch(start, into, attempt)

    def check_unchanged(self) -> None:
        """Reads the version again if the library read the ranges; see `LibraryFile`."""
        if self._chosen is self._library:
            self._library.check_unchanged()


def remote_file(url: str, connections: Connections) -> HttpFile | StoreFile | LibraryFile:
    """The remote file of a URL.

    Raises:
        ValueError: no installed package knows the URL's scheme.
    """
    if is_web(url):
        return HttpFile(shown_url(url), FixedAddress(url), connections)
    fs, path = filesystem(url)
    scheme = url.split(":", 1)[0]
    if scheme in _ADDRESSES:
        return StoreFile(url, fs, path, scheme, connections)
    return LibraryFile(fs, path, url)
