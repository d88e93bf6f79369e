"""Requests that one client could stop a server with: large, deep, ambiguous, or many times more work than bytes.

Each is the bytes of one HTTP request. A scale of 1 gives the sizes of the reports; tests of every day use `SMALLEST`,
whose requests exceed the same limits.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}


@dataclass(frozen=True, kw_only=True)
class HostileRequest:
    """One request.

    Attributes:
        name: what is hostile in it.
        head: the request line and headers, with the empty line.
        body: its body.
        refused: whether a server has to refuse it with 4xx; otherwise it may also answer.
        times: connections on which it is sent at once.
        seconds: after which the client leaves.
    """

    name: str
    head: bytes
    body: bytes = b""
    refused: bool = True
    times: int = 1
    seconds: float = 20.0


def post(path: str, body: Mapping[str, object] | bytes, name: str, **more: object) -> HostileRequest:
    """A request with a JSON body."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Content-Length: {len(raw)}", "", ""))
    return HostileRequest(name=name, head=head.encode(), body=raw, **more)  # type: ignore[arg-type]


def raw(name: str, *lines: str, body: bytes = b"", **more: object) -> HostileRequest:
    """A request whose head is written as it is."""
    head = "".join(f"{line}\r\n" for line in (*lines, "")).encode("latin-1")
    return HostileRequest(name=name, head=head, body=body, **more)  # type: ignore[arg-type]


def _schema(schema: object) -> Mapping[str, object]:
    return {"messages": [USER], "max_tokens": 8, "response_format": _format(schema)}


