"""`response_format` with schemas of every kind, over HTTP: jsonschema says whether the answers conform."""

import json

import jsonschema
import openai
import pytest
from helpers.json_schemas import FEW, REFUSED, SCHEMAS
from tokenizers import Tokenizer

CLOSING = ('"', "}", "]")
CHECKED = ("date", "ipv4", "ipv6", "uuid")
"""Formats that the schemas name; jsonschema ignores one that it cannot check."""


def wanted(schema):
    # A model of random weights would fill its answer with spaces.
    dense = {**schema, "x-guidance": {"whitespace_flexible": False}}
    return {"type": "json_schema", "json_schema": {"name": "wanted", "schema": dense, "strict": True}}


@pytest.fixture(scope="module")
def closing(model):
    """What makes a model of random weights come to an end: biases for what closes strings, lists and objects."""
    tokenizer = Tokenizer.from_file(f"{model.plan.work.server.hf_checkpoint}/tokenizer.json")
    ids = [*(tokenizer.token_to_id(sign) for sign in CLOSING), 2]
    return {str(id): 6 for id in ids if id is not None}


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in SCHEMAS]
)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_answers_conform(client, closing, name, streamed):
    schema = SCHEMAS[name]
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    assert set(CHECKED) <= set(formats.checkers)
    validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
    seeds = range(2 if name in FEW else 4)
    ended = 0
    for seed in seeds:
        asked = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "a"}],
            "response_format": wanted(schema),
            "logit_bias": closing,
            "seed": seed,
            "max_tokens": 150,
        }
        if streamed:
            chunks = list(client.chat.completions.create(**asked, stream=True))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            (choice,) = client.chat.completions.create(**asked).choices
            text, reason = choice.message.content, choice.finish_reason
        assert reason in ("stop", "length"), reason
        if reason == "stop":
            ended += 1
            validator.validate(json.loads(text))
    assert ended, "no answer came to its end"


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_would_not_be_followed_is_refused(client, name):
    with pytest.raises(openai.BadRequestError, match="json_schema: "):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], response_format=wanted(REFUSED[name])
        )


def test_there_are_fifty():
    assert len(SCHEMAS) == 50 and set(FEW) <= set(SCHEMAS)
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
