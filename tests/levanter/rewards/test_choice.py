"""The list of rewards: weights, truncated answers, bounds, names; texts, lengths and JSON by other judges."""

import json
import random
from dataclasses import dataclass

import numpy as np
import pytest

from levanter.config import ConfigError, parse_text
from levanter.rewards import (
    ExactRewardConfig,
    JsonSchemaRewardConfig,
    LengthRewardConfig,
    OverlongRewardConfig,
    RegexRewardConfig,
    RewardConfig,
    RewardError,
    RewardInput,
    Rewards,
    overlong_penalty,
)


def sample(answer, /, *, tokens=3, finish="stop", **row):
    return RewardInput(prompt="?", answer=answer, ids=tuple(range(tokens)), finish=finish, row=row)


def values(config, *samples):
    with Rewards([config]) as rewards:
        return rewards.score(samples).values[config.label].tolist()


def test_exact_texts():
    samples = [sample(text, answer=right) for text, right in ((" yes\n", "yes"), ("Yes", "yes"), ("b", ["a", "b"]))]
    assert values(ExactRewardConfig(), *samples) == [1, 0, 1]
    assert values(ExactRewardConfig(ignore_case=True), *samples) == [1, 1, 1]
    # A number in the data set is compared as its text.
    assert values(ExactRewardConfig(column="n"), sample("7", n=7)) == [1]


def test_regular_expressions():
    samples = [sample(text, right="5") for text in ("it is <5>", "it is <6>", "<5> and more", "5")]
    assert values(RegexRewardConfig(pattern="<.>"), *samples) == [1, 1, 1, 0]
    assert values(RegexRewardConfig(pattern=".*<.>", match="full"), *samples) == [1, 1, 0, 0]
    assert values(RegexRewardConfig(pattern="<(.)>", column="right"), *samples) == [1, 0, 1, 0]
    assert values(RegexRewardConfig(pattern="^[0-9]", column="right"), *samples) == [0, 0, 0, 1]
    with pytest.raises(RewardError, match="no column 'wrong'; its columns: right"):
        values(RegexRewardConfig(pattern="it", column="wrong"), *samples)


def test_lengths():
    samples = [sample("", tokens=n) for n in (1, 5, 9, 12)]
    assert values(LengthRewardConfig(at_most=9), *samples) == [1, 1, 1, 0]
    assert values(LengthRewardConfig(at_least=5), *samples) == [0, 1, 1, 1]
    assert values(OverlongRewardConfig(max_tokens=12, soft=4), *samples) == [0, 0, -0.25, -1]
    # The formula of the paper (DAPO, equation 13) in its own words.
    for length in range(1, 130):
        expected = 0 if length <= 100 - 20 else (100 - 20 - length) / 20 if length <= 100 else -1
        assert abs(overlong_penalty(length, max_tokens=100, soft=20) - expected) < 1e-12


def test_truncated_answers_are_worth_nothing_unless_the_reward_is_about_that():
    samples = [sample("a", answer="a", finish=finish, tokens=8) for finish in ("stop", "length")]
    configs = [
        ExactRewardConfig(weight=2.0),
        ExactRewardConfig(name="kept", truncated="scored", weight=0.5),
        OverlongRewardConfig(max_tokens=8, soft=2, weight=0.25),
    ]
    with Rewards(configs) as rewards:
        result = rewards.score(samples)
    assert {name: v.tolist() for name, v in result.values.items()} == {
        "exact": [1, 0],
        "kept": [1, 1],
        "overlong": [-1, -1],
    }
    np.testing.assert_array_equal(result.total, [2.25, 0.25])


