"""`/v1/chat/completions`, asked by OpenAI's own client, synchronous and not; torch says how likely tokens are."""

import asyncio
import json
import math
from typing import Any

import jsonschema
import openai
import pytest
from helpers.served import TEMPLATE
from openai.types.chat import ChatCompletion

USER = [{"role": "user", "content": "the cat sat"}]
SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": ["on", "off"]}, "n": {"enum": [1, 2, 3]}},
    "required": ["x", "n"],
    "additionalProperties": False,
    # A model of random weights would fill its answer with spaces.
    "x-guidance": {"whitespace_flexible": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "it does", "parameters": SCHEMA}}
    for name in ("switch", "look")
]
ARRAY = {"x-guidance": {"whitespace_flexible": False}}


def joined(chunks) -> dict[str, Any]:
    """What a stream of chunks says, as one message."""
    found: dict[str, Any] = {"content": "", "calls": {}, "reason": None, "tokens": []}
    for chunk in chunks:
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                own = found["calls"].setdefault(call.index, {"name": "", "arguments": ""})
                own["name"] += call.function.name or ""
                own["arguments"] += call.function.arguments or ""
            if choice.logprobs is not None:
                found["tokens"] += [(each.token, each.logprob) for each in choice.logprobs.content or ()]
            found["reason"] = choice.finish_reason or found["reason"]
    return found


def test_an_answer_is_the_same_in_one_piece_and_in_many(client):
    asked: Any = {"model": "tiny", "messages": USER, "seed": 11, "max_tokens": 20, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked)
    assert isinstance(whole, ChatCompletion)
    (choice,) = whole.choices
    said = joined(client.chat.completions.create(**asked, stream=True))
    assert said["content"] == choice.message.content and said["reason"] == choice.finish_reason
    tokens = choice.logprobs.content
    assert said["tokens"] == [(each.token, each.logprob) for each in tokens]
    assert all(len(each.top_logprobs) == 3 for each in tokens)
    assert b"".join(bytes(each.bytes) for each in tokens).decode("utf-8", "replace") == choice.message.content
    newer = client.chat.completions.create(**{**asked, "max_tokens": None}, max_completion_tokens=20)
    assert newer.choices[0].message.content == choice.message.content


def test_log_probabilities_are_the_models(client, model):
    import tokenizers
    import torch
    import transformers

    folder = model.plan.work.server.hf_checkpoint
    net: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    of_file = transformers.PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json", bos_token="<s>", eos_token="</s>"
    )
    prompt = of_file.apply_chat_template(USER, chat_template=TEMPLATE, add_generation_prompt=True, return_dict=False)
    answer = client.chat.completions.create(
        model="tiny", messages=USER, temperature=0, max_tokens=10, logprobs=True, top_logprobs=5
    )
    assert answer.usage.prompt_tokens == len(prompt)
    made = answer.choices[0].logprobs.content
    names = {tokenizer.id_to_token(n): n for n in range(tokenizer.get_vocab_size())}
    letters = {byte: sign for sign, byte in _alphabet().items()}
    ids = [names["".join(letters[byte] for byte in each.bytes)] for each in made]
    with torch.no_grad():
        logits = net(torch.tensor([[*prompt, *ids]])).logits[0]
    for n, (each, id) in enumerate(zip(made, ids, strict=True)):
        scores = torch.log_softmax(logits[len(prompt) + n - 1], -1)
        assert math.isclose(scores[id], each.logprob, abs_tol=2e-4)
        best = scores.topk(5).values.tolist()
        assert [one.logprob for one in each.top_logprobs] == pytest.approx(best, abs=2e-4)
        assert each.logprob == each.top_logprobs[0].logprob


