"""LiteLLM against a server: completions, conversations, streams, tools.

It brings packages of its own, so it has an extra: `pip install -e ".[clients]"`.
"""

import json
import os
from typing import Any

import pytest

# Else it asks its own site for prices of models.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
litellm: Any = pytest.importorskip("litellm", reason="LiteLLM is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

USER = [{"role": "user", "content": "the cat sat"}]
SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": ["on", "off"]}},
    "required": ["x"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TOOL = {"type": "function", "function": {"name": "switch", "description": "it does", "parameters": SCHEMA}}


@pytest.fixture
def where(server):
    return {"api_base": f"{server.url}/v1", "api_key": "none"}


def test_a_conversation(where, client):
    asked: Any = {"messages": USER, "seed": 7, "max_tokens": 12, "temperature": 0.8}
    expected = client.chat.completions.create(model="tiny", **asked).choices[0]
    whole = litellm.completion(model="openai/tiny", **asked, **where)
    assert whole.choices[0].message.content == expected.message.content
    assert whole.choices[0].finish_reason == expected.finish_reason and whole.usage.completion_tokens > 0
    chunks = list(litellm.completion(model="openai/tiny", stream=True, **asked, **where))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.message.content
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason


def test_a_completion(where, client):
    asked: Any = {"prompt": "the cat", "seed": 7, "max_tokens": 12}
    expected = client.completions.create(model="tiny", **asked).choices[0].text
    whole = litellm.text_completion(model="text-completion-openai/tiny", **asked, **where)
    assert whole.choices[0].text == expected
    chunks = list(litellm.text_completion(model="text-completion-openai/tiny", stream=True, **asked, **where))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == expected


def test_tools(where):
    pytest.importorskip("mcp", reason="LiteLLM imports it where there are tools")
    named = {"type": "function", "function": {"name": "switch"}}
    asked: Any = {"messages": USER, "tools": [TOOL], "tool_choice": named, "seed": 3, "max_tokens": 40}
    (call,) = litellm.completion(model="openai/tiny", **asked, **where).choices[0].message.tool_calls
    assert call.function.name == "switch" and json.loads(call.function.arguments)["x"] in ("on", "off")
    chunks = list(litellm.completion(model="openai/tiny", stream=True, **asked, **where))
    built = litellm.stream_chunk_builder(chunks, messages=USER)
    (streamed,) = built.choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)


def test_a_schema(where):
    wanted = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA, "strict": True}}
    found = litellm.completion(
        model="openai/tiny", messages=USER, response_format=wanted, seed=1, max_tokens=40, **where
    )
    assert json.loads(found.choices[0].message.content)["x"] in ("on", "off")


def test_what_is_wrong_is_said(where):
    with pytest.raises(litellm.ContextWindowExceededError, match="context of 192"):
        litellm.completion(model="openai/tiny", messages=USER, max_tokens=500, **where)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(model="openai/tiny", messages=USER, temperature=-3, **where)
