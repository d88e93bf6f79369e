"""Connections of a real server: slow heads, slow readers, too many of them; others are answered meanwhile."""

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading

import pytest
from helpers.asgi import behind, listening, reply

from levanter.base.input_limits import MIB
from levanter.serving import middleware
from levanter.serving.limits import LimitsConfig
from levanter.serving.middleware import middleware_stack
from levanter.serving.server import bounded_protocol, max_connections

pytestmark = pytest.mark.quick

HANGS = 120.0
"""Seconds after which a test is taken for hanging."""


def served(app=reply, **limits):
    bounds = LimitsConfig(**limits)
    return listening(behind(app, *middleware_stack(limits=bounds)), protocol=bounded_protocol(bounds))


@pytest.fixture
def connect():
    """Opens connections, and closes them at the end."""
    with contextlib.ExitStack() as opened:
        yield lambda port: opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=HANGS))


def is_answered(port: int) -> bool:
    """Whether somebody else gets an answer; who was too slow for these short limits, on a busy machine, tries again."""
    while True:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=HANGS)
        try:
            client.request("POST", "/v1/completions", body=b"12345")
            answer = client.getresponse()
            return answer.status == 200 and answer.read() == b"5"
        except (ConnectionError, http.client.BadStatusLine):
            continue
        finally:
            client.close()


def ended(client: socket.socket) -> bool:
    """Waits until the server has closed a connection."""
    try:
        while client.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n", b"G"])
def test_a_head_that_does_not_end_is_not_waited_for(connect, sent):
    with served(header_seconds=0.2) as port:
        slow = connect(port)
        slow.sendall(sent)
        assert is_answered(port)
        assert ended(slow)
        assert is_answered(port)


LONG_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 20_000 + b"\r\n"


@pytest.mark.parametrize("before", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n123"])
def test_a_head_that_is_too_long_is_not_read(connect, before):
    with served() as port:
        client, said = connect(port), b""
        client.sendall(before + LONG_HEAD)
        with contextlib.suppress(ConnectionError):
            while part := client.recv(65536):
                said += part
        assert said.count(b"HTTP/1.1 200") == bool(before)
        # What the client still sends may end the connection before it has read why.
        assert before or b"head of the request has more than 16,384 bytes" in said or not said
        assert is_answered(port)


def test_a_head_of_many_lines_within_the_bound_is_read(connect):
    with served() as port:
        client, said = connect(port), b""
        lines = b"X: y\r\n" * 2_500
        client.sendall(b"GET /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" + lines + b"\r\n")
        while part := client.recv(65536):
            said += part
        assert said.startswith(b"HTTP/1.1 200")


def test_a_head_that_comes_byte_by_byte_has_no_more_time(connect):
    with served(header_seconds=0.5) as port:
        slow, stopped = connect(port), threading.Event()

        def drip():
            try:
                while not stopped.wait(0.02):
                    slow.sendall(b"X-Slow: 1\r\n")
            except OSError:
                pass

        slow.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n")
        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert ended(slow)
        finally:
            stopped.set()
            dripping.join()
        assert is_answered(port)


def test_a_second_head_on_the_same_connection_is_not_waited_for_either(connect):
    with served(header_seconds=0.5) as port:
        have = b""
        while not have.endswith(b"\r\n\r\n1"):  # again, if it took too long on a busy machine
            client, have = connect(port), b""
            with contextlib.suppress(ConnectionError):
                client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx")
                while not have.endswith(b"\r\n\r\n1") and (part := client.recv(65536)):
                    have += part
        with contextlib.suppress(ConnectionError):
            client.sendall(b"POST / HT")
        assert ended(client)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_not_spoken_is_refused_as_everything_else_and_the_connection_ends(connect, sent):
    with served() as port:
        client = connect(port)
        client.sendall(sent)
        said = b""
        while part := client.recv(65536):
            said += part
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head.lower()
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert is_answered(port)


def test_who_is_idle_longest_makes_room(connect):
    with served(max_connections=8) as port:
        idle = [connect(port) for _ in range(7)]
        # Whoever was accepted last is known to the server when it answers somebody behind it.
        assert is_answered(port)
        more = [connect(port) for _ in range(4)]
        assert is_answered(port)
        for gone in idle[:3]:
            assert ended(gone)
        for client in (*idle, *more):
            client.close()
        assert is_answered(port)


def test_where_nobody_is_idle_the_newest_is_sent_away(connect):
    inside, go_on = threading.Semaphore(0), threading.Event()

    async def app(scope, receive, send):
        if scope["type"] == "http":
            inside.release()
            await asyncio.get_running_loop().run_in_executor(None, go_on.wait)
        await reply(scope, receive, send)

    with served(app, max_connections=2) as port:
        busy = [http.client.HTTPConnection("127.0.0.1", port, timeout=HANGS) for _ in range(2)]
        for client in busy:
            client.request("POST", "/", body=b"123")
        for _ in busy:
            assert inside.acquire(timeout=HANGS)
        newest = connect(port)
        assert newest.recv(65536).startswith(b"HTTP/1.1 503 ")
        assert ended(newest)
        go_on.set()
        assert [client.getresponse().read() for client in busy] == [b"3", b"3"]
        for client in busy:
            client.close()
        assert is_answered(port)


def test_who_does_not_read_is_cut_off(connect):
    left = threading.Event()

    async def app(scope, receive, send):
        if scope["type"] != "http" or scope["path"] != "/endless":
            await reply(scope, receive, send)
            return
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * MIB, "more_body": True})
            await asyncio.sleep(0)
        left.set()

    with served(app, write_seconds=0.2) as port:
        client = connect(port)
        client.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
        assert left.wait(HANGS)
        assert is_answered(port)
        client.close()


