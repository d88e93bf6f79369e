"""Bodies, rates and origins: what is turned away, with which answer, and what goes on as if nothing had been."""

import json

import pytest
from helpers.asgi import ask, behind, reply

from levanter.base.input_limits import MIB
from levanter.serving import middleware
from levanter.serving.api_key import ApiKey
from levanter.serving.limits import LimitsConfig
from levanter.serving.metrics import RequestRejected
from levanter.serving.middleware import (
    LOCAL_NAMES,
    MAX_TRACKED_CLIENTS,
    BodyLimit,
    RateLimit,
    SameOrigin,
    middleware_stack,
)

pytestmark = pytest.mark.quick

SMALL = LimitsConfig(max_body_mib=1, max_bodies_mib=2)


@pytest.fixture(autouse=True)
def no_waiting_for_clients(monkeypatch: pytest.MonkeyPatch):
    """A client that is refused may go on sending for a while; these here do not."""
    monkeypatch.setattr(middleware, "LINGER_SECONDS", 0.01)


def test_a_body_in_parts_arrives_whole():
    seen = []

    async def app(scope, receive, send):
        seen.append(await receive())
        await reply(scope, _again(seen[0]), send)

    def _again(message):
        async def receive():
            return message

        return receive

    answer = ask(BodyLimit(app, limits=SMALL), parts=[b"ab", b"", b"cde"])
    assert (answer.status, answer.body) == (200, b"5")
    assert seen == [{"type": "http.request", "body": b"abcde", "more_body": False}]


@pytest.mark.parametrize("announced", [True, False])
def test_the_byte_too_many(announced):
    seen: list[RequestRejected] = []
    door = BodyLimit(reply, limits=SMALL, observe=seen.append)
    half = b"x" * (MIB // 2)

    def sent(parts):
        headers = {"content-length": str(sum(map(len, parts)))} if announced else {}
        return ask(door, headers=headers, parts=parts)

    assert sent([half, half]).body == str(MIB).encode()
    refused = sent([half, half, b"x"])
    assert refused.status == 413 and refused.headers["connection"] == "close"
    assert "1 MiB" in json.loads(refused.body)["error"]["message"]
    assert [(one.reason, one.status) for one in seen] == [("too_large", 413)]
    # Refused bodies are not counted on: as many fit as before.
    assert sent([half, half]).status == 200


def test_an_announced_length_is_refused_before_anything_is_read():
    # The client waits for the answer with its body.
    answer = ask(BodyLimit(reply, limits=SMALL), headers={"content-length": str(40 * MIB)}, parts=[])
    assert answer.status == 413


@pytest.mark.parametrize("length", ["-1", "1e9", "²", "9" * 5000, " 7"])
def test_a_length_that_is_none(length):
    answer = ask(BodyLimit(reply, limits=SMALL), headers=[("content-length", length)], parts=[b"seven.."])
    assert answer.status == (413 if length.startswith("9") else 200)


def test_all_bodies_together_are_bounded_until_they_are_read():
    limits = LimitsConfig(max_body_mib=1, max_bodies_mib=1)
    inner = []

    async def app(scope, receive, send):
        # While this one's body is not taken, there is no room for another.
        inner.append(await _inside())
        await receive()
        await reply(scope, _gone, send)

    async def _gone():
        return {"type": "http.request", "body": b"", "more_body": False}

    door = BodyLimit(app, limits=limits)

    async def _inside():
        found = []

        async def send(message):
            found.append(message)

        async def receive():
            return {"type": "http.request", "body": b"x" * MIB, "more_body": False}

        await door({"type": "http", "headers": [], "path": "/"}, receive, send)
        return found[0]["status"]

    answer = ask(door, parts=[b"x"])
    assert answer.status == 200 and inner == [503]


def test_a_body_that_does_not_come_is_not_waited_for():
    seen: list[RequestRejected] = []
    limits = LimitsConfig(body_seconds=0.05)
    # Nothing comes.
    answer = ask(BodyLimit(_never, limits=limits, observe=seen.append), parts=[])
    assert answer.status == 408 and [one.reason for one in seen] == ["limit"]


async def _never(scope, receive, send):
    raise AssertionError("half a request reached the application")


def test_a_client_that_leaves_reaches_nobody():
    answer = ask(BodyLimit(_never, limits=SMALL), parts=[b"half", None])
    assert answer.status == 0


def test_limits_that_contradict_each_other():
    with pytest.raises(ValueError, match="max_body_mib"):
        LimitsConfig(max_bodies_mib=16)
    with pytest.raises(ValueError, match=r"limits\.max_body_mib"):
        LimitsConfig(max_body_mib=33)


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_so_many_requests_a_minute_and_then_one_each_time_one_is_due():
    clock = Clock()
    rate = RateLimit(reply, per_minute=6, now=clock)
    assert [ask(rate).status for _ in range(7)] == [200] * 6 + [429]
    refused = ask(rate)
    assert refused.headers["retry-after"] == "10" and json.loads(refused.body)["error"]["type"] == "rate_limit_error"
    # Another client, and probes, are not concerned.
    assert ask(rate, client="10.0.0.2").status == 200
    assert ask(rate, "/health", method="GET").status == 200
    clock.seconds += 9.9
    assert ask(rate).status == 429
    clock.seconds += 0.2
    assert [ask(rate).status for _ in range(2)] == [200, 429]
    clock.seconds += 3600
    assert [ask(rate).status for _ in range(7)] == [200] * 6 + [429]


def test_addresses_are_forgotten_rather_than_collected():
    rate = RateLimit(reply, per_minute=60)
    for n in range(MAX_TRACKED_CLIENTS + 10):
        rate.retry_after(str(n))
    assert len(rate._buckets) == MAX_TRACKED_CLIENTS


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "127.0.0.1"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "LOCALHOST:8000"}, 200),
        ({"Host": "rebound.example:8000"}, 403),
        ({"Host": "localhost.example"}, 403),
        ({"Host": "[::1"}, 403),
        ({}, 200),
        ({"Origin": "http://localhost:8000"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Host": "localhost:8000", "Origin": "http://localhost:3000"}, 403),
        ({"Host": "localhost:8000", "Origin": "https://elsewhere.example"}, 403),
        ({"Host": "localhost:8000", "Origin": "null"}, 403),
    ],
)
def test_pages_of_other_sites_do_not_reach_a_server_without_a_key(headers, status):
    assert ask(SameOrigin(reply, names=LOCAL_NAMES), headers=headers).status == status


def test_doors_stand_in_their_order(monkeypatch):
    monkeypatch.setitem(RateLimit.__init__.__kwdefaults__, "now", Clock())
    seen: list[RequestRejected] = []
    key = {"Authorization": "Bearer long-enough"}
    limits = LimitsConfig(max_body_mib=1, requests_per_minute=4)
    app = behind(
        reply, *middleware_stack(limits=limits, key=ApiKey.of("long-enough"), names=("host",), observe=seen.append)
    )
    big = [b"x" * (MIB + 1)]
    assert ask(app, headers={"Host": "other", **key}, parts=big).status == 403
    assert ask(app, headers={"Host": "host"}, parts=big).status == 401
    assert ask(app, headers={"Host": "host", **key}, parts=big).status == 413
    assert ask(app, headers={"Host": "host", **key}).status == 200
    # Keys are not guessed faster than requests may come.
    assert [ask(app, headers={"Host": "host"}).status for _ in range(2)] == [401, 429]
    assert [one.reason for one in seen] == ["origin", "key", "too_large", "key", "limit"]
