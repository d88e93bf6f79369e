"""Drawn bodies of requests: with a senseless value, too much of something, damaged bytes, drawn constraints.

Each is read as the server reads it, without a server. A body is read, or refused with 4xx and a message that a client
can show; whatever is read is within the bounds of a request. An accepted constraint is followed for some tokens.
"""

import copy
import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helpers.served import model_folder

from levanter.compat.open import load_tokenizer
from levanter.inference.constraint import ConstraintError, ids_in
from levanter.inference.prompts import PromptReader, PromptRules
from levanter.inference.scheduler import Schedule
from levanter.serving.chat import PATH as CHAT
from levanter.serving.chat import parse_chat
from levanter.serving.completions import PATH as COMPLETIONS
from levanter.serving.completions import parse_completion
from levanter.serving.errors import MAX_MESSAGE, ApiError, json_bytes
from levanter.serving.request_parsing import MAX_CHOICES
from levanter.serving.responses import TokenStrings
from levanter.serving.tokenizer_endpoints import detokenize_body, tokenize_body, tokenize_conversations

CONTEXT, VOCABULARY, SECONDS = 64, 320, 8.0
USER = {"role": "user", "content": "hello"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"$ref": "#"}}}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}
SOUND: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [
        {"prompt": "hello", "max_tokens": 8, "stop": ["x"], "logit_bias": {"5": 1.5}, "logprobs": 2, "n": 3},
        {"prompt": [[5, 6], [7]], "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stream": True},
        {"prompt": "a", "regex": "[a-c]{1,4}", "max_tokens": 8},
        {"prompt": "a", "json_schema": {"type": "array", "items": {"enum": [1, 2]}}, "max_tokens": 8},
        {"prompt": "a", "grammar": 'start: "a" | "b" start', "max_tokens": 8},
    ],
    CHAT: [
        {"messages": [USER, {"role": "assistant", "content": "yes"}, USER], "max_tokens": 4, "user": "u"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": [TOOL], "max_tokens": 4},
        {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "max_tokens": 8},
        {"messages": [USER], "response_format": {"type": "json_object"}, "max_tokens": 8},
    ],
    "/tokenize": [{"prompt": "hello"}, {"messages": [USER], "tools": [TOOL], "return_token_strs": True}],
    "/detokenize": [{"tokens": [5, 6, 7]}],
    "/v1/tokens": [{"message_list": [[USER], [USER, USER]]}],
}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys or indices."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    inner = [place for key in keys for place in places(value[key])]
    return [*((value, key) for key in keys), *inner]


def senseless(dice: random.Random) -> Any:
    """A value that hardly any field takes."""
    deep: Any = 1
    for _ in range(dice.choice([3, 100, 240])):
        deep = [deep] if dice.random() < 0.7 else {"a": deep}
    large = dice.choice([300, 5_000, 60_000])
    return dice.choice([
        None, True, -1, 0, 10**30, 1e308, float("nan"), float("inf"), "", "\ud800", "\x00", "é" * large, [], {}, deep,
        [5] * large, ["a"] * large, [[5]] * large, {f"key {n}": n for n in range(large)}, "x" * 2_000_000, [[]],
    ])  # fmt: skip


def drawn_regex(dice: random.Random, depth: int = 0) -> str:
    kind = dice.random()
    if depth > 4 or kind < 0.3:
        return dice.choice(["a", "b", ".", r"\d", "[^a]", "é", "(", "[", "{3}", "a{1000}", r"\p{L}", "^", "$", r"\b"])
    inner = drawn_regex(dice, depth + 1)
    if kind < 0.6:
        return f"({inner}){dice.choice(['*', '+', '?', '{2,5}', '{100}', '{0,1000}', ''])}"
    return inner + dice.choice(["", "|"]) + drawn_regex(dice, depth + 1)


def drawn_schema(dice: random.Random, depth: int = 0) -> Any:
    if depth > 3 or dice.random() < 0.3:
        return dice.choice([
            {"type": "integer"}, {"type": "string", "maxLength": dice.choice([0, 5, 10**9])}, {"enum": [1, "a", None]},
            {"$ref": dice.choice(["#", "#/$defs/x", "#/properties/a", "nowhere"])}, {"const": {"$ref": "#"}}, 7, True,
            {"type": "string", "pattern": drawn_regex(dice)}, {"type": "nonsense"}, False,
            {"type": "array", "minItems": 10**6},
        ])  # fmt: skip
    parts = [drawn_schema(dice, depth + 1) for _ in range(dice.randrange(1, 4))]
    return dice.choice([
        {"type": "object", "properties": dict(zip("abc", parts, strict=False)), "$defs": {"x": parts[0]}},
        {"anyOf": parts}, {"allOf": parts}, {"type": "array", "items": parts[0]}, {"oneOf": parts}, {"not": parts[0]},
    ])  # fmt: skip


