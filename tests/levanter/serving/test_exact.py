"""A stream's pieces, joined, are byte for byte the text that is not streamed: characters and stop strings that tokens
cut, and special characters, included."""

import json
import random
from typing import Any

import httpx
import pytest

WORDS = [
    "the cat",
    "🙂",
    "👩‍👩‍👧",
    "日本語",
    "über",
    "\u2028",
    "\n\n",
    "def f(x):",
    "e\u0301",
    "\x00",
    "</s>",
    "  ",
    "ﷺ",
    "\ufffd",
]


def text_of(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4)))[:18]


def streamed(http: httpx.Client, body: dict[str, Any]) -> tuple[bytes, str | None]:
    """The joined text of a stream, as bytes, and why it ended."""
    text, reason = b"", None
    answer = http.post("/v1/completions", json={**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.content.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    for event in events[:-2]:
        assert event.startswith(b"data: ") and event.count(b"\n") == 0
        (choice,) = json.loads(event[6:])["choices"]
        text += choice["text"].encode()
        reason = choice["finish_reason"] or reason
    return text, reason


def check(http: httpx.Client, seed: int) -> bool:
    """Asks for a text in both ways, and again with a stop string out of its middle; whether tokens cut that."""
    rng = random.Random(seed)
    asked = {"prompt": text_of(rng), "seed": seed, "max_tokens": 20, "ignore_eos": True, "logprobs": 0}
    whole = http.post("/v1/completions", json=asked).json()["choices"][0]
    assert streamed(http, asked) == (whole["text"].encode(), whole["finish_reason"])
    text = whole["text"]
    if len(text) < 4:
        return False
    begin = rng.randrange(len(text) - 2)
    stop = text[begin : begin + rng.randint(2, 5)]
    cut = {**asked, "stop": [stop, "never there"], "logprobs": None}
    ended = http.post("/v1/completions", json=cut).json()["choices"][0]
    assert ended["text"] == text[: text.index(stop)]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", stop)
    assert streamed(http, cut) == (ended["text"].encode(), "stop")
    return not any(stop in token for token in whole["logprobs"]["tokens"])


@pytest.mark.parametrize("count", [24, pytest.param(500, marks=pytest.mark.slow)])
def test_streams_are_exact(server, count):
    with httpx.Client(base_url=server.url, timeout=None) as http:
        cut = sum(check(http, seed) for seed in range(count))
    assert cut > count // 4
