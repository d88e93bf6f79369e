"""How a request is read and how its answer is written: what costs every other stream time is not done."""

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from levanter.serving.responses import SHORT_BODY, is_cheap_to_parse

ASKED = {"prompt": "the cat sat", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("raw", "quick"),
    [
        (json.dumps(ASKED), True),
        (json.dumps({"prompt": list(range(100, 200)), "stop": ["\n"]}), True),
        (json.dumps({"prompt": "日本語 🙂"}, ensure_ascii=False), True),
        (json.dumps({"prompt": "a" * SHORT_BODY}), False),
        (json.dumps({**ASKED, "response_format": {"type": "json_object"}}), False),
        (json.dumps({**ASKED, "regex": "(a|b)*c"}), False),
        (json.dumps({**ASKED, "grammar": "start: /a/"}), False),
        (json.dumps({**ASKED, "json_schema": {"type": "object"}}), False),
        ('{"prompt": "a", "\\u0072egex": "(a|b)*c"}', False),
    ],
    ids=lambda each: str(each)[:40],
)
def test_only_what_is_short_and_plain_is_read_between_two_steps(raw: str, quick: bool):
    assert is_cheap_to_parse(raw.encode()) is quick


def test_others_are_read_beside_the_event_loop(server, monkeypatch):
    handed, own = [], server.service.off_loop

    def off_loop(work):
        handed.append(work)
        return own(work)

    monkeypatch.setattr(server.service, "off_loop", off_loop)
    url = f"{server.url}/v1/completions"
    short = httpx.post(url, json=ASKED).json()
    assert handed == []
    long = httpx.post(url, json={**ASKED, "stop": ["unlikely " * 30] * 8}).json()
    assert len(handed) == 1
    assert long["choices"] == short["choices"]
    # What is wrong is said alike.
    answers = [httpx.post(url, json={**ASKED, "tmperature": 1, "user": "x" * count}) for count in (1, SHORT_BODY)]
    assert [answer.status_code for answer in answers] == [400, 400] and len(handed) == 2
    assert answers[0].json()["error"] == answers[1].json()["error"]


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream_ends_in_one_write(server, usage: bool):
    """Its last token, its usage and its end: each write gives the interpreter away once."""
    raw = json.dumps({**ASKED, "stream": True, "stream_options": {"include_usage": usage}}).encode()
    where = urlsplit(server.url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Length: {len(raw)}\r\n"
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + raw)
        got = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    body, written = got.partition(b"\r\n\r\n")[2], []
    while body:
        size, _, body = body.partition(b"\r\n")
        written.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    *_, last, end = written
    assert end == b"" and last.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in last and (b'"completion_tokens":4' in last) is usage
    assert b"".join(written).count(b"[DONE]") == 1
