"""A stand-in for an object store: files by HTTP ranges, as slow as it is told to be, and broken in the ways it is told.

One server has four faces over the same files: a plain web server (`/path`), Google Cloud Storage's JSON interface
(`/storage/v1/…`, `/download/storage/v1/…`; buckets are the first folders), S3 by path (`/s3/bucket/key`), and what is
broken: a `Fault` for a request, chosen by a function. Time to the first byte, bytes a second of a connection, and of
all of them together, are kept to by appointments: whoever sends a slice gets the moment at which it may be sent.

As a program: `python object_store.py FOLDER --latency 0.03 --connection 20e6 --total 200e6` prints its port and serves
until its standard input is closed.
"""

import argparse
import contextlib
import email.utils
import hashlib
import json
import os
import re
import socket
import ssl
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

SLICE = 64 << 10
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with one answer.

    Attributes:
        status: instead of the file, with `headers`.
        headers: added, or instead of the ones of their names.
        reset_after: bytes of the body after which the connection is reset.
        end_after: bytes of the body after which the connection is closed in an orderly way.
        stall_after: bytes of the body after which nothing comes any more, for `stall_seconds`.
        stall_seconds: see `stall_after`.
        rate: bytes a second of this answer.
        ignore_range: the whole file, status 200.
        body: sent instead of the file's bytes.
    """

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    reset_after: int | None = None
    end_after: int | None = None
    stall_after: int | None = None
    stall_seconds: float = 3600.0
    rate: float | None = None
    ignore_range: bool = False
    body: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for a file.

    Attributes:
        number: how many came before it.
        file: its path.
        start: the first byte, 0 where no range was asked for.
        stop: behind the last byte; None where no range was asked for.
        seen: how often exactly this range was asked for before.
        headers: what came along.
    """

    number: int
    file: str
    start: int
    stop: int | None
    seen: int
    headers: dict[str, str]


class Appointments:
    """A number of bytes a second, shared by whoever asks."""

    def __init__(self, rate: float | None):
        self._rate, self._next, self._lock = rate, 0.0, threading.Lock()

    def at(self, nbytes: int, now: float) -> float:
        """The moment at which so many bytes have been sent."""
        if self._rate is None:
            return now
        with self._lock:
            self._next = max(self._next, now) + nbytes / self._rate
            return self._next


class ObjectStore:
    """A server of the files of a folder, in threads of this process.

    Attributes:
        files: path → content, or where it lies; may be changed while it serves.
        fault: says for each request for a file's bytes what is wrong with it.
        requests: that asked for bytes of a file.
        sent: bytes of bodies.
        most: requests that were under way at a time.
    """

    def __init__(
        self,
        files: dict[str, bytes | Path],
        *,
        latency: float = 0.0,
        connection: float | None = None,
        total: float | None = None,
        fault: Callable[[Request], Fault | None] = lambda request: None,
        certificate: Path | None = None,
    ):
        self.files, self.fault = files, fault
        self.latency, self.connection = latency, connection
        self.requests, self.sent, self.most, self.under_way = 0, 0, 0, 0
        self.seen: Counter[tuple[str, int, int | None]] = Counter()
        self.log: list[Request] = []
        self.total = Appointments(total)
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        store = self

        class Handler(_Handler):
            pass

        Handler.store = store
        self._server = _Server(("127.0.0.1", 0), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.secure = certificate is not None

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        """Its address."""
        host = "localhost" if self.secure else "127.0.0.1"
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}"

    def __enter__(self) -> "ObjectStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._server.drop()
        self._thread.join()

    def size(self, name: str) -> int:
        """Bytes of a file."""
        content = self.files[name]
        return content.stat().st_size if isinstance(content, Path) else len(content)

    def tag(self, name: str) -> str:
        """The file's ETag: another one for another content."""
        content = self.files[name]
        if isinstance(content, Path):
            about = content.stat()
            return f"{about.st_mtime_ns:x}-{about.st_size:x}"
        return hashlib.md5(content).hexdigest()

    def generation(self, name: str) -> str:
        """The file's generation, as Google counts."""
        return str(int(hashlib.md5(self.tag(name).encode()).hexdigest()[:12], 16))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, *args: object):
        self.open: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request, client_address):
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.open.discard(request)
        super().shutdown_request(request)

    def drop(self) -> None:
        """Closes what is open."""
        for each in list(self.open):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)

    def handle_error(self, request, client_address):
        pass  # a client that went away