def test_values_out_of_bounds_are_an_error():
    config = OverlongRewardConfig(max_tokens=8, soft=4, bounds=(0.0, 1.0))
    with pytest.raises(
        RewardError, match="overlong: 1 of 2 values are not within 0 and 1; the first, of answer 1, is -1"
    ):
        values(config, sample("", tokens=2), sample("", tokens=8))


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([], "empty list"),
        ([ExactRewardConfig(), ExactRewardConfig()], "two of the name exact"),
        ([ExactRewardConfig(), LengthRewardConfig(weight=-1.0)], "sum to 0"),
        ([ExactRewardConfig(weight=0.0)], "sum to 0"),
    ],
)
def test_lists_that_are_refused(configs, message):
    with pytest.raises(ValueError, match=message):
        Rewards(configs)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RegexRewardConfig(pattern="(a"), "no regular expression"),
        (lambda: RegexRewardConfig(), "pattern: missing"),
        (lambda: LengthRewardConfig(at_least=5, at_most=4), "less than at_least"),
        (lambda: OverlongRewardConfig(max_tokens=4, soft=5), "soft: 5 of 4"),
        (lambda: ExactRewardConfig(weight=1e7), "weight"),
        (lambda: ExactRewardConfig(bounds=(1.0, 1.0)), "least, greatest"),
        (lambda: JsonSchemaRewardConfig(schema={"properties": {"a": {"pattern": "x", "type": "int"}}}),
         r"(?s)schema.properties.a.pattern: not supported.*schema.properties.a.type: 'int'"),
    ],
)  # fmt: skip
def test_fields_that_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@dataclass(frozen=True, kw_only=True)
class Document:
    rewards: list[RewardConfig]


def test_choices_are_read_from_a_document():
    text = """
    rewards:
      - {type: math, column: solution}
      - {type: python, function: "rewards:f", seconds: 3, on_error: zero, weight: 0.5}
      - {type: json_schema, schema: {type: object, required: [a]}, bounds: [0, 1]}
    """
    configs = parse_text(Document, text).rewards
    assert [config.label for config in configs] == ["math", "python", "json_schema"]
    assert configs[2].bounds == (0.0, 1.0)
    with pytest.raises(ConfigError, match=r"maths.*math"):
        parse_text(Document, "rewards: [{type: maths}]")
    with pytest.raises(ConfigError, match=r"(?s)expected module:function.*on_error"):
        parse_text(Document, "rewards: [{type: python, function: rewards}, {type: exact, on_error: ignore}]")


SCHEMAS = [
    {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 2}}},
    {"type": ["object", "null"], "additionalProperties": False, "properties": {"a": True, "b": {"const": 1}}},
    {"type": "array", "items": {"enum": [1, "x", None, True, [1]]}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "string", "minLength": 2}, {"type": "number", "exclusiveMaximum": 2}]},
    {"oneOf": [{"type": "number"}, {"type": "integer"}, {"maximum": 0}]},
    {"not": {"type": "object", "required": ["b"]}, "title": "anything else"},
    {"allOf": [{"maxLength": 1}, {"exclusiveMinimum": 0}], "additionalProperties": {"type": "string"}},
]


def test_json_is_that_of_jsonschema():
    """Verdicts on drawn values, of the `jsonschema` package."""
    jsonschema = pytest.importorskip("jsonschema")
    rng = random.Random(9)

    def drawn(depth=0):
        kinds = ["null", "bool", "int", "float", "str", *(["list", "dict"] if depth < 3 else [])]
        kind = rng.choice(kinds)
        if kind == "list":
            return [drawn(depth + 1) for _ in range(rng.randint(0, 4))]
        if kind == "dict":
            return {rng.choice("abc"): drawn(depth + 1) for _ in range(rng.randint(0, 3))}
        numbers = (rng.randint(-2, 4), rng.choice((0.0, 1.0, 2.5, -1.0)))
        return {"null": None, "bool": rng.random() > 0.5, "int": numbers[0], "float": numbers[1],
                "str": rng.choice(("", "x", "xy"))}[kind]  # fmt: skip

    for schema in SCHEMAS:
        validator, config = jsonschema.Draft202012Validator(schema), JsonSchemaRewardConfig(schema=schema)
        drawn_values = [drawn() for _ in range(300)]
        expected = [float(validator.is_valid(value)) for value in drawn_values]
        assert 0 < sum(expected) < 300
        assert values(config, *[sample(json.dumps(value)) for value in drawn_values]) == expected, schema


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"a": 1} x', '{"a": 1, "a": 1}', '{"a": NaN}', '{"a": [1e999]}', "[" * 10**5,
     '{"a": ' + "9" * 10**5 + "}",
     "```json\n{}\n```"],
    ids=range(9),
)  # fmt: skip
def test_texts_that_are_no_strict_json(text):
    assert values(JsonSchemaRewardConfig(), sample(text)) == [0]
    assert values(JsonSchemaRewardConfig(), sample(' {"a": 1}\n')) == [1]
