"""`gs://` and `s3://`: by the stores' own client libraries where they are installed, and where those cannot sign.

The libraries come with the extra `remote`; moto, a server that implements S3, is started where it is installed. Both
are asked for by name of a protocol or a program, since neither is needed for anything else here.
"""

import json
import shutil
import subprocess
import sys
import time
import urllib.request

import fsspec
import numpy as np
import pytest
from helpers.hf_folder import tensors, write_folder
from helpers.object_store import Fault, ObjectStore, files_of

from levanter.compat.open import open_checkpoint
from levanter.io.ranges import Connections, RangeFetcher, ReplacedError, StoreFile, remote_file

pytestmark = pytest.mark.quick

CONTENT = np.random.default_rng(2).bytes(700_000)


@pytest.fixture
def library(monkeypatch):
    """Makes sure that the client library of a protocol is there, and gives it settings for this test."""

    def prepare(protocol: str, **settings: object) -> None:
        try:
            kind = fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            pytest.skip(f"{error}; it comes with the extra `remote`")
        kind.clear_instance_cache()
        monkeypatch.setitem(fsspec.config.conf, protocol, settings)

    yield prepare
    for protocol in ("gs", "s3"):
        monkeypatch.undo()
        if sys.modules.get({"gs": "gcsfs", "s3": "s3fs"}[protocol]):
            fsspec.get_filesystem_class(protocol).clear_instance_cache()


def opened(url: str) -> StoreFile:
    file = remote_file(url, Connections())
    assert isinstance(file, StoreFile)
    return file


def read(file: StoreFile, start: int, stop: int) -> bytes:
    buffer = bytearray(stop - start)
    RangeFetcher(delays=(0.01,)).fetch(file, start, memoryview(buffer))
    return bytes(buffer)


def read_checkpoint(url: str) -> None:
    """Opens the tiny checkpoint and holds every tensor against what was written."""
    found = open_checkpoint(url)
    assert found.tokenizer().vocab_size == 300
    for name, array in tensors().items():
        whole = tuple(slice(0, size) for size in array.shape)
        assert found.source.read(name, whole).tobytes() == array.tobytes(), name
    assert found.source.bytes_read == found.nbytes
    found.source.remote.settle()


def test_google_by_its_client_library(tmp_path, monkeypatch, library):
    write_folder(tmp_path, shards=2)
    with ObjectStore({f"bucket/models/tiny/{name}": path for name, path in files_of(tmp_path).items()}) as store:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.url)
        library("gs", token="anon")
        read_checkpoint("gs://bucket/models/tiny")
        assert any("generation" in str(each.headers) or each.stop for each in store.log)
        store.files["bucket/a"] = CONTENT
        file = opened("gs://bucket/a")
        assert file.describe().size == len(CONTENT) and file.why_by_library == "" and file.can_be_cut_short
        assert read(file, 10, 600_010) == CONTENT[10:600_010]
        # The generation that was opened is asked for, and is gone once another one is written.
        store.files["bucket/a"] = CONTENT[::-1]
        with pytest.raises(ReplacedError, match=r"gs://bucket/a: it no longer exists \(404 Not Found\)"):
            read(file, 0, 100)


def test_google_by_its_library_alone_where_its_urls_are_refused(monkeypatch, library):
    """A store that gives bytes to the library only: its user agent is known."""
    with ObjectStore({"bucket/a": CONTENT}) as store:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.url)
        library("gs", token="anon")
        asked = []

        def fault(request):
            asked.append(request)
            return Fault(status=418) if request.headers.get("Accept-Encoding") == "identity" else None

        store.fault = fault
        file = opened("gs://bucket/a")
        assert file.describe().size == len(CONTENT) and "418" in file.why_by_library
        assert read(file, 10, 600_010) == CONTENT[10:600_010]
        file.check_unchanged()
        store.files["bucket/a"] = CONTENT[::-1]
        with pytest.raises(ReplacedError, match=r"gs://bucket/a: it was replaced while it was read: its version was"):
            file.check_unchanged()


def test_s3_by_its_client_library(tmp_path, library):
    write_folder(tmp_path, shards=2)
    files = {f"bucket/models/tiny/{name}": path for name, path in files_of(tmp_path).items()}
    with ObjectStore({**files, "bucket/a": CONTENT}) as store:
        library("s3", key="id", secret="word", endpoint_url=f"{store.url}/s3", client_kwargs={"region_name": "here"})
        read_checkpoint("s3://bucket/models/tiny")
        file = opened("s3://bucket/a")
        assert file.describe().size == len(CONTENT) and file.why_by_library == "" and file.can_be_cut_short
        assert read(file, 10, 600_010) == CONTENT[10:600_010]
        store.files["bucket/a"] = CONTENT[::-1]
        with pytest.raises(ReplacedError, match=r"s3://bucket/a: it was replaced while it was read: its version was"):
            read(file, 0, 100)
        # A signature that ran out is made anew, once.
        store.files["bucket/a"] = CONTENT
        store.fault = lambda request: Fault(status=403) if not request.seen and request.start == 77 else None
        assert read(file, 77, 1077) == CONTENT[77:1077]