@pytest.mark.parametrize("announced", [True, False])
def test_the_answer_to_a_body_that_is_too_large_arrives(announced, monkeypatch):
    # However long this machine takes to send it.
    monkeypatch.setattr(middleware, "LINGER_SECONDS", HANGS)
    with served(max_body_mib=1) as port:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=HANGS)
        body = b"x" * (5 * MIB)
        client.request("POST", "/", body=body if announced else iter([body]), encode_chunked=not announced)
        answer = client.getresponse()
        assert answer.status == 413 and b"1 MiB" in answer.read()
        client.close()
        assert is_answered(port)


def test_a_thousand_idle_connections_and_rapid_disconnects_harm_nobody(connect):
    files = max_connections(4096)
    count = min(1000, files // 4)
    with served() as port:
        idle = [connect(port) for _ in range(count)]
        assert is_answered(port)
        for n, client in enumerate(idle):
            if n % 2:
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"[: n % 60])
        assert is_answered(port)
        for client in idle:
            client.close()
        assert is_answered(port)


def test_open_files_bound_connections(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert max_connections(4096) == 768
    assert max_connections(100) == 100
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert max_connections(4096) == 4096


FRAMINGS = [
    ("Content-Length: 5", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding: chunked", "Content-Length: 5"),
    ("Content-Length: 5", "Content-Length: 5"),
    ("Content-Length: 5", "content-length : 5"),
    ("Content-Length: 5, 5",),
    ("Content-Length: 5, 6",),
    ("Content-Length: +5",),
    ("Content-Length: 0x5",),
    ("Content-Length: 5 5",),
    ("Content-Length:",),
    ("Content-Length: 5", "X: y", "\tfolded"),
    ("Transfer-Encoding:", " chunked"),
    ("Transfer-Encoding: gzip, chunked",),
    ("Transfer-Encoding: chunked, gzip",),
    ("Transfer-Encoding: identity",),
    ("Transfer-Encoding: chunked, chunked",),
    ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding: xchunked",),
    ("Transfer-Encoding : chunked",),
    ("Transfer-Encoding: \x0bchunked",),
]
"""Headers that two programs may read as different lengths of one body (RFC 9112, section 6)."""


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("line_end", ["\r\n", "\n"])
def test_ambiguous_framing_ends_the_connection(connect, version, line_end):
    """A second request behind it on the same connection, which one of the readings contains, is not answered."""
    with served() as port:
        for headers in [*FRAMINGS, *([("Transfer-Encoding: chunked",)] if version == "1.0" else [])]:
            client, reply = connect(port), b""
            lines = (f"POST /v1/completions HTTP/{version}", "Host: a", "Connection: keep-alive", *headers, "")
            head = line_end.join((*lines, "")).encode("latin-1")
            with contextlib.suppress(ConnectionError):
                client.sendall(head + b"5\r\nhello\r\n0\r\n\r\nGET /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n")
                while part := client.recv(65536):
                    reply += part
            assert reply.startswith(b"HTTP/1.1 400 ") and reply.count(b"HTTP/1.1 ") == 1, (headers, reply)
            assert b"connection: close" in reply.lower(), headers
        assert is_answered(port)


@pytest.mark.parametrize("headers", [("Content-Length: 5",), ("Transfer-Encoding: Chunked", "X: a, b")])
def test_one_framing_keeps_the_connection(connect, headers):
    with served() as port:
        client, reply = connect(port), b""
        body = b"5\r\nhello\r\n0\r\n\r\n" if headers[0].startswith("T") else b"hello"
        request = "\r\n".join(("POST / HTTP/1.1", "Host: a", *headers, "", "")).encode() + body
        client.sendall(request * 2)
        while reply.count(b"\r\n\r\n5") < 2 and (part := client.recv(65536)):
            reply += part
        assert reply.count(b"HTTP/1.1 200") == 2


def test_what_clients_send_does_not_fill_the_log(connect, caplog):
    upgrade = b"GET /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    with served() as port, caplog.at_level(logging.INFO):
        for sent in (upgrade, b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
            client = connect(port)
            client.sendall(sent)
            assert ended(client)
    assert [record for record in caplog.records if record.name.startswith("uvicorn.error.connection")] == []
    assert "upgrade" not in caplog.text.lower() and "Invalid HTTP" not in caplog.text
