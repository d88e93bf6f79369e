"""The Hub as a repository, against a small server that speaks its protocol on this machine."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from helpers.hf_folder import tensors, write_folder
from huggingface_hub import constants

from levanter.compat.hf.errors import MissingCheckpointFileError, UnreachableError
from levanter.compat.open import open_checkpoint

pytestmark = pytest.mark.quick

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(BaseHTTPRequestHandler):
    """One repository, `org/tiny`, at one commit; counts the bytes of file content that it gave."""

    folder: Path
    given: dict[str, int]

    def log_message(self, *_):
        pass

    def _answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/tiny"):
            names = [{"rfilename": file.name} for file in sorted(self.folder.iterdir())]
            body = json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": names}).encode()
            self._answer(200, body, Content_Type="application/json")
        elif path.startswith("/org/tiny/resolve/"):
            self._file(self.folder / path.rpartition("/")[2])
        else:
            self._answer(404, b"{}", X_Error_Code="RepoNotFound")

    def _file(self, file: Path) -> None:
        if not file.is_file():
            self._answer(404, X_Error_Code="EntryNotFound")
            return
        content = file.read_bytes()
        common = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if self.command == "HEAD":
            self.send_response(200)
            for name, value in (common | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            return
        if (wanted := self.headers.get("Range")) is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            stop = min(len(content), int(last) + 1) if last else len(content)
            part = content[int(first) : stop]
            common["Content-Range"] = f"bytes {first}-{stop - 1}/{len(content)}"
        else:
            part = content
        self.given[file.name] = self.given.get(file.name, 0) + len(part)
        self._answer(206 if wanted else 200, part, **common)


@pytest.fixture
def hub(tmp_path):
    """The server's address, its folder, and what it gave."""
    folder = write_folder(tmp_path / "remote", shards=2)
    given: dict[str, int] = {}
    handler = type("Handler", (FakeHub,), {"folder": folder, "given": given})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder, given
    server.shutdown()
    server.server_close()


@pytest.fixture
def library(tmp_path, monkeypatch, hub):
    """Points the Hub's library at the server, with an empty cache; returns a function that takes the network away."""

    def at(endpoint: str, *, offline: bool = False) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        huggingface_hub.close_session()

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    at(hub[0])
    yield at
    huggingface_hub.close_session()


def read_all(source) -> dict[str, bytes]:
    whole = {name: tuple(slice(0, size) for size in info.shape) for name, info in source.tensors.items()}
    return {name: source.read(name, index).tobytes() for name, index in whole.items()}


NOWHERE = "http://127.0.0.1:1"
WEIGHTS = {name: array.tobytes() for name, array in tensors().items()}


def test_opening_asks_for_headers_and_reading_downloads_once(tmp_path, hub, library):
    _, folder, given = hub
    cache = tmp_path / "cache"
    opened = open_checkpoint("org/tiny")
    assert opened.where == f"org/tiny@{COMMIT[:12]}/config.json"
    assert opened.tokenizer().vocab_size == 300
    assert not list(cache.rglob("*.safetensors")), "no weight file was downloaded"
    assert read_all(opened.source) == WEIGHTS
    assert opened.source.bytes_read == opened.nbytes
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    assert sorted(file.name for file in cache.rglob("snapshots/*/*.safetensors")) == shards

    given.clear()
    assert read_all(open_checkpoint("org/tiny@main").source) == WEIGHTS
    assert not given, "everything was in the cache"
    library(NOWHERE)
    assert read_all(open_checkpoint("org/tiny").source) == WEIGHTS
    library(NOWHERE, offline=True)
    opened = open_checkpoint("org/tiny")
    assert read_all(opened.source) == WEIGHTS
    assert opened.where.startswith(str(cache))


def test_a_snapshot_that_is_not_complete(tmp_path, hub, library):
    assert open_checkpoint("org/tiny").tokenizer()
    library(NOWHERE, offline=True)
    with pytest.raises(
        MissingCheckpointFileError, match=r"names model-00001-of-00002\.safetensors, which is not there"
    ):
        open_checkpoint("org/tiny")


def test_what_is_not_on_the_hub(hub, library):
    with pytest.raises(MissingCheckpointFileError) as caught:
        open_checkpoint("org/absent")
    assert str(caught.value) == (
        "org/absent: the Hub has no such repository (or it is private)\n"
        "  → check the spelling; a local folder is written ./name; private repositories need `hf auth login`"
    )
    with pytest.raises(MissingCheckpointFileError) as caught:
        open_checkpoint("org/tiny/model.gguf")
    assert str(caught.value).startswith(
        f"org/tiny@{COMMIT[:12]}: there is no model.gguf (the file that the reference names); it has config.json, "
    )


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize("name", ["a" * 97, "org--name/tiny", "org/tiny.git"])
def test_what_cannot_be_a_name_of_the_hub(library, name, offline):
    """The client's own error was a traceback."""
    library(NOWHERE, offline=offline)
    with pytest.raises(MissingCheckpointFileError, match="it cannot be the name of a repository of the Hub"):
        open_checkpoint(name)


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_network_and_a_cache(library, offline):
    library(NOWHERE, offline=offline)
    with pytest.raises(UnreachableError) as caught:
        open_checkpoint("org/tiny")
    reason = r"HF_HUB_OFFLINE is set" if offline else r".*[Cc]onnect.*"
    assert re.fullmatch(
        rf"org/tiny: it is not in the Hub's local cache, and the Hub cannot be reached \({reason}\)\n"
        r"  → download it where there is a network, or give a local folder \(\./name\)",
        str(caught.value),
    )
