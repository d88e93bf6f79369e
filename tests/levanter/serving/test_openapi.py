"""The document of the interface: valid JSON schemas, which accept what is decoded and refuse what is not."""

import httpx
import jsonschema
import pytest

from levanter.inference.prompts import parse_constraint
from levanter.inference.requests import ParamsError, parse_params
from levanter.serving import openapi
from levanter.serving.request_parsing import ProtocolError, decode, field_names
from levanter.serving.request_schema import CONSTRAINT_NAMES, ChatBody, CompletionBody

DOCUMENT = openapi.document("1.0")


def validator(name: str):
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator.check_schema(DOCUMENT["components"]["schemas"][name])
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", DOCUMENT["components"]["schemas"])
def test_every_field_is_described(name):
    validator(name)
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
    ({"prompt": "a", "response_format": {"type": "text"}}, True),
    ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": None}}}, True),
    ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, False),
    ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": 5}}}, False),
    ({"prompt": "a", "response_format": {"type": "json"}}, False),
    ({"prompt": "a", "regex": 5}, False),
]


@pytest.mark.parametrize(("body", "good"), BODIES, ids=range(len(BODIES)))
def test_it_says_what_is_accepted(body, good):
    own, problems = field_names(CompletionBody), list[str]()
    parse_constraint(body, problems)
    try:
        decode(CompletionBody, {name: value for name, value in body.items() if name in own})
        parse_params({name: value for name, value in body.items() if name not in own | CONSTRAINT_NAMES})
        accepted = not problems
    except (ProtocolError, ParamsError):
        accepted = False
    assert accepted == good == validator("CompletionBody").is_valid(body)


def test_paths_are_the_applications(server):
    methods = {
        (route.path.replace("{name:path}", "{name}"), method.lower())
        for route in server.application.routes
        for method in route.methods - {"HEAD"}
    }
    listed = {(path, method) for path, said in DOCUMENT["paths"].items() for method in said}
    assert listed == methods
    assert field_names(ChatBody) <= DOCUMENT["components"]["schemas"]["ChatBody"]["properties"].keys()


MESSAGES = [{"role": "user", "content": "the cat sat"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"const": {}}}}
ASKED = [
    ("/v1/completions", {"prompt": "the cat", "max_tokens": 4}, 200),
    ("/v1/completions", {"prompt": ["the", "a"], "n": 2, "logprobs": 2, "echo": True, "max_tokens": 4}, 200),
    ("/v1/completions", {"prompt": [5, 6, 7], "logprobs": 0, "echo": True, "max_tokens": 0}, 200),
    ("/v1/completions", {"prompt": "a", "stop": "e", "max_tokens": 30, "seed": 5}, 200),
    ("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 3}, 200),
    ("/v1/completions", {"prompt": "a", "promt": 3}, 400),
    ("/v1/completions", {"prompt": "a", "model": "another"}, 404),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}, 200),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 3, "n": 2}, 200),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "stream": True}, 200),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "max_tokens": 90}, 200),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/tokens", {"message_list": [MESSAGES, MESSAGES]}, 200),
    ("/tokenize", {"prompt": "the cat", "return_token_strs": True}, 200),
    ("/tokenize", {"messages": MESSAGES}, 200),
    ("/detokenize", {"tokens": [5, 6]}, 200),
    ("/detokenize", {"tokens": [5_000]}, 400),
    ("/v1/models/tiny", None, 200),
    ("/v1/models/another", None, 404),
    *((path, None, 200) for path, said in DOCUMENT["paths"].items() if "get" in said and "{" not in path),
]


@pytest.mark.parametrize(("path", "body", "status"), ASKED, ids=range(len(ASKED)))
def test_answers_are_what_it_says(server, path, body, status):
    with httpx.Client(base_url=server.url) as http:
        answer = http.get(path) if body is None else http.post(path, json=body)
    assert answer.status_code == status, answer.text
    listed = "/v1/models/{name}" if path.startswith("/v1/models/") else path
    said = DOCUMENT["paths"][listed]["get" if body is None else "post"]["responses"][str(status)]["content"]
    schema = said[answer.headers["content-type"]]["schema"]
    value = answer.json() if answer.headers["content-type"] == "application/json" else answer.text
    whole = {**schema, "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)
