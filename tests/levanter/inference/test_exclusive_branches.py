"""`oneOf` that is followed as `anyOf`: only where both mean the same, over drawn schemas; jsonschema is the judge."""

import json
import random

import jsonschema
import pytest
from helpers.small_byte_level import byte_level

from levanter.inference.constraint import ConstraintError, Constraints
from levanter.inference.exclusive_branches import ADVICE, coerce_exclusive_branches
from levanter.inference.requests import ConstraintSpec

pytestmark = pytest.mark.quick

TOKENIZER = byte_level()
TAGS = ["a", "b", "c", 1, 1.0, 2, True, None]
SCALARS = [None, True, False, -1, 0, 1, 1.0, 2, 2.5, 7, "", "a", "b", "ab"]


def values() -> list:
    """Values of every kind, with every tag."""
    objects = [{}, {"n": 1}]
    for tag in TAGS:
        objects += [{"k": tag}, {"k": tag, "n": 1}, {"k": tag, "t": "a"}, {"t": tag}, {"k": "a", "t": tag}]
    return [*SCALARS, [], [1], ["a"], *objects]


VALUES = values()


def constants(dice: random.Random) -> dict:
    drawn = dice.sample(TAGS, dice.randrange(1, 3))
    return dice.choice([{"const": drawn[0]}, {"enum": drawn}, {"$ref": f"#/$defs/e{dice.randrange(3)}"}])


def tagged(dice: random.Random) -> dict:
    names = dice.choice([["k"], ["k"], ["t"], ["k", "t"]])
    branch: dict = {"properties": {name: constants(dice) for name in names}}
    if dice.random() < 0.9:
        branch["required"] = names
    if dice.random() < 0.9:
        branch["type"] = dice.choice(["object", "object", ["object", "null"]])
    return {"allOf": [branch], "properties": {"n": {}}} if dice.random() < 0.1 else branch


def branch(dice: random.Random) -> object:
    kind = dice.randrange(10)
    if kind < 5:
        return tagged(dice)
    if kind == 5:
        return {"$ref": f"#/$defs/o{dice.randrange(3)}"}
    if kind == 6:
        return {"const": dice.choice(SCALARS)}
    if kind == 7:
        return {"type": dice.choice(["string", "null", "integer", "number", "array", "boolean", ["string", "null"]])}
    if kind == 8:
        low = dice.randrange(-1, 6)
        return {"type": "integer", "minimum": low, "maximum": low + dice.randrange(3)}
    return dice.choice([True, False, {}, {"minLength": 1}, {"enum": ["a", [1]]}])


def drawn_schema(seed: int) -> dict:
    dice = random.Random(f"branches {seed}")
    defs = {**{f"e{n}": {"enum": [dice.choice(TAGS)]} for n in range(3)}, **{f"o{n}": tagged(dice) for n in range(3)}}
    one_of = {"oneOf": [branch(dice) for _ in range(dice.randrange(1, 4))]}
    if dice.random() < 0.2:
        one_of["anyOf"] = [branch(dice) for _ in range(2)]
    schema = one_of if dice.random() < 0.6 else {"properties": {"n": one_of, "oneOf": {"const": {"oneOf": []}}}}
    return {"$defs": defs, **schema}


def conforming(schema) -> list[bool]:
    validator = jsonschema.Draft202012Validator(schema)
    return [validator.is_valid(value) for value in VALUES]


def branch_lists(schema) -> int:
    """The number of lists of branches in a schema, outside of data."""
    if isinstance(schema, list):
        return sum(map(branch_lists, schema))
    if not isinstance(schema, dict):
        return 0
    inner = sum(branch_lists(value) for key, value in schema.items() if key not in ("const", "enum"))
    return inner + isinstance(schema.get("oneOf"), list)


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 500), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_drawn_branches(seeds):
    """No value conforms to the one and not to the other; where none conforms to two branches, nearly all are found."""
    rewritten = exclusive = 0
    for seed in seeds:
        schema = drawn_schema(seed)
        result = json.loads(coerce_exclusive_branches(json.dumps(schema)))
        assert conforming(result) == conforming(schema), schema
        one_of = schema if "oneOf" in schema else schema["properties"]["n"]
        conformity = [conforming({"$defs": schema["$defs"], "allOf": [one]}) for one in one_of["oneOf"]]
        excluded = all(sum(column) <= 1 for column in zip(*conformity, strict=True))
        exclusive += excluded
        rewritten += branch_lists(result) == 0
        # What is rewritten has no value in two branches.
        assert excluded or branch_lists(result) == 1, schema
    assert exclusive > len(seeds) / 4 and rewritten > 0.75 * exclusive, (exclusive, rewritten)


@pytest.fixture(scope="module")
def constraints():
    pytest.importorskip("llguidance")
    return Constraints(TOKENIZER.definition, vocab_size=TOKENIZER.vocab_size, ends=[TOKENIZER.vocab_size - 1])


def follows(constraints: Constraints, schema: dict, value: object) -> bool:
    """Whether a text is followed to its end."""
    constraint = constraints.start(ConstraintSpec(kind="json_schema", text=json.dumps(schema)))
    try:
        for id in TOKENIZER.encode_batch([json.dumps(value)])[0].tolist():
            constraint.accept(id)
    except ConstraintError:
        return False
    return constraint.complete


def union(**tags) -> dict:
    """A discriminated union as pydantic writes it."""
    defs = {
        name: {
            "title": name,
            "type": "object",
            "properties": {"kind": {"const": tag, "default": tag, "type": "string"}, "size": {"type": "integer"}},
            "required": ["kind", "size"],
        }
        for name, tag in tags.items()
    }
    mapping = {tag: f"#/$defs/{name}" for name, tag in tags.items()}
    pet = {
        "discriminator": {"mapping": mapping, "propertyName": "kind"},
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in tags],
    }
    return {"$defs": defs, "type": "object", "properties": {"pet": pet}, "required": ["pet"]}


def test_a_discriminated_union_is_followed(constraints):
    schema = union(Cat="cat", Dog="dog", Cow="cow")
    for tag, expected in (("cat", True), ("cow", True), ("pig", False)):
        assert follows(constraints, schema, {"pet": {"kind": tag, "size": 3}}) == expected
    ranges = {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4, "maximum": 9}]}
    assert follows(constraints, ranges, 9) and not follows(constraints, ranges, 10)


@pytest.mark.parametrize(
    "schema",
    [
        union(Cat="cat", Dog="cat"),
        {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 5}, {"type": "integer", "minimum": 3, "maximum": 9}]},
        {"$defs": {"a": {"oneOf": [{"type": "string"}, {"minLength": 1}]}}, "$ref": "#/$defs/a"},
    ],
)
def test_branches_that_overlap_are_refused_with_what_to_write(constraints, schema):
    with pytest.raises(ConstraintError) as info:
        constraints.start(ConstraintSpec(kind="json_schema", text=json.dumps(schema)))
    assert str(info.value) == f"json_schema: {ADVICE}"
