"""Files of web servers: what is there, what is refused, redirections, certificates, servers that know no ranges."""

import subprocess

import numpy as np
import pytest
from helpers.object_store import Fault, ObjectStore

from levanter.io.ranges import Connections, HttpFile, RangeError, TransientError, remote_file
from levanter.io.ranges.connections import shown_url
from levanter.io.ranges.request import Attempt

CONTENT = np.random.default_rng(1).bytes(200_000)


def web_file(url: str) -> HttpFile:
    found = remote_file(url, Connections())
    assert isinstance(found, HttpFile)
    return found


def read(file: HttpFile, start: int, stop: int) -> bytes:
    buffer = bytearray(stop - start)
    file.fetch(start, (memoryview(buffer),), Attempt())
    return bytes(buffer)


def test_what_is_there():
    with ObjectStore({"a file, ü.bin": CONTENT, "empty": b""}) as store:
        file = web_file(f"{store.url}/a%20file%2C%20%C3%BC.bin")
        assert file.exists() and file.describe().size == 200_000
        assert read(file, 7, 100_007) == CONTENT[7:100_007]
        assert file.whole(1 << 20) == CONTENT and file.whole(100) == CONTENT[:101]
        empty = web_file(f"{store.url}/empty")
        assert empty.exists() and empty.describe().size == 0 and empty.whole(10) == b""
        missing = web_file(f"{store.url}/none")
        assert not missing.exists()
        with pytest.raises(FileNotFoundError):
            missing.describe()


def test_an_answer_fills_pieces_of_memory_one_after_another():
    """The first of them come with the head of the answer, in the buffer that reads it; one is empty."""
    sizes = [1, 0, 17, 300, 5000, 60_000, 3, 100_000]
    with ObjectStore({"a": CONTENT}) as store:
        file = web_file(f"{store.url}/a")
        for order in (sizes, sizes[::-1]):
            buffers = [bytearray(size) for size in order]
            attempt = Attempt()
            file.fetch(11, tuple(map(memoryview, buffers)), attempt)
            assert b"".join(buffers) == CONTENT[11 : 11 + sum(sizes)] and attempt.received == sum(sizes)
        assert len(store._server.open) == 1, "each answer was received to its end"


def test_one_connection_serves_many_requests_and_one_that_was_closed_meanwhile_is_no_failure():
    with ObjectStore({"a": CONTENT}) as store:
        file = web_file(f"{store.url}/a")
        for at in range(0, 100_000, 10_000):
            assert read(file, at, at + 10_000) == CONTENT[at : at + 10_000]
        assert len(store._server.open) == 1
        store._server.drop()
        assert read(file, 5, 50) == CONTENT[5:50]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirections_are_followed_and_remembered_until_they_are_refused(status):
    with ObjectStore({"signed-1": CONTENT, "signed-2": CONTENT}) as there, ObjectStore({"a": b"x"}) as here:
        target = ["signed-1"]
        here.fault = lambda request: Fault(status=status, headers={"Location": f"{there.url}/{target[0]}"})
        file = web_file(f"{here.url}/a")
        assert file.describe().size == 200_000
        assert read(file, 0, 10) == CONTENT[:10] and here.requests == 1
        there.fault = lambda request: Fault(status=403) if request.file == "signed-1" else None
        target[0] = "signed-2"
        assert read(file, 10, 20) == CONTENT[10:20] and here.requests == 2


def test_redirections_in_a_circle_and_to_elsewhere():
    with ObjectStore({"a": CONTENT}) as store:
        store.fault = lambda request: Fault(status=302, headers={"Location": "/a"})
        with pytest.raises(RangeError, match="redirected more than 5 times, last to http://"):
            web_file(f"{store.url}/a").describe()
        store.fault = lambda request: Fault(status=302, headers={"Location": "file:///etc/passwd"})
        with pytest.raises(RangeError, match=r"redirected to file:///etc/passwd, which is no web address"):
            web_file(f"{store.url}/a").describe()


def test_a_server_that_knows_no_ranges():
    with ObjectStore({"a": CONTENT}, fault=lambda request: Fault(ignore_range=True)) as store:
        file = web_file(f"{store.url}/a")
        assert file.whole(1 << 20) == CONTENT
        with pytest.raises(RangeError, match=r"sends all 200,000 bytes.*\n  → copy the files"):
            file.describe()


def test_a_server_that_does_not_say_how_large_a_file_is():
    fault = Fault(headers={"Content-Range": "bytes 0-0/*"})
    with ObjectStore({"a": CONTENT}, fault=lambda request: fault) as store, pytest.raises(RangeError) as caught:
        web_file(f"{store.url}/a").describe()
    assert "does not report its size" in str(caught.value)


@pytest.mark.parametrize("status", [401, 403])
def test_refused(status):
    with ObjectStore({"a": CONTENT}, fault=lambda request: Fault(status=status)) as store:
        with pytest.raises(RangeError, match=rf"the server refuses it \({status}.*\n  → check the credentials"):
            web_file(f"{store.url}/a").describe()
        if status == 401:
            with pytest.raises(RangeError):
                web_file(f"{store.url}/a").exists()
        else:
            assert not web_file(f"{store.url}/a").exists(), "what stores say of files that they do not have"


def test_nobody_listens():
    with ObjectStore({}) as store:
        url = store.url
    with pytest.raises(TransientError, match="connection refused"):
        web_file(f"{url}/a").describe()


def test_names_in_messages_have_no_passwords_and_no_signatures():
    assert shown_url("https://me:secret@host:8443/a/b?X-Amz-Signature=abc#d") == "https://host:8443/a/b"
    with ObjectStore({"a": CONTENT}) as store:
        file = web_file(store.url.replace("//", "//me:se%20cret@") + "/a")
        assert file.describe().size == 200_000 and "cret" not in file.name
        assert store.log[-1].headers["Authorization"] == "Basic bWU6c2UgY3JldA=="


def test_certificates(tmp_path, monkeypatch):
    """One that is trusted is read from; one that is not is an error, not a reason to try again."""
    made = tmp_path / "both.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    try:
        subprocess.run(
            ["openssl", *words.split(), "-keyout", made, "-out", tmp_path / "cert.pem"], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    with made.open("ab") as file:
        file.write((tmp_path / "cert.pem").read_bytes())
    with ObjectStore({"a": CONTENT}, certificate=made) as store:
        with pytest.raises(RangeError, match="its certificate is not trusted"):
            web_file(f"{store.url}/a").describe()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        file = web_file(f"{store.url}/a")
        assert file.describe().size == 200_000 and read(file, 0, 200_000) == CONTENT