def drawn_body(dice: random.Random) -> tuple[str, bytes]:
    """A path, and a body for it."""
    path = dice.choice(sorted(SOUND))
    body = copy.deepcopy(dice.choice(SOUND[path]))
    for _ in range(dice.choice([0, 1, 1, 1, 2])):
        container, key = dice.choice(places(body))
        how = dice.choice(["value", "value", "name", "many", "regex", "schema"])
        if how == "name" and isinstance(container, dict):
            container[dice.choice(["nonsense", "x" * 70_000, "promt", "", "n", "best_of", "stop"])] = senseless(dice)
        elif how == "many" and isinstance(container, list):
            container *= dice.choice([100, 2_000])
        elif how == "regex" and path == COMPLETIONS:
            body["regex"] = drawn_regex(dice)
        elif how == "schema" and path in (COMPLETIONS, CHAT):
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": drawn_schema(dice)},
            }
        else:
            container[key] = senseless(dice)
    raw = json.dumps(body, ensure_ascii=dice.random() < 0.8).encode("utf-8", "surrogatepass")
    if dice.random() < 0.1:
        at = dice.randrange(len(raw))
        raw = dice.choice(
            [raw[:at], raw[:at] + bytes([dice.randrange(256)]) + raw[at + 1 :], raw[:-1] + b',"n":1,"n":2}']
        )
    return path, raw


def service(folder: Path) -> SimpleNamespace:
    """What reads requests of a service, without an engine."""
    schedule = Schedule(rows=2, pages=2, page_size=CONTEXT, context=CONTEXT, buckets=((1, 8),), fixed=True)
    rules = PromptRules(vocab_size=VOCABULARY, prompt_logprobs=True)
    reader = PromptReader(load_tokenizer(str(model_folder(folder / "tiny"))), schedule, rules)
    return SimpleNamespace(reader=reader, names=("tiny",), context=CONTEXT, chat_max_tokens=None)


def judge(path: str, raw: bytes, served: Any, dice: random.Random) -> list[str]:
    """Reads a body; what was wrong with how that went."""
    began, wrong = time.process_time(), list[str]()
    try:
        if path in (COMPLETIONS, CHAT):
            call = (parse_completion if path == COMPLETIONS else parse_chat)(raw, served)
            if sum(one.request.params.n for one in call.submitted) > MAX_CHOICES:
                wrong.append("more choices than a request may have")
            for request in (one.request for one in call.submitted):
                if request.params.max_tokens != 0 and len(request.tokens) + request.new_tokens(CONTEXT) > CONTEXT:
                    wrong.append("more tokens than the context has")
            wrong += _follow(call.submitted[0].request, dice)
        elif path == "/tokenize":
            tokenize_body(raw, served, TokenStrings(served.reader.tokenizer))
        elif path == "/detokenize":
            detokenize_body(raw, served)
        else:
            tokenize_conversations(raw, served)
    except ApiError as error:
        if not 400 <= error.status < 500 or not error.message:
            wrong.append(f"status {error.status}")
        if len(json_bytes(error.body)) > 8 * MAX_MESSAGE or "<state>" in error.message:
            wrong.append("a message that no client can show")
    except Exception as error:  # noqa: BLE001 - whatever else comes is the fault that is looked for
        wrong.append(f"{type(error).__name__}: {error!s:.200}")
    if (used := time.process_time() - began) > SECONDS:
        wrong.append(f"took {used:.1f} s of processor time")
    return wrong


def _follow(request: Any, dice: random.Random) -> list[str]:
    """Follows a constraint with random tokens; what is wrong with its error, if it has one."""
    if request.compiled is None:
        return []
    text = request.compiled.copy()
    try:
        for _ in range(12):
            ids = [i for i in ids_in(text.mask()) if i not in request.stop_ids]
            if not ids:
                break
            text.accept(dice.choice(ids))
    except ConstraintError as error:
        message = str(error)
        return [f"an error of several lines: {message!r:.200}"] if "\n" in message or len(message) > 400 else []
    return []
