"""The key: read from a file or the environment, carried by requests, shown by nothing."""

import json
import logging

import pytest
from helpers.asgi import ask, reply

from levanter.serving.api_key import ApiKey, ApiKeyError, read_key
from levanter.serving.metrics import RequestRejected
from levanter.serving.middleware import RequireApiKey

pytestmark = pytest.mark.quick

KEY = "correct-horse-battery"


def door(**options) -> RequireApiKey:
    return RequireApiKey(reply, key=ApiKey.of(KEY), **options)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"Authorization": f"bearer   {KEY}"}, 200),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"Authorization": KEY}, 401),
        ({"Authorization": f"Bearer {KEY[:-1]}"}, 401),
        ({"Authorization": f"Bearer {KEY}x"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Bearer \xff\xfe"}, 401),
        ([("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer other")], 401),
    ],
)
def test_who_carries_the_key_is_let_in(headers, status):
    seen: list[object] = []
    answer = ask(door(observe=seen.append), headers=headers)
    assert answer.status == status
    assert seen == ([] if status == 200 else [RequestRejected(route="/v1/completions", reason="key", status=401)])
    if status == 401:
        error = json.loads(answer.body)["error"]
        assert error["code"] == "invalid_api_key" and "Bearer" in answer.headers["www-authenticate"]


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
def test_the_page_and_probes_need_none(path):
    assert ask(door(), path, method="GET").status == 200


@pytest.mark.parametrize("path", ["//", "/health/", "/healthx", "/metrics", "/plan", "/v1/models", "/openapi.json"])
def test_everything_else_does(path):
    assert ask(door(), path, method="GET").status == 401


def test_other_protocols_are_not_let_in_by_their_path():
    answers: list[dict] = []

    async def send(message):
        answers.append(message)

    async def receive():
        raise AssertionError("nothing is read")

    import asyncio

    asyncio.run(door()({"type": "websocket", "path": "/", "headers": []}, receive, send))
    assert answers[0]["status"] == 401


@pytest.mark.parametrize("content", [KEY, f"{KEY}\n", f"  {KEY}\r\n"])
def test_a_key_from_a_file_or_the_environment(tmp_path, content):
    path = tmp_path / "key"
    path.write_bytes(content.encode())
    for key in (read_key(str(path)), read_key("env:SERVER_KEY", {"SERVER_KEY": content})):
        assert key.is_in([(b"authorization", f"Bearer {KEY}".encode())])
        assert not key.is_in([(b"authorization", b"Bearer other")])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 characters"),
        (b"short", "5 characters"),
        (b"two words here", "without spaces"),
        (b"one-line\nanother-line", "one line"),
        (b"caf\xc3\xa9-caf\xc3\xa9", "ASCII"),
        (b"\xff\xfe\x00\x01", "ASCII"),
        (b"x" * 5000, "4,096 bytes"),
    ],
)
def test_what_cannot_be_a_key_is_refused_without_showing_it(tmp_path, content, said):
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ApiKeyError, match=said) as raised:
        read_key(str(path))
    assert str(path) in str(raised.value)
    if content.strip():
        assert content.decode("latin-1").strip() not in str(raised.value)


def test_a_key_that_is_not_there(tmp_path):
    with pytest.raises(ApiKeyError, match="no environment variable SERVER_KEY"):
        read_key("env:SERVER_KEY", {})
    with pytest.raises(ApiKeyError, match="missing"):
        read_key(str(tmp_path / "missing"))
    with pytest.raises(ApiKeyError):
        read_key(str(tmp_path))


def test_nothing_shows_a_key(caplog: pytest.LogCaptureFixture):
    key = ApiKey.of(KEY)
    with caplog.at_level(logging.DEBUG):
        ask(door(), headers={"Authorization": f"Bearer {KEY}"})
        ask(door(), headers={"Authorization": "Bearer wrong-but-secret"})
    assert KEY not in caplog.text and "wrong-but-secret" not in caplog.text
    assert KEY not in repr(key) and key.digest.hex() not in repr(key)
    assert b"wrong-but-secret" not in ask(door(), headers={"Authorization": "Bearer wrong-but-secret"}).body


SECRETS = ["sk-live_51HxYb0aTq9LmZ", "sk-proj/abc.def+GHI==", "Zm9vYmFyYmF6cXV4", "hunter2hunter2hunter2", "a" * 300]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("prefix", ["", "env:", "./"])
def test_a_key_in_place_of_its_file_is_not_shown(secret, prefix):
    """Somebody writes the key itself where the name of its file or variable belongs: the log must not have it."""
    with pytest.raises(ApiKeyError) as raised:
        read_key(f"{prefix}{secret}", {})
    shown = f"{raised.value}{raised.value.__cause__ or ''}"
    assert secret not in shown and secret[:8] not in shown
    assert "api_key" in shown


def test_the_route_of_a_rejected_request_is_not_what_its_client_wrote():
    seen: list[RequestRejected] = []
    app = door(observe=seen.append)
    for path in ("/v1/completions", "/v1/models/" + "x" * 50, "/" + "y" * 5000):
        assert ask(app, path).status == 401
    assert [one.route for one in seen] == ["/v1/completions", "other", "other"]
