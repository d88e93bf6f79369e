"""Calls of tools in texts that were written freely."""

import json
import random
from collections import Counter

import jsonschema
import openai
import pytest
from helpers.small_byte_level import byte_level

from levanter.inference.constraint import ConstraintError, Constraints
from levanter.serving.chat import ToolCall, ToolRules, embedded_schema
from levanter.serving.request_schema import Function, Tool

pytestmark = pytest.mark.quick

LOOK = Tool(type="function", function=Function(name="look"))
RULES = ToolRules(mode="auto", tools=(LOOK,))
CALL = ToolCall(name="look", arguments='{"at": "日本"}')


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "look", "arguments": {"at": "日本"}}', (CALL,)),
        (' {"name": "look", "parameters": {"at": "日本"}}\n', (CALL,)),
        (
            '[{"name": "look", "arguments": {"at": "日本"}}, {"name": "look", "arguments": {"at": "日本"}}]',
            (CALL, CALL),
        ),
        ('<tool_call>\n{"name": "look", "arguments": {"at": "日本"}}\n</tool_call>\n', (CALL,)),
        ('<tool_call>{"name": "look", "arguments": {"at": "日本"}}</tool_call>' * 2, (CALL, CALL)),
        ('{"name": "look", "arguments": {}}', (ToolCall(name="look", arguments="{}"),)),
        ('{"name": "leave", "arguments": {}}', ()),
        ('{"name": "look", "arguments": "x"}', ()),
        ('{"name": ["look"], "arguments": {}}', ()),
        ('{"name": "look"', ()),
        ('I call {"name": "look", "arguments": {}}', ()),
        ('<tool_call>{"name": "look", "arguments": {}}</tool_call> and so on', ()),
        ("[]", ()),
        ("", ()),
        ("[" * 100_000, ()),
    ],
)
def test_a_text_that_is_calls_as_a_whole(text, calls):
    assert RULES.calls_in(text) == calls


@pytest.mark.parametrize(
    ("beginning", "may"),
    [("", True), (" \n", True), ("<tool", True), ("<tool_call>{", True), ("{", True), ("The", False), ("<b>", False)],
)
def test_what_may_still_become_a_call_is_held_back(beginning, may):
    assert RULES.may_be_call(beginning) == may
    assert not ToolRules().may_be_call(beginning)


POINTERS = ("#", "#/$defs/leaf", "#/$defs/node", "#/definitions/old", "#/properties/kind", "#/components/schemas/part")