def _format(schema: object) -> Mapping[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def _nested(depth: int) -> object:
    schema: object = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _tool(n: int, parameters: object) -> Mapping[str, object]:
    return {"type": "function", "function": {"name": f"tool_{n}", "parameters": parameters}}


def hostile_requests(scale: float = 1.0) -> list[HostileRequest]:
    """All of them.

    Args:
        scale: factor of the sizes that are not limits themselves.
    """
    return [*_choices(), *_constraints(scale), *_large(scale), *_framing()]


def _choices() -> list[HostileRequest]:
    prompts = {"prompt": [[5, 6, 7]] * 1024, "max_tokens": 100, "ignore_eos": True}
    long = {"prompt": [5, 6, 7], "max_tokens": 180, "ignore_eos": True}
    return [
        post(COMPLETIONS, {**prompts, "n": 128}, "1,024 prompts × n = 128, client gone", seconds=1.0),
        post(COMPLETIONS, prompts, "1,024 prompts", refused=False, seconds=4.0),
        post(COMPLETIONS, {**long, "n": 128}, "n = 128, long", refused=False, seconds=4.0),
        post(COMPLETIONS, {**long, "n": 64}, "n = 64 on 20 connections", refused=False, times=20, seconds=4.0),
        post(
            COMPLETIONS,
            {**prompts, "prompt": [[5] * 150] * 400, "max_tokens": 2},
            "a full queue",
            refused=False,
            seconds=4.0,
        ),
        post(
            COMPLETIONS,
            {**prompts, "echo": True, "logprobs": 20, "max_tokens": 1},
            "1,024 prompts to score",
            refused=False,
            seconds=4.0,
        ),
        post(COMPLETIONS, {**long, "n": 129}, "n = 129"),
        post(COMPLETIONS, {**long, "prompt": [[5]] * 1025}, "1,025 prompts"),
    ]


def _constraints(scale: float) -> list[HostileRequest]:
    def regex(text: str, name: str, **more: object) -> HostileRequest:
        return post(COMPLETIONS, {"prompt": "hello", "max_tokens": 8, "regex": text}, name, **more)

    def grammar(text: str, name: str, **more: object) -> HostileRequest:
        return post(COMPLETIONS, {"prompt": "hello", "grammar": text}, name, **more)

    big = int(1_000_000 * scale)
    many = {
        f"field_{n}": {"type": "string", "pattern": f"^[a-z]{{1,{n % 50 + 1}}}$"} for n in range(int(20_000 * scale))
    }
    words = [f"word {n}" for n in range(max(25_000, int(100_000 * scale)))]
    node = {"type": "object", "properties": {"next": {"$ref": "#"}, "value": {"type": "integer"}}}
    return [
        regex("a" * big, "regex of 1 MB"),
        regex("(a{1000}){1000}", "(a{1000}){1000}"),
        regex("(((((a*)*)*)*)*)*b" * 20, "nested stars", refused=False),
        regex("(a|b|ab|ba|aab|bba)*" * 100 + "c{500}", "ambiguous alternatives", refused=False),
        regex("(.*a){30}.{50}", "states without end", refused=False),
        regex("[^\\x00-\\x7f]{0,3000}x", "classes of characters", refused=False),
        post(CHAT, _schema({"$ref": "#"}), '{"$ref": "#"}'),
        post(CHAT, _schema({"$ref": "#/definitions/missing"}), "$ref to nothing"),
        post(CHAT, _schema({"allOf": [{"$ref": "#"}, {"type": "object"}]}), "$ref to itself in allOf"),
        post(CHAT, _schema(_nested(120)), "schema nested 120 deep", refused=False),
        post(CHAT, _schema({"type": "object", "properties": many}), "schema with 20,000 patterns"),
        post(CHAT, _schema({"enum": words}), "enum of 100,000"),
        post(CHAT, _schema({"type": "string", "minLength": 10**9}), "a string of a billion characters", refused=False),
        post(CHAT, _schema({"type": "array", "items": node, "minItems": 10**6}), "a million items", refused=False),
        grammar('start: "a" start |\n' * int(150_000 * scale), "grammar of 3 MB"),
        grammar("start: start start | start |", "ambiguous grammar", refused=False),
        post(
            CHAT,
            {
                "messages": [USER],
                "max_tokens": 8,
                "tools": [_tool(n, _nested(20)) for n in range(128)],
                "tool_choice": "required",
            },
            "128 tools with schemas",
            refused=False,
        ),
    ]


def _large(scale: float) -> list[HostileRequest]:
    def count(full: int) -> int:
        return int(full * scale)

    unknown = {f"unknown_key_{n}": n for n in range(count(200_000))}
    # More than is tokenized for `/tokenize`, whatever the context is.
    text = "hello world, 12345! " * max(60_000, count(1_000_000))
    deep = b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    messages = {"messages": [USER] * count(100_000)}
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * count(300_000)}]}
    digits = b'{"prompt": "a", "seed": ' + b"9" * count(20_000_000) + b"}"
    arguments = {"name": "f", "arguments": "[" * count(2_000_000)}
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": arguments}]}
    halves = b'{"prompt": "' + b"\\ud800" * count(1_000_000) + b'"}'
    twice = b"{" + b'"prompt": "a", ' * count(200_000) + b'"max_tokens": 3}'
    # As hostile as lists get: nothing in them costs the sender more than three bytes.
    empty = b'{"prompt": [' + b"[]," * count(8_000_000) + b"[]]}"
    return [
        post(COMPLETIONS, {"prompt": "hello", **unknown}, "200,000 unknown keys"),
        post(CHAT, {"messages": [USER], **unknown}, "200,000 unknown keys in a chat"),
        post(CHAT, {"messages": [{**USER, **unknown}]}, "200,000 unknown keys in a message"),
        post(COMPLETIONS, {"prompt": "hello", "response_format": unknown}, "200,000 unknown keys in a format"),
        post(COMPLETIONS, {"prompt": text}, "20 MB of text"),
        post(CHAT, {"messages": [{"role": "user", "content": text}]}, "20 MB of text in a chat"),
        post("/tokenize", {"prompt": text}, "20 MB of text to tokenize"),
        post(COMPLETIONS, {"prompt": [5] * count(5_000_000)}, "5,000,000 ids"),
        post(COMPLETIONS, {"prompt": [-1] * count(2_000_000)}, "2,000,000 ids that do not exist"),
        post(COMPLETIONS, {"prompt": [5, "a"] * count(500_000)}, "a list of ids and texts"),
        post("/detokenize", {"tokens": [5] * count(4_000_000)}, "4,000,000 ids to decode", refused=False),
        post("/v1/tokens", {"message_list": [[USER]] * count(50_000)}, "50,000 conversations", refused=False),
        post(COMPLETIONS, empty, "8,000,000 empty lists"),
        post(COMPLETIONS, {"prompt": "a", "logit_bias": {str(n): 1 for n in range(count(200_000))}}, "200,000 biases"),
        post(COMPLETIONS, {"prompt": "a", "stop": ["x"] * count(200_000)}, "200,000 stop strings"),
        post(CHAT, messages, "100,000 messages"),
        post(CHAT, parts, "300,000 parts of a message"),
        post(CHAT, {"messages": [USER], "tools": [_tool(n, {}) for n in range(count(20_000))]}, "20,000 tools"),
        post(CHAT, {"messages": [USER, called]}, "arguments nested without end"),
        post(CHAT, {"messages": [USER], "chat_template_kwargs": unknown}, "200,000 variables", refused=False),
        post(COMPLETIONS, deep, "5,000 lists inside one another"),
        post(COMPLETIONS, digits, "a number of 20 MB"),
        post(COMPLETIONS, halves, "1,000,000 halves of surrogate pairs"),
        post(COMPLETIONS, twice, "a key 200,000 times"),
        post(COMPLETIONS, {"k" * count(10_000_000): 1, "prompt": "a"}, "a key of 10 MB"),
        post(COMPLETIONS, {"prompt": "hello", "model": "m" * count(10_000_000)}, "a model's name of 10 MB"),
    ]


def _framing() -> list[HostileRequest]:
    host, json_type, line = "Host: localhost", "Content-Type: application/json", f"POST {COMPLETIONS} HTTP/1.1"
    body = b'{"prompt": "a", "max_tokens": 1}'
    length = f"Content-Length: {len(body)}"
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    upgrade = ("GET /v1/completions HTTP/1.1", host, "Connection: Upgrade", "Upgrade: websocket")
    key = ("Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    return [
        raw(
            "a length beside chunks",
            line,
            host,
            json_type,
            length,
            "Transfer-Encoding: chunked",
            body=chunked,
            refused=False,
        ),
        raw("two lengths", line, host, json_type, length, "Content-Length: 3", body=body),
        raw("websockets", *upgrade, *key, times=50),
    ]


SMALLEST = 0.03
"""A scale at which every request is still beyond the limit that it is about."""

Check = Callable[[HostileRequest, bytes], None]
