"""`/v1/completions`, asked by OpenAI's own client over a port of this machine; `generate`'s engine is the oracle."""

import json

import httpx
import openai
import pytest
from openai.types.completion import Completion

PROMPTS = ["the cat sat", "def f(x):", "日本語 🙂", "a b c d e f g h"]


def test_what_is_there(client, server):
    (first, *_) = client.models.list().data
    assert first.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}
    away = httpx.get(f"{server.url}/v2/nothing")
    assert away.status_code == 404 and "/v1/completions" in away.json()["error"]["message"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stream_is_the_whole_text_in_pieces(client, prompt):
    asked = {"model": "tiny", "prompt": prompt, "temperature": 1.0, "seed": 5, "max_tokens": 24, "n": 2}
    whole = client.completions.create(**asked)
    assert isinstance(whole, Completion)
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices] and len(set(texts)) == 2
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage and usage is not None and usage.completion_tokens > 2


def test_what_is_wrong_is_said(client, server):
    with pytest.raises(openai.BadRequestError, match="temprature: not a field; did you mean `temperature`") as found:
        client.completions.create(model="tiny", prompt="a", extra_body={"temprature": 1})
    assert found.value.param == "temprature" and found.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="'tiny' is"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match=r"a prompt of 4 tokens and 500 new tokens .* context of 64"):
        client.completions.create(model="tiny", prompt=[5, 6, 7, 8], max_tokens=500)
    for body in (b"{", b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "\\ud83d"}', b"\xff{}", b"[]"):
        answer = httpx.post(f"{server.url}/v1/completions", content=body)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert json.loads(answer.content)["error"]["message"] == "the body: expected an object, got a list"
