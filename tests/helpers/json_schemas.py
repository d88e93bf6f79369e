"""Fifty JSON schemas, each with another of the things that schemas say, and some that cannot be followed.

Texts that conform are short, or can be: a model of random weights writes a free string to the end of its context.
"""

from typing import Any

Schema = dict[str, Any]
SHORT: Schema = {"type": "string", "maxLength": 6}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}


def record(required: list[str] | None = None, /, *, more: Any = False, **properties: Any) -> Schema:
    """An object with these properties, all of which it has unless some are named."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": more}


def listed(items: Any, least: int, most: int) -> Schema:
    """A list of so many."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


TREE: Schema = record(value=DIGIT, left={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]})
PERSON: Schema = record(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 150})

SCHEMAS: dict[str, Schema] = {
    # Values by themselves.
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "true only": {"const": True},
    "constant number": {"const": -12.5},
    "constant text": {"const": 'a "quoted" \\ text'},
    "constant object": {"const": {"a": [1, None, {"b": "c"}]}},
    "constant of other scripts": {"const": "naïve 日本語 🎉"},
    "words": {"enum": ["red", "green", "blue"]},
    "values of several kinds": {"enum": [1, "1", None, True, [1], {"one": 1}]},
    "several types": {"type": ["null", "boolean", "integer"], "minimum": 0, "maximum": 99},
    # Numbers.
    "integer from and to": {"type": "integer", "minimum": 17, "maximum": 1_024},
    "negative integer": {"type": "integer", "minimum": -500, "maximum": -7},
    "integer between": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "integer multiple": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 7},
    "number from and to": {"type": "number", "minimum": 0.25, "maximum": 0.5},
    "number between": {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    "large integer": {"type": "integer", "minimum": 2**53, "maximum": 2**53 + 5},
    # Strings.
    "short text": {"type": "string", "minLength": 2, "maxLength": 5},
    "text of one length": {"type": "string", "minLength": 4, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern of alternatives": {"type": "string", "pattern": "^(yes|no|may(be)?)$"},
    "pattern in other scripts": {"type": "string", "pattern": "^[ぁ-ん]{1,3}é?$"},
    "date": {"type": "string", "format": "date"},
    "address of a newer machine": {"type": "string", "format": "ipv6"},
    "address of a machine": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
    # Lists.
    "list of numbers": listed(DIGIT, 2, 4),
    "list of words": listed({"enum": ["a", "bc"]}, 0, 3),
    "empty list": listed(DIGIT, 0, 0),
    "list of lists": listed(listed({"type": "boolean"}, 1, 2), 1, 2),
    "tuple": {"type": "array", "prefixItems": [SHORT, DIGIT], "items": False, "minItems": 2},
    "tuple and more": {"type": "array", "prefixItems": [{"const": "v"}], "items": DIGIT, "minItems": 2, "maxItems": 3},
    "list of objects": listed(record(x=DIGIT, y=DIGIT), 1, 2),
    # Objects.
    "pair": record(x={"enum": ["on", "off"]}, n={"enum": [1, 2, 3]}),
    "something optional": record(["id"], id=DIGIT, note=SHORT),
    "nothing required": record([], a=DIGIT, b=DIGIT),
    "names of other scripts": record(**{"größe": DIGIT, "名前": SHORT, "🎉": {"type": "boolean"}, 'a"b\\': DIGIT}),
    "nested": record(outer=record(middle=record(inner=DIGIT))),
    "map": {"type": "object", "additionalProperties": DIGIT, "minProperties": 1, "maxProperties": 2},
    "names by pattern": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "text or nothing": record(name={"anyOf": [SHORT, {"type": "null"}]}),
    # What is put together of others.
    "any of": {"anyOf": [{"type": "boolean"}, record(a=DIGIT), listed(DIGIT, 1, 1)]},
    "one of": {"oneOf": [{"const": "a"}, {"type": "integer", "minimum": 1, "maximum": 3}]},
    "kinds told apart": {
        "anyOf": [record(kind={"const": "circle"}, r=DIGIT), record(kind={"const": "square"}, side=DIGIT)]
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 8}]},
    "objects added up": {
        "allOf": [
            {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
            {"type": "object", "properties": {"b": SHORT}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": {}, "b": {}},
    },
    "by reference": {"$defs": {"person": PERSON}, **record(first={"$ref": "#/$defs/person"})},
    "by reference twice": {"$defs": {"d": DIGIT}, **listed({"$ref": "#/$defs/d"}, 2, 2)},
    "tree": {"$defs": {"leaf": record(value=DIGIT)}, **TREE},
    "recursive": {
        "$defs": {"node": record(v=DIGIT, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})},
        "$ref": "#/$defs/node",
    },
}
"""By what each is about."""

FEW = (
    "values of several kinds",
    "integer multiple",
    "pattern",
    "names of other scripts",
    "kinds told apart",
    "recursive",
)
"""Some of them."""

REFUSED: dict[str, Schema] = {
    "not": {"not": {"type": "string"}},
    "unique items": {"type": "array", "items": DIGIT, "uniqueItems": True},
    "if and then": {"if": {"type": "string"}, "then": {"maxLength": 3}},
    "contains": {"type": "array", "contains": DIGIT},
    "dependent required": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "names": {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
    "unevaluated": {"allOf": [record(a=DIGIT, more=True)], "unevaluatedProperties": False},
    "nothing conforms": {"type": "integer", "minimum": 5, "maximum": 4},
    "no such type": {"type": "integr"},
    "no such reference": {"$ref": "#/$defs/nobody"},
    "reference to elsewhere": {"$ref": "https://example.com/schema.json"},
    "no pattern": {"type": "string", "pattern": "("},
    "no such format": {"type": "string", "format": "shoe-size"},
}
"""Schemas that would not be followed to the letter."""