class _Handler(BaseHTTPRequestHandler):
    store: ObjectStore
    protocol_version = "HTTP/1.1"
    wbufsize = 0

    def setup(self):
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format, *args):
        pass

    def do_HEAD(self):
        self.answer(head=True)

    def do_GET(self):
        self.answer(head=False)

    def answer(self, *, head: bool) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path).lstrip("/"), parse_qs(parts.query)
        if path.startswith("storage/v1/b/"):
            self.google(path.removeprefix("storage/v1/b/"), query)
        elif path.startswith("download/storage/v1/b/"):
            bucket, _, name = path.removeprefix("download/storage/v1/b/").partition("/o/")
            wanted = query.get("generation", [None])[0]
            name = f"{bucket}/{name}"
            if wanted and name in self.store.files and wanted != self.store.generation(name):
                name = "gone"
            self.file(name, head=head)
        elif path.startswith("s3/") and "list-type" in query:
            self.listing_of_s3(path.removeprefix("s3/"), query)
        else:
            self.file(path.removeprefix("s3/"), head=head)

    def say(self, status: int, content: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def google(self, path: str, query: dict[str, list[str]]) -> None:
        """Objects of a bucket, or what is known of one."""
        store = self.store
        bucket, _, rest = path.partition("/o")
        name = unquote(rest.lstrip("/"))

        def known(file: str) -> dict[str, str]:
            return {
                "kind": "storage#object",
                "bucket": bucket,
                "name": file.removeprefix(f"{bucket}/"),
                "size": str(store.size(file)),
                "etag": store.tag(file),
                "generation": store.generation(file),
                "contentType": "application/octet-stream",
                "updated": "2026-01-01T00:00:00.000Z",
                "timeCreated": "2026-01-01T00:00:00.000Z",
                "mediaLink": f"{store.url}/download/storage/v1/b/{bucket}/o/{quote(file, safe='')}",
            }

        if name:
            found = f"{bucket}/{name}"
            if found in store.files:
                self.say(200, json.dumps(known(found)).encode(), "application/json")
            else:
                self.say(404, b'{"error": {"code": 404, "message": "Not Found"}}', "application/json")
            return
        prefix, cut = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        items, folders = [], set()
        for file in sorted(store.files):
            key = file.removeprefix(f"{bucket}/")
            if file.startswith(f"{bucket}/") and key.startswith(prefix):
                rest = key[len(prefix) :]
                if cut and cut in rest:
                    folders.add(prefix + rest.partition(cut)[0] + cut)
                else:
                    items.append(known(file))
        answer = {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}
        self.say(200, json.dumps(answer).encode(), "application/json")

    def listing_of_s3(self, bucket: str, query: dict[str, list[str]]) -> None:
        """Objects of a bucket, as S3 lists them."""
        store, bucket = self.store, bucket.strip("/")
        prefix, cut = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        lines, folders = [], set()
        for file in sorted(store.files):
            key = file.removeprefix(f"{bucket}/")
            if not file.startswith(f"{bucket}/") or not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if cut and cut in rest:
                folders.add(prefix + rest.partition(cut)[0] + cut)
                continue
            lines.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{store.size(file)}</Size>"
                f"<ETag>&quot;{store.tag(file)}&quot;</ETag><StorageClass>STANDARD</StorageClass>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        lines += [f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(folders)]
        text = (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(lines)}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(lines)}</ListBucketResult>"
        )
        self.say(200, text.encode(), "application/xml")

    def file(self, name: str, *, head: bool) -> None:
        """A file, or a range of it."""
        store = self.store
        if name not in store.files:
            self.say(404, b"", "text/plain")
            return
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        size = store.size(name)
        start = int(asked[1]) if asked else 0
        stop = min(size, int(asked[2]) + 1) if asked and asked[2] else (size if asked else None)
        with store.lock:
            key = (name, start, stop)
            request = Request(
                number=store.requests,
                file=name,
                start=start,
                stop=stop,
                seen=store.seen[key],
                headers=dict(self.headers),
            )
            store.requests += 1
            store.seen[key] += 1
            store.log.append(request)
            store.under_way += 1
            store.most = max(store.most, store.under_way)
        try:
            self.send(request, size, head=head, fault=store.fault(request) or Fault())
        finally:
            with store.lock:
                store.under_way -= 1

    def send(self, request: Request, size: int, *, head: bool, fault: Fault) -> None:
        store = self.store
        if store.latency:
            store.stopped.wait(store.latency)
        if fault.status is not None:
            self.say(fault.status, b"", "text/plain", fault.headers)
            return
        headers = {
            "ETag": f'"{store.tag(request.file)}"',
            "Last-Modified": email.utils.formatdate(1_700_000_000, usegmt=True),
            "Accept-Ranges": "bytes",
            "x-goog-generation": store.generation(request.file),
        }
        start, stop, status = request.start, request.stop, 206
        if stop is None or fault.ignore_range:
            start, stop, status = 0, size, 200
        elif start >= size:
            self.say(416, b"", "text/plain", {"Content-Range": f"bytes */{size}"})
            return
        else:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        headers["Content-Length"] = str(stop - start)
        headers |= fault.headers
        self.send_response(status)
        for name, value in headers.items():
            if value != "-":
                self.send_header(name, value)
        self.end_headers()
        if not head:
            self.body(request.file, start, stop, fault)

    def body(self, name: str, start: int, stop: int, fault: Fault) -> None:
        store, own = self.store, Appointments(fault.rate or self.store.connection)
        at = 0
        for piece in _slices(fault.body if fault.body is not None else store.files[name], start, stop):
            left = [each - at for each in (fault.reset_after, fault.end_after, fault.stall_after) if each is not None]
            if left and min(left) < len(piece):
                self.wfile.write(piece[: min(left)])
                if fault.stall_after is not None:
                    store.stopped.wait(fault.stall_seconds)
                if fault.reset_after is not None:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.close()
                return
            now = time.monotonic()
            until = max(own.at(len(piece), now), store.total.at(len(piece), now))
            if until > now and store.stopped.wait(until - now):
                return
            # Before it is sent: whoever has received it may look at once.
            with store.lock:
                store.sent += len(piece)
            self.wfile.write(piece)
            at += len(piece)


