"""The document of the interface: valid JSON schemas, which accept what is decoded and refuse what is not."""

import jsonschema
import pytest

from levanter.inference.params import ParamsError, params_of
from levanter.serving import openapi
from levanter.serving.bodies import ChatBody, CompletionBody
from levanter.serving.protocol import ProtocolError, decode, names_of

DOCUMENT = openapi.document("1.0")


def validator(name: str):
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator.check_schema(DOCUMENT["components"]["schemas"][name])
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", DOCUMENT["components"]["schemas"])
def test_every_field_is_described(name):
    validator(name)
    if name != "Error":
        properties = DOCUMENT["components"]["schemas"][name]["properties"]
        assert properties and all(each["description"] for each in properties.values())


BODIES = [
    ({"prompt": "a"}, True),
    ({"prompt": [1, 2], "n": 2, "stream": True, "stream_options": {"include_usage": True}}, True),
    ({"prompt": ["a", "b"], "stop": "x", "temperature": None, "logit_bias": {"5": -100}}, True),
    ({"prompt": [["a"]]}, False),
    ({}, False),
    ({"prompt": "a", "promt": "b"}, False),
    ({"prompt": "a", "temperature": -1}, False),
    ({"prompt": "a", "top_p": 0}, False),
    ({"prompt": "a", "n": 0}, False),
    ({"prompt": "a", "stop": [""]}, False),
    ({"prompt": "a", "logprobs": 21}, False),
    ({"prompt": "a", "stream_options": {"usage": True}}, False),
]


@pytest.mark.parametrize(("body", "good"), BODIES, ids=range(len(BODIES)))
def test_it_says_what_is_accepted(body, good):
    own = names_of(CompletionBody)
    try:
        decode(CompletionBody, {name: value for name, value in body.items() if name in own})
        params_of({name: value for name, value in body.items() if name not in own})
        accepted = True
    except (ProtocolError, ParamsError):
        accepted = False
    assert accepted == good == validator("CompletionBody").is_valid(body)


def test_paths_are_the_applications():
    from levanter.serving.app import ROUTES

    listed = {path for path in DOCUMENT["paths"]}
    assert listed == {route.path for route in ROUTES} - {"/openapi.json", "/v1/models/{name:path}"}
    assert names_of(ChatBody) <= DOCUMENT["components"]["schemas"]["ChatBody"]["properties"].keys()