def drawn_schema(rng: random.Random, depth: int = 0, *, is_target: bool = False) -> dict[str, object]:
    """A schema that refers to parts of its document, and has names and data that look as if they did.

    What is referred to is a list or an object, so that no circle of references is without a part of the value.
    """
    kind = rng.choice([0.6, 0.9]) if is_target else rng.random()
    if kind < 0.25:
        return {"$ref": rng.choice(POINTERS)}
    if kind < 0.35:
        return {"const": {"$ref": "#/$defs/leaf"}} if rng.random() < 0.5 else {"enum": [{"$ref": "#"}, 1, "a"]}
    if depth > 2 or kind < 0.5:
        return {"type": rng.choice(["integer", "string", "null", "boolean"])}
    if kind < 0.65:
        return {"type": "array", "items": drawn_schema(rng, depth + 1), "maxItems": 2}
    if kind < 0.75:
        return {"anyOf": [drawn_schema(rng, depth + 1) for _ in range(2)]}
    names = rng.sample(["a", "b", "$ref", "const", "properties", "default"], rng.randrange(1, 4))
    properties = {name: drawn_schema(rng, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": rng.sample(names, 1)}


def drawn_document(rng: random.Random) -> dict[str, object]:
    object_schema = {
        "type": "object",
        "properties": {"kind": drawn_schema(rng, 1, is_target=True), "b": drawn_schema(rng, 1)},
    }
    return {
        **object_schema,
        "$schema": "http://json-schema.org/draft-07/schema#",
        "default": {"$ref": "#/$defs/leaf"},
        "$defs": {"leaf": {"type": "integer"}, "node": drawn_schema(rng, 1, is_target=True)},
        "definitions": {"old": {"type": "string"}},
        "components": {"schemas": {"part": {"type": "array", "items": {"$ref": "#/$defs/leaf"}}}},
    }


def drawn_value(rng: random.Random, depth: int = 0) -> object:
    kind = rng.random()
    if depth > 3 or kind < 0.5:
        return rng.choice([1, 2, "a", None, True, {"$ref": "#/$defs/leaf"}, {"$ref": "#"}, [1]])
    if kind < 0.65:
        return [drawn_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {name: drawn_value(rng, depth + 1) for name in rng.sample(["a", "b", "kind", "$ref", "const"], 2)}


def conforms(schema: object, value: object) -> bool:
    """By the package jsonschema."""
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_parameters_mean_the_same_inside_a_constraint():
    """References of a tool's parameters are to its own document, wherever it is embedded."""
    verdicts = Counter()
    for seed in range(60):
        rng = random.Random(seed)
        documents = [drawn_document(rng) for _ in range(2)]
        tools = tuple(
            Tool(type="function", function=Function(name=f"f{n}", parameters=document))
            for n, document in enumerate(documents)
        )
        constraint = ToolRules(mode="required", tools=tools).constraint
        schema = json.loads(constraint.text)
        for _ in range(8):
            n, value = rng.randrange(2), drawn_value(rng)
            expected = conforms(documents[n], value)
            verdicts[expected] += 1
            assert conforms(schema, [{"name": f"f{n}", "arguments": value}]) == expected, (documents[n], value)
            # A list of calls is not the value of a recursive parameter.
            assert not conforms(schema, {"name": f"f{n}", "arguments": value})
    assert min(verdicts.values()) > 50


class Node(openai.BaseModel):
    """A model of pydantic that refers to itself."""

    value: int
    next: "Node | None" = None


@pytest.mark.parametrize("named", [False, True])
def test_pydantic_models_constrain_their_calls(named):
    """Models refer to `#/$defs`: a 400 before, because the definitions were not at the root of the constraint."""
    pytest.importorskip("llguidance")
    assert "$defs" in Node.model_json_schema()
    tokenizer = byte_level()
    constraints = Constraints(tokenizer.definition, vocab_size=300, ends=[tokenizer.vocab_size - 1])
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
    tools = tuple(
        Tool(type="function", function=Function(name=name, parameters=parameters))
        for name, parameters in (("walk", Node.model_json_schema()), ("tree", {**tree, "additionalProperties": False}))
    )
    rules = ToolRules(mode="named" if named else "required", tools=tools[:1] if named else tools)
    started = constraints.start(rules.constraint)

    def fits(text: str) -> bool:
        one = started.copy()
        try:
            for id in tokenizer.encode_batch([text])[0].tolist():
                one.accept(id)
        except ConstraintError:
            return False
        return one.complete

    chain = '{"value": 3, "next": {"value": 4, "next": null}}'
    if named:
        assert fits(chain) and not fits('{"value": 3, "next": {"value": "x"}}')
        return
    assert fits(f'[{{"name": "walk", "arguments": {chain}}}]')
    assert fits('[{"name": "tree", "arguments": {"kids": [{"kids": []}]}}]')
    assert not fits('[{"name": "tree", "arguments": {"kids": [[{"name": "tree", "arguments": {}}]]}}]')
    assert not fits('[{"name": "walk", "arguments": {"value": 3, "next": [{}]}}]')


def test_a_document_that_refers_to_itself_by_its_name():
    schema = {"$id": "https://x.example/a.json", "properties": {"b": {"$ref": "https://x.example/a.json#/$defs/c"}}}
    schema |= {"items": {"$ref": "https://x.example/a.json"}, "contains": {"$ref": "https://x.example/a.json/other"}}
    assert embedded_schema(schema, "#/$defs/t") == {
        "properties": {"b": {"$ref": "#/$defs/t/$defs/c"}},
        "items": {"$ref": "#/$defs/t"},
        "contains": {"$ref": "https://x.example/a.json/other"},
    }