@pytest.mark.slow
def test_s3_by_a_server_of_somebody_else(tmp_path, library):
    """moto implements S3 apart from us: signatures, listings, ranges, ETags."""
    program = shutil.which("moto_server")
    if program is None:
        pytest.skip("moto is not installed (pip install 'moto[server]')")
    write_folder(tmp_path / "model", shards=2)
    server = subprocess.Popen([program, "-H", "127.0.0.1", "-p", "0"], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        port = next(line.rpartition(":")[2] for line in server.stderr if "Running on" in line).strip()
        url = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=30).close()
        library("s3", key="id", secret="word", endpoint_url=url, client_kwargs={"region_name": "us-east-1"})
        fs = fsspec.filesystem("s3")
        fs.put(str(tmp_path / "model"), "bucket/tiny", recursive=True)
        read_checkpoint("s3://bucket/tiny")
        fs.pipe("bucket/a", CONTENT)
        file = opened("s3://bucket/a")
        assert file.describe().size == len(CONTENT) and file.why_by_library == ""
        assert read(file, 10, 600_010) == CONTENT[10:600_010]
        fs.pipe("bucket/a", CONTENT[::-1])
        with pytest.raises(ReplacedError, match="was replaced while it was read"):
            read(file, 0, 100)
        fs.rm("bucket/a")
        with pytest.raises(ReplacedError, match="it no longer exists"):
            read(file, 0, 100)
    finally:
        server.terminate()
        server.communicate(timeout=30)


class OddStore:
    """A file system whose URLs cannot be used: `sign` is unknown to it, everything else works."""

    async_impl = False

    def __init__(self, content: bytes):
        self.content, self.calls = content, 0

    def info(self, path):
        return {"size": len(self.content), "ETag": str(hash(self.content))}

    def cat_file(self, path, start, end):
        self.calls += 1
        return self.content[start:end]


def test_a_store_without_urls_is_read_through_its_library():
    fs = OddStore(CONTENT)
    file = StoreFile("s3://bucket/a", fs, "bucket/a", "s3", Connections())
    assert file.describe().size == len(CONTENT)
    assert file.why_by_library.startswith("AttributeError") and not file.can_be_cut_short
    assert read(file, 10, 600_010) == CONTENT[10:600_010] and fs.calls == 1
    file.check_unchanged()
    fs.content = CONTENT[:-1]
    with pytest.raises(ReplacedError, match="it had 700,000 bytes and has 699,999 now"):
        file.check_unchanged()


def test_a_stalled_request_of_an_asynchronous_library_is_cut_short(monkeypatch):
    """fsspec's own HTTP-like file system in miniature: coroutines on a loop of their own."""
    import asyncio
    import threading

    from levanter.io.ranges import LibraryFile, fetcher

    monkeypatch.setattr(fetcher, "LOOK_SECONDS", 0.01)
    usual = fetcher.Durations.slow_seconds
    monkeypatch.setattr(
        fetcher.Durations,
        "slow_seconds",
        # Nothing is asked for twice before the request that will stall is there: the first of the two has to be it.
        lambda durations, nbytes: usual(durations, nbytes) if 300_000 in seen else float("inf"),
    )
    loop = asyncio.new_event_loop()
    turning = threading.Thread(target=loop.run_forever, daemon=True)
    turning.start()
    seen, cut = [], []

    class Slow:
        async_impl = True

        def __init__(self):
            self.loop = loop

        def info(self, path):
            return {"size": len(CONTENT)}

        async def _cat_file(self, path, start, end):
            seen.append(start)
            if start == 300_000 and seen.count(start) == 1:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    cut.append(start)
                    raise
            return CONTENT[start:end]

    made = RangeFetcher(delays=())
    file = LibraryFile(Slow(), "a", "slow://a")
    file.describe()
    buffer = bytearray(len(CONTENT))
    view = memoryview(buffer)
    made.fetch_all(file, [(at, view[at : at + 20_000]) for at in range(0, len(CONTENT), 20_000)])
    assert bytes(buffer) == CONTENT
    # On a busy machine others may have been slow too.
    assert made.tally.hedged >= 1 and made.tally.hedges_won >= 1
    deadline = time.monotonic() + 100
    while not cut and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cut == [300_000], "the first of two requests for it"
    loop.call_soon_threadsafe(loop.stop)
    turning.join(5)
    loop.close()


def test_the_stand_in_lists_as_google_does():
    """Its listing is held against the words of Google's reference: kind, names, sizes as text, generations."""
    with (
        ObjectStore({"bucket/a/b": b"12345", "bucket/c": b"1", "other/d": b""}) as store,
        urllib.request.urlopen(f"{store.url}/storage/v1/b/bucket/o?delimiter=/", timeout=10) as answer,
    ):
        found = json.load(answer)
    assert found["kind"] == "storage#objects" and found["prefixes"] == ["a/"]
    assert [(each["name"], each["size"]) for each in found["items"]] == [("c", "1")]
    assert found["items"][0]["generation"].isdigit()
