"""Texts that conform: random walks along the masks, judged by `re` and `json`; masks against every word there is."""

import json
import random
import re
import sys
import time

import numpy as np
import pytest
from helpers.small_byte_level import byte_level

from levanter.inference import constraint as constraint_module
from levanter.inference.constraint import ConstraintError, Constraints
from levanter.inference.engine import expand_masks
from levanter.inference.requests import ConstraintSpec

TOKENIZER = byte_level()
END = TOKENIZER.vocab_size - 1
PADDED = 300
"""Ids of a model whose table is larger than its tokenizer."""


@pytest.fixture(scope="module")
def constraints():
    pytest.importorskip("llguidance")
    return Constraints(TOKENIZER.definition, vocab_size=PADDED, ends=[END])


def allowed(mask):
    return {i for i in range(len(mask) * 32) if mask[i // 32] >> np.uint32(i % 32) & np.uint32(1)}


def walk(constraint, seed, most=200):
    """A random text along the masks, and whether it ended."""
    rng, ids = random.Random(seed), []
    for _ in range(most):
        may = sorted(allowed(constraint.mask()))
        assert may and may[-1] < TOKENIZER.vocab_size, "a mask allows nothing, or ids that are no tokens"
        chosen = END if END in may and rng.random() < 0.4 else rng.choice(may)
        constraint.accept(chosen)
        if chosen == END:
            return TOKENIZER.decode(ids), True
        ids.append(chosen)
    return TOKENIZER.decode(ids), False


@pytest.mark.parametrize("pattern", ["[a-c]{3,5}x", "[0-9]{4}-[0-9]( an?)?", "日本?|nice"])
def test_texts_match_their_expression(constraints, pattern):
    for seed in range(15):
        text, ended = walk(constraints.start(ConstraintSpec(kind="regex", text=pattern)), seed)
        assert ended and re.fullmatch(pattern, text), text


def test_a_mask_allows_what_some_word_goes_on_with(constraints):
    words = ["ab", "abc", "nice an", "日本", "日語"]
    constraint = constraints.start(ConstraintSpec(kind="regex", text="|".join(words)))
    pieces = {i: _bytes(i) for i in range(END)}
    done = b""
    for choice in ("n", "ic", "e", " an"):
        rest = [word.encode()[len(done) :] for word in words if word.encode().startswith(done)]
        expected = {i for i, piece in pieces.items() if any(left.startswith(piece) for left in rest)}
        if b"" in rest:
            expected.add(END)
        found = allowed(constraint.mask())
        # Where there is one text only, llguidance wants it in the tokens that the tokenizer would make of it.
        assert (found == expected if len(rest) > 1 else found <= expected) and not constraint.complete
        (chosen,) = (i for i, piece in pieces.items() if piece == choice.encode())
        constraint.accept(chosen)
        done += choice.encode()
    assert constraint.complete and allowed(constraint.mask()) == {END}


def _bytes(i):
    """The bytes of an id, through GPT-2's alphabet."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in shown}
    table |= {chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in shown)}
    return bytes(table[letter] for letter in TOKENIZER.token(i))


def test_texts_are_json_of_their_schema(constraints):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 12}, "b": {"enum": ["x", "日"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    spec = ConstraintSpec(kind="json_schema", text=json.dumps(schema))
    ended = 0
    for seed in range(10):
        text, end = walk(constraints.start(spec), seed)
        if end:
            ended += 1
            value = json.loads(text)
            assert value.keys() == {"a", "b"} and 3 <= value["a"] <= 12 and value["b"] in ("x", "日")
    assert ended >= 5


def test_a_json_object_is_one(constraints):
    constraint = constraints.start(ConstraintSpec(kind="json_object"))
    (ids,) = TOKENIZER.encode_batch(['{"a": [1, {"b": null}]}'])
    for i in ids.tolist():
        assert i in allowed(constraint.mask())
        constraint.accept(i)
    assert constraint.complete
    (wrong,) = TOKENIZER.encode_batch(["["])
    constraint = constraints.start(ConstraintSpec(kind="json_object"))
    with pytest.raises(ConstraintError, match="json_object"):
        constraint.accept(int(wrong[0]))


def test_texts_follow_a_grammar(constraints):
    spec = ConstraintSpec(kind="grammar", text='start: "yes" | "no" /[0-9]{1,3}/')
    for seed in range(10):
        text, ended = walk(constraints.start(spec), seed)
        assert ended and re.fullmatch(r"yes|no\d{1,3}", text)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "([", "regex: .*regex parse error"),
        ("json_schema", '{"type": "nonsense"}', "json_schema: .*nonsense"),
        ("json_schema", "[1]", "json_schema: .*must be an object"),
        ("grammar", "start: x", 'grammar: .*unknown name: "x"'),
        ("grammar", "", "grammar: "),
    ],
)
def test_what_is_wrong_with_a_constraint(constraints, kind, text, said):
    with pytest.raises(ConstraintError, match=said) as caught:
        constraints.start(ConstraintSpec(kind=kind, text=text))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_masks_of_rows(constraints):
    one = constraints.start(ConstraintSpec(kind="regex", text="a"))
    masks = expand_masks((3, PADDED + 7), {1: one.mask(), 2: np.array([0xFFFFFFFF], np.uint32)})
    assert masks.shape == (3, PADDED + 7) and masks.dtype == np.bool_
    assert np.flatnonzero(masks[1]).tolist() == [i for i in range(END) if _bytes(i) == b"a"]
    assert masks[0].all() and masks[2, :32].all(), "a row without a mask, and one whose mask is short"
    assert not masks[2, 32:].any()
    assert expand_masks((1, 20), {0: np.array([0xFFFFFFFF], np.uint32)}).all()


def test_tokenizers_and_models_that_cannot_be_constrained(constraints):
    spec = ConstraintSpec(kind="regex", text="a")
    with pytest.raises(ConstraintError, match="llguidance cannot read this tokenizer"):
        Constraints({"model": {}}, vocab_size=3, ends=[1]).start(spec)
    with pytest.raises(ConstraintError, match="no end-of-text token"):
        Constraints(TOKENIZER.definition, vocab_size=PADDED, ends=[]).start(spec)


def test_without_llguidance_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConstraintError, match=r"need llguidance: pip install 'levanter-fork\[constraint\]'"):
        Constraints(TOKENIZER.definition, vocab_size=PADDED, ends=[END]).start(ConstraintSpec(kind="json_object"))


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "a" * 9_000, "at most 8,192 characters, got 9,000"),
        ("regex", "(a{1000}){1000}", "too many expressions"),
        ("grammar", 'start: "a" |\n' * 10_000, "at most 65,536 characters"),
        ("json_schema", json.dumps({"enum": [f"word {n}" for n in range(30_000)]}), "at most 262,144 characters"),
        (
            "json_schema",
            json.dumps({"anyOf": [{"type": "object", "properties": {f"f{n}": {} for n in range(501)}}]}),
            "at most 500 properties, got 501",
        ),
        ("json_schema", '{"$ref": "#"}', "no text conforms to it"),
        ("json_schema", '{"enum": []}', "."),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "."),
    ],
)
def test_what_is_too_complex_or_fits_nothing_is_refused_at_once(constraints, kind, text, said):
    began = time.thread_time()
    with pytest.raises(ConstraintError, match=said) as caught:
        constraints.start(ConstraintSpec(kind=kind, text=text))
    # Seconds before, with the state of a library in the message.
    assert time.thread_time() - began < 2.0
    assert "<state>" not in str(caught.value) and "NoExtension" not in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_copies_are_texts_of_their_own(constraints):
    first = constraints.start(ConstraintSpec(kind="regex", text="ab|cd"))
    second = first.copy()
    (a,), (c,) = ([i for i in range(END) if _bytes(i) == letter] for letter in (b"a", b"c"))
    first.accept(a)
    second.accept(c)
    assert {_bytes(i) for i in allowed(first.mask())} == {b"b"}
    assert {_bytes(i) for i in allowed(second.mask())} == {b"d"}


def test_a_mask_that_takes_long_ends_its_text_alone(constraints, monkeypatch):
    # The first mask is computed where nobody waits for it.
    one = constraints.start(ConstraintSpec(kind="regex", text="x{3}"))
    monkeypatch.setattr(constraint_module, "MASK_SECONDS", -1.0)
    one.accept(next(i for i in range(END) if _bytes(i) == b"x"))
    with pytest.raises(ConstraintError, match="too complex: a token takes more than"):
        one.mask()
