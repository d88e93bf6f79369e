"""A file of a web server, or of an object store with an HTTP interface, read by range requests.

Every answer is compared with the request: status, range, length, encoding, and whether it has the same version of the
file as the first answer. Redirections are followed once and remembered until the target refuses a request.
"""

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urljoin, urlsplit

from levanter.io.ranges.connections import (
    Connections,
    HttpAnswer,
    is_digits,
    is_overloaded,
    is_transient,
    retry_after_seconds,
    shown_url,
)
from levanter.io.ranges.request import Attempt, FileIdentity, Pieces, RangeError, ReplacedError, TransientError

REDIRECTIONS = 5
_RANGE = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)")


class Address(Protocol):
    """The URL of a file and the headers that a request needs."""

    def __call__(self, *, renewed: bool) -> tuple[str, Mapping[str, str]]:
        """URL and headers; `renewed` is true if the last ones were refused."""
        ...


@dataclass(frozen=True)
class FixedAddress:
    """A URL that is used as it is."""

    url: str

    def __call__(self, *, renewed: bool) -> tuple[str, Mapping[str, str]]:
        """The URL, without headers; it cannot be renewed."""
        del renewed
        return self.url, {}


class HttpFile:
    """A file on a web server.

    Attributes:
        name: the file's name in messages.
        can_be_cut_short: always true: a cancelled request shuts its connection down.
    """

    can_be_cut_short = True

    def __init__(self, name: str, address: Address, connections: Connections):
        self.name = name
        self._address, self._connections = address, connections
        self._lock = threading.Lock()
        self._resolved: tuple[str, Mapping[str, str]] | None = None
        self._identity: FileIdentity | None = None

    def describe(self) -> FileIdentity:
        """Requests the first byte; the header of the answer has the size and the version.

        Raises:
            FileNotFoundError: it does not exist.
            RangeError: the server refuses it, or does not support ranges.
            TransientError: a later attempt may succeed.
        """
        # GET rather than HEAD: signed URLs are valid for one method, and some servers answer HEAD without a length.
        answer, url = self._request({"Range": "bytes=0-0"}, Attempt())
        try:
            self._refuse(answer, "it")
            description = self._described(answer)
            # An answer to one byte is short, unless the server sends all of the file.
            if answer.status == 206:
                answer.whole(1)
        finally:
            answer.end(self._connections, url)
        self._identity = description
        return description

    def exists(self) -> bool:
        """Whether it exists; status 403 counts as no, because stores answer so for objects that do not exist.

        Raises:
            RangeError: the server requires credentials.
            TransientError: a later attempt may succeed.
        """
        answer, url = self._request({"Range": "bytes=0-0"}, Attempt())
        try:
            if answer.status in (403, 404, 410):
                return False
            # Status 416 answers a range of an empty file, which exists.
            if answer.status != 416:
                self._refuse(answer, "it")
            return True
        finally:
            answer.end(self._connections, url)

    def whole(self, limit: int) -> bytes:
        """The content of a small file: at most `limit` bytes, plus one if it is larger.

        Raises:
            FileNotFoundError: it does not exist.
            RangeError: the server refuses it.
            TransientError: a later attempt may succeed.
        """
        answer, url = self._request({}, Attempt())
        try:
            self._refuse(answer, "it")
            return answer.whole(limit)
        finally:
            answer.end(self._connections, url)

    def fetch(self, start: int, into: Pieces, attempt: Attempt) -> None:
        """Fills the pieces with the bytes from `start` on; see `RangeSource`.

        Raises:
            TransientError: another attempt may succeed.
            GivenUpError: the attempt was cancelled.
            ReplacedError: the file was replaced since `describe`.
            RangeError: no attempt will succeed.
        """
        stop = start + sum(map(len, into))
        # HTTP ranges include their last byte.
        answer, url = self._request({"Range": f"bytes={start}-{stop - 1}"}, attempt)
        try:
            self._refuse(answer, f"bytes {start:,} to {stop:,}")
            self._agree(answer, start, stop)
            answer.receive(into)
        finally:
            answer.end(self._connections, url)

    def _request(self, headers: Mapping[str, str], attempt: Attempt) -> tuple[HttpAnswer, str]:
        # The lock protects the pair only. Two threads may resolve at the same time; both answers are valid.
        with self._lock:
            resolved = self._resolved
        url, address_headers = resolved or self._address(renewed=False)
        answer, url = self._followed(url, address_headers, headers, attempt)
        # A fixed address cannot be renewed, so only its redirection is resolved again; other addresses are signed
        # again.
        if (answer.status in (400, 401, 403) and not isinstance(self._address, FixedAddress)) or (
            answer.status in (401, 403, 404, 410) and resolved is not None
        ):
            # A signed URL or a redirection expires while a checkpoint is read; resolve the address once more.
            answer.close()
            with self._lock:
                self._resolved = None
            answer, url = self._followed(*self._address(renewed=True), headers, attempt)
        return answer, url

    def _followed(
        self, url: str, address_headers: Mapping[str, str], headers: Mapping[str, str], attempt: Attempt
    ) -> tuple[HttpAnswer, str]:
        for _ in range(REDIRECTIONS + 1):
            answer = self._connections.get(url, {**address_headers, **headers}, attempt)
            to = answer.header("Location")
            if answer.status not in (301, 302, 303, 307, 308) or to is None:
                return answer, url
            # The body of a redirection is not read, so the connection cannot be used again.
            answer.close()
            before, url = url, urljoin(url, to)
            if urlsplit(url).scheme not in ("http", "https"):
                raise RangeError(f"{self.name}: redirected to {shown_url(url)}, which is no web address")
            if urlsplit(url).netloc != urlsplit(before).netloc:
                # Credentials must not go to another host.
                address_headers = {}
            with self._lock:
                self._resolved = url, address_headers
        raise RangeError(f"{self.name}: redirected more than {REDIRECTIONS} times, last to {shown_url(url)}")

    def _refuse(self, answer: HttpAnswer, what: str) -> None:
        status = answer.status
        if status in (200, 206):
            encoding = (answer.header("Content-Encoding") or "identity").lower()
            # Byte ranges of a compressed body are ranges of the compressed bytes, so offsets would be wrong.
            if encoding not in ("identity", "aws-chunked"):
                raise RangeError(
                    f"{self.name}: the server sends it compressed ({encoding}), so byte ranges cannot be read\n"
                    "  → store and serve it uncompressed, or copy it to a local disk"
                )
            return
        if is_transient(status):
            raise TransientError(
                answer.status_text,
                overloaded=is_overloaded(status),
                wait_seconds=retry_after_seconds(answer.header("Retry-After")),
            )
        if status in (404, 410):
            if self._identity is not None:
                raise ReplacedError(
                    f"{self.name}: it no longer exists ({answer.status_text}), but existed when opened\n{_STILL}"
                )
            raise FileNotFoundError(self.name)
        if status == 416 and self._identity is not None:
            raise ReplacedError(f"{self.name}: it no longer has {what} ({answer.status_text})\n{_STILL}")
        if status == 416:
            # X
            return  # every range of an empty file is unsatisfiable
        if status in (401, 403):
            raise RangeError(
                f"{self.name}: the server refuses {what} ({answer.status_text})\n"
                "  → check the credentials and their permission to read it"
            )
        raise RangeError(f"{self.name}: the server does not return {what} ({answer.status_text})")

    def _described(self, answer: HttpAnswer) -> FileIdentity:
        tag, modified = answer.header("ETag"), answer.header("Last-Modified")
        size = None
        if answer.status in (206, 416):
            match = _RANGE.fullmatch((answer.header("Content-Range") or "").strip())
            if match is not None and match[3] != "*":
                size = int(match[3])
        elif answer.length == 0:
            size = 0
        # Status 200 with a length: the server ignored the range.
        elif is_digits(answer.header("Content-Length")):
            raise RangeError(
                f"{self.name}: the server sends all {int(answer.header('Content-Length') or 0):,} bytes where one is "
                "requested: it does not support ranges\n  → copy the files to a local disk, or to a server that "
                "answers range requests (status 206)"
            )
        if size is None:
            raise RangeError(
                f"{self.name}: the server does not report its size (status {answer.status_text}, Content-Range "
                f"{answer.header('Content-Range')!r})\n  → copy the files to a local disk"
            )
        return FileIdentity(size=size, tag=tag, modified=modified)

    def _agree(self, answer: HttpAnswer, start: int, stop: int) -> None:
        """Checks that the header of an answer matches the requested bytes `[start, stop)`."""
        before = self._identity
        if answer.status == 200:
            # Servers may answer a range of the whole file with status 200; any other 200 holds the wrong bytes.
            whole = before is not None and (start, stop) == (0, before.size) and answer.length == stop
            if not whole:
                raise TransientError("the server sent the whole file instead of a range")
        else:
            content_range = (answer.header("Content-Range") or "").strip()
            match = _RANGE.fullmatch(content_range)
            if match is not None and match[3] != "*" and before is not None:
                self._same(before, self._described(answer))
            if match is None or match[1] is None or (int(match[1]), int(match[2]) + 1) != (start, stop):
                raise TransientError(f"it answered with Content-Range {content_range!r:.60}")
        if answer.length is not None and answer.length != stop - start:
            raise TransientError(f"it announced {answer.length:,} bytes where {stop - start:,} were requested")
        if before is not None and answer.status == 200:
            current = FileIdentity(size=before.size, tag=answer.header("ETag"), modified=answer.header("Last-Modified"))
            self._same(before, current)

    def _same(self, before: FileIdentity, current: FileIdentity) -> None:
        differs = before.differs(current)
        if differs is not None:
            raise ReplacedError(f"{self.name}: it was replaced while it was read: {differs}\n{_STILL}")


_STILL = "  → load again when no process writes the file; it must not change while it is read"
