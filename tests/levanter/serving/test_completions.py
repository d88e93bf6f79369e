"""`/v1/completions`, asked by OpenAI's own client over a port of this machine; `generate`'s engine is the oracle."""

import json
from typing import Any

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
    assert isinstance(whole, Completion) and whole._request_id == whole.id
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
    with pytest.raises(openai.BadRequestError, match=r"a prompt of 4 tokens and 500 new tokens .* context of 192"):
        client.completions.create(model="tiny", prompt=[5, 6, 7, 8], max_tokens=500)
    for body in (b"{", b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "\\ud83d"}', b"\xff{}", b"[]"):
        answer = httpx.post(f"{server.url}/v1/completions", content=body)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert json.loads(answer.content)["error"]["message"] == "the body: expected an object, got a list"


def test_prompts_are_scored_as_lm_eval_wants_them(server, model):
    """Several prompts of ids, echoed with log-probabilities and one token more: torch says what they are, and a token
    that is the likeliest has exactly the largest of the top ones."""
    import torch
    import transformers

    folder = model.plan.work.server.hf_checkpoint
    net: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [[5, 6, 7], list(range(20, 60)), [300, 2, 9, 9, 9]]
    with torch.no_grad():
        logits = [net(torch.tensor([ids])).logits[0] for ids in prompts]
    prompts = [[*ids, int(row[-1].argmax())] for ids, row in zip(prompts, logits, strict=True)]
    asked = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    answer = httpx.post(f"{server.url}/v1/completions", json={**asked, "model": "tiny"}, timeout=None).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for ids, row, choice in zip(prompts, logits, answer["choices"], strict=True):
        found = choice["logprobs"]
        scores = torch.log_softmax(row, -1)
        expected = [float(scores[n, id]) for n, id in enumerate(ids[1:])]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=2e-4)
        assert found["token_logprobs"][len(ids) - 1] == max(found["top_logprobs"][len(ids) - 1].values())
        best = scores.max(-1).values.tolist()
        tops = [max(each.values()) for each in found["top_logprobs"][1 : len(ids)]]
        assert tops == pytest.approx(best, abs=2e-4)
        lengths = {len(values) for values in found.values()}
        assert lengths in ({len(ids)}, {len(ids) + 1})
    streamed = httpx.post(f"{server.url}/v1/completions", json={**asked, "stream": True}, timeout=None)
    seen: dict[int, list] = {0: [], 1: [], 2: []}
    for line in streamed.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                seen[choice["index"]] += choice["logprobs"]["token_logprobs"]
    assert seen == {choice["index"]: choice["logprobs"]["token_logprobs"] for choice in answer["choices"]}


def test_a_prompt_alone_is_scored(client):
    answer = client.completions.create(model="tiny", prompt="the cat", max_tokens=0, echo=True, logprobs=0)
    (choice,) = answer.choices
    assert choice.text == "<s>the cat" and choice.finish_reason == "length" and answer.usage.completion_tokens == 0
    assert len(choice.logprobs.token_logprobs) == answer.usage.prompt_tokens == len(choice.logprobs.tokens)
    assert "".join(choice.logprobs.tokens) == choice.text
    unscored = client.completions.create(model="tiny", prompt="the cat", max_tokens=0, echo=True)
    assert unscored.choices[0].text == choice.text and unscored.choices[0].logprobs is None
    pieces = client.completions.create(model="tiny", prompt="the cat", max_tokens=0, echo=True, stream=True)
    assert [(piece.choices[0].text, piece.choices[0].finish_reason) for piece in pieces] == [("<s>the cat", "length")]
    starts = [0]
    for token in choice.logprobs.tokens[:-1]:
        starts.append(starts[-1] + len(token))
    assert choice.logprobs.text_offset == starts