def _alphabet() -> dict[str, int]:
    """GPT-2's signs for bytes, as transformers has them."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {sign: byte for byte, sign in bytes_to_unicode().items()}


def test_a_schema_is_conformed_to(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model="tiny", messages=USER, response_format=wanted, seed=seed, max_tokens=40
        )
        jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
        assert answer.choices[0].finish_reason == "stop"


def test_a_tool_that_is_named_is_called(client):
    asked: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "seed": 3, "max_tokens": 40}
    named = {"type": "function", "function": {"name": "look"}}
    whole = client.chat.completions.create(**asked, tool_choice=named).choices[0]
    (call,) = whole.message.tool_calls
    assert call.function.name == "look" and whole.message.content is None
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    said = joined(client.chat.completions.create(**asked, tool_choice=named, stream=True))
    assert said["calls"] == {0: {"name": "look", "arguments": call.function.arguments}} and said["content"] == ""


def test_some_tool_is_called_where_one_is_required(client):
    asked: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": "required", "max_tokens": 44}
    for seed in range(2):
        whole = client.chat.completions.create(**asked, seed=seed, parallel_tool_calls=False).choices[0]
        said = joined(client.chat.completions.create(**asked, seed=seed, parallel_tool_calls=False, stream=True))
        if whole.finish_reason == "length":
            assert whole.message.tool_calls is None and said["content"] == whole.message.content
            continue
        (call,) = whole.message.tool_calls
        assert whole.finish_reason == said["reason"] == "tool_calls"
        assert call.function.name in ("switch", "look")
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        assert said["calls"] == {0: {"name": call.function.name, "arguments": call.function.arguments}}


def test_a_conversation_with_calls_is_written_by_the_template(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"x": "on"}'}}
    told = [
        {"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "on"},
    ]
    answer = client.post(
        "/../tokenize", body={"messages": told, "tools": TOOLS, "return_token_strs": True}, cast_to=object
    )
    text = "".join(answer["token_strs"])
    assert text == (
        "<s>user:the\ncat</s><s>assistant: calls look(on)</s><s>tool:on</s> may call switch may call lookassistant:"
    )
    spoken = client.chat.completions.create(model="tiny", messages=told, tools=TOOLS, max_tokens=3)
    assert spoken.usage.prompt_tokens == answer["count"]
    upstreams = client.post("/tokens", body={"message_list": [USER]}, cast_to=object)
    own = client.post("/../tokenize", body={"messages": USER}, cast_to=object)
    assert upstreams["results"] == [{"tokens": own["tokens"]}]


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"messages": [{"role": "robot", "content": "a"}]}, r"refuses these messages at its line 3 \(no robots\)"),
        ({"messages": []}, "messages: expected at least one"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content: missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"content\[0\].type: expected 'text'"),
        ({"max_tokens": 500}, r"a prompt of \d+ tokens and 500 new tokens .* context of 192"),
        ({"top_logprobs": 2}, "top_logprobs: needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: must be from 0 to 20, got 21"),
        ({"extra_body": {"mesages": 1}}, "mesages: not a field; did you mean `messages`"),
        ({"extra_body": {"best_of": 4}}, "best_of: refused; sample `n` choices"),
        ({"extra_body": {"echo": True}}, "echo: only for /v1/completions"),
        ({"extra_body": {"metadata": {"a": "b"}}}, "metadata: not supported"),
        ({"tool_choice": "required"}, "tool_choice: there are no `tools`"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "lok"}}}, "'lok' is none of switch"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, r"tools\[1\].function.name: 'switch' is the name of an earlier tool"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice: a required call cannot have another constraint",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options: only for a stream"),
    ],
)
def test_what_cannot_be_answered_is_said(client, more, match):
    asked = {"model": "tiny", "messages": USER, **more}
    with pytest.raises(openai.BadRequestError, match=match):
        client.chat.completions.create(**asked)


def test_many_at_once_are_answered_as_one_at_a_time(client, server):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:

            async def one(n: int) -> str:
                asked: Any = {"model": "tiny", "messages": USER, "seed": n, "max_tokens": 6 + n}
                if n % 2:
                    return (await found.chat.completions.create(**asked)).choices[0].message.content or ""
                pieces = await found.chat.completions.create(**asked, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in pieces])

            return await asyncio.gather(*(one(n) for n in range(12)))

    texts = asyncio.run(ask())
    for n, text in enumerate(texts):
        alone = client.chat.completions.create(model="tiny", messages=USER, seed=n, max_tokens=6 + n)
        assert alone.choices[0].message.content == text
