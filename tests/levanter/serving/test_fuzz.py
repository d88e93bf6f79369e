"""Bodies that make no sense, or nearly: each is read, or refused with what is wrong; nothing else comes of any."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
from helpers.served import model_folder
from hypothesis import strategies as st

from levanter.compat.open import load_tokenizer
from levanter.inference.prompts import PromptReader, PromptRules
from levanter.inference.requests import SamplingParams, params_to_json
from levanter.inference.scheduler import Schedule
from levanter.serving.chat import parse_chat
from levanter.serving.completions import parse_completion
from levanter.serving.errors import ApiError, json_bytes
from levanter.serving.request_parsing import field_names
from levanter.serving.request_schema import CONSTRAINT_NAMES, NEUTRAL_VALUES, ChatBody, CompletionBody
from levanter.serving.responses import TokenStrings
from levanter.serving.tokenizer_endpoints import detokenize_body, tokenize_body, tokenize_conversations

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 400),
    st.floats(allow_nan=True),
    st.text(max_size=8),
    st.sampled_from(["", "a", "user", "assistant", "auto", "required", "function", "text", "json_object", "\ud800"]),
)
KEYS = st.sampled_from(
    [
        *("role", "content", "type", "text", "name", "function", "arguments", "parameters", "schema", "json_schema"),
        *("tool_calls", "id", "include_usage", "5", "properties", "x"),
    ]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
NAMES = sorted(
    field_names(ChatBody)
    | field_names(CompletionBody)
    | CONSTRAINT_NAMES
    | set(NEUTRAL_VALUES)
    | set(params_to_json(SamplingParams()))
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "robot"]), "content": st.text(max_size=8) | VALUES},
    optional={"tool_calls": VALUES, "name": VALUES},
)
TOOL = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": st.text("ab", max_size=2)})}
)
SCHEMA = st.fixed_dictionaries(
    {"type": st.just("json_schema"), "json_schema": st.fixed_dictionaries({"schema": VALUES})}
)
TEXT = st.text(max_size=8)
OFTEN = {
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "temperature": st.floats(0, 2),
    "max_tokens": st.integers(1, 40),
    "stream": st.booleans(),
}
SELDOM = {
    "response_format": SCHEMA,
    "regex": st.text("ab()[]*+?{}|\\", max_size=8),
    "tools": st.lists(TOOL, max_size=3),
}
SELDOM |= {
    "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "a"}}])
}
PROMPT = TEXT | st.lists(st.integers(0, 319), max_size=4) | st.lists(TEXT, max_size=3)
PLAIN = st.fixed_dictionaries({"prompt": PROMPT}, optional=OFTEN) | st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=3)}, optional=OFTEN
)
WILD = st.dictionaries(st.sampled_from(sorted(NAMES)) | st.text(max_size=5), VALUES, max_size=2)
BODIES = PLAIN | st.tuples(PLAIN, st.fixed_dictionaries({}, optional=SELDOM), WILD).map(
    lambda given: {**given[0], **given[1], **given[2]}
)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """What reads requests of a service; nothing is asked of an engine."""
    folder = model_folder(tmp_path_factory.mktemp("fuzz") / "tiny")
    schedule = Schedule(rows=2, pages=2, page_size=64, context=64, buckets=((1, 8),), fixed=True)
    rules = PromptRules(vocab_size=320, prompt_logprobs=True)
    reader = PromptReader(load_tokenizer(str(folder)), schedule, rules)
    return SimpleNamespace(reader=reader, names=("tiny",), context=64, chat_max_tokens=None)


def refusal(read: Callable[[], object]) -> ApiError | None:
    """Why a body was refused; None where it was read."""
    try:
        read()
    except ApiError as error:
        return error
    return None


def check(body: Any, service) -> int:
    """Reads a body in every way; how many of them took it."""
    raw, texts = json.dumps(body).encode(), TokenStrings(service.reader.tokenizer)
    found = [
        refusal(lambda: parse_completion(raw, service)),
        refusal(lambda: parse_chat(raw, service)),
        refusal(lambda: tokenize_body(raw, service, texts)),
        refusal(lambda: detokenize_body(raw, service)),
        refusal(lambda: tokenize_conversations(raw, service)),
    ]
    for error in found:
        assert error is None or (400 <= error.status < 500 and error.message and json_bytes(error.body))
    return found.count(None)


@pytest.mark.parametrize("count", [150, pytest.param(4_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_whatever_is_asked_is_read_or_refused(service, count):
    taken = []

    @hypothesis.settings(max_examples=count, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(BODIES)
    def run(body):
        taken.append(check(body, service))

    run()
    assert sum(map(bool, taken)) > count // 20