def _slices(content: bytes | Path, start: int, stop: int) -> Iterator[memoryview]:
    if isinstance(content, bytes):
        view = memoryview(content)[start:stop] if len(content) >= stop else memoryview(content)
        for at in range(0, len(view), SLICE):
            yield view[at : at + SLICE]
        return
    buffer = bytearray(SLICE)
    descriptor = os.open(content, os.O_RDONLY)
    try:
        while start < stop:
            got = os.preadv(descriptor, [memoryview(buffer)[: min(SLICE, stop - start)]], start)
            if not got:
                return
            yield memoryview(buffer)[:got]
            start += got
    finally:
        os.close(descriptor)


def files_of(folder: Path) -> dict[str, bytes | Path]:
    """The files of a folder, by their paths in it."""
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


def tell(values: dict[str, object]) -> None:
    """A line for whoever started this program."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serves a folder until standard input is closed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--connection", type=float, default=None)
    parser.add_argument("--total", type=float, default=None)
    parser.add_argument("--certificate", type=Path, default=None)
    parser.add_argument("--fault-every", type=int, default=0, help="every so many requests: 503, reset or stall")
    args = parser.parse_args()
    kinds = [Fault(status=503), Fault(reset_after=100_000), Fault(stall_after=100_000)]

    def fault(request: Request) -> Fault | None:
        if not args.fault_every or request.number % args.fault_every or request.seen:
            return None
        return kinds[request.number // args.fault_every % len(kinds)]

    with ObjectStore(
        files_of(args.folder),
        latency=args.latency,
        connection=args.connection,
        total=args.total,
        fault=fault,
        certificate=args.certificate,
    ) as store:
        tell({"url": store.url})
        for _ in sys.stdin:
            cpu = time.process_time()
            tell({"requests": store.requests, "sent": store.sent, "most": store.most, "cpu": cpu})


if __name__ == "__main__":
    main()
