"""Preferences in all shapes that upstream and trl read: the same pair of ids and weights from each."""

import json

import numpy as np
import pytest
from helpers.hf_folder import byte_level_tokenizer

from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.data import DataError
from levanter.data.conversations import chat_template
from levanter.data.formats import PreferenceChatLmDatasetFormat
from levanter.data.preference import PairEncoder

pytestmark = pytest.mark.quick

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROMPT = [{"role": "user", "content": "the cat?"}]
CHOSEN = [{"role": "assistant", "content": "the cat sat"}]
REJECTED = [{"role": "assistant", "content": "the mat"}]


def tokenizer():
    built = byte_level_tokenizer()
    built.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    definition = json.loads(built.to_str())
    return FastTokenizer(definition, name="made here", bos_id=1, eos_id=2, pad_id=0, chat_template=CHATML)


TOKENIZER = tokenizer()


def encoder(**format):
    made = PreferenceChatLmDatasetFormat(**format)
    template = chat_template(made, TOKENIZER)
    return PairEncoder(format=made, template=template, tokenizer=TOKENIZER, bos=1, eos=2)


def pair_of(record, **format):
    (found,) = encoder(**format).encode([(record, "pairs.jsonl:1")])
    return found


def counted(one):
    return TOKENIZER.decode(one.ids[1:][one.weights[:-1] > 0])


@pytest.mark.parametrize(
    "record",
    [
        {"chosen": PROMPT + CHOSEN, "rejected": PROMPT + REJECTED},
        {"prompt": PROMPT, "chosen": CHOSEN, "rejected": REJECTED},
        {"prompt": None, "chosen": PROMPT + CHOSEN, "rejected": PROMPT + REJECTED},
    ],
    ids=["conversations", "prompt and messages", "a column of a file that others use"],
)
def test_messages(record):
    pair = pair_of(record)
    head = "<|im_start|>user\nthe cat?<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(pair.chosen.ids) == head + "the cat sat<|im_end|>\n"
    assert TOKENIZER.decode(pair.rejected.ids) == head + "the mat<|im_end|>\n"
    # The words in common count, too.
    assert counted(pair.chosen) == "the cat sat<|im_end|>\n" and counted(pair.rejected) == "the mat<|im_end|>\n"
    assert not pair.same


@pytest.mark.parametrize(
    "record",
    [{"prompt": "12 +", "chosen": " 34", "rejected": " 5"}, {"chosen": "12 + 34", "rejected": "12 + 5"}],
    ids=["prompt and texts", "texts"],
)
def test_plain_texts(record):
    pair = pair_of(record)
    for one, answer in ((pair.chosen, " 34"), (pair.rejected, " 5")):
        asked, said = TOKENIZER.encode_batch(["12 +", answer])
        assert one.ids.tolist() == [1, *asked, *said, 2]
        np.testing.assert_array_equal(one.weights, [0] * len(asked) + [1] * (len(said) + 1) + [0])


def test_several_turns_and_a_system_message():
    """What was said before the answers part does not count, whoever said it."""
    before = [*PROMPT, {"role": "assistant", "content": "sat"}, {"role": "user", "content": "and?"}]
    record = {"chosen": before + CHOSEN, "rejected": before + REJECTED, "system": "x"}
    pair = pair_of(record, system_prompt="system")
    assert TOKENIZER.decode(pair.chosen.ids).startswith("<|im_start|>system\nx<|im_end|>\n<|im_start|>user")
    assert counted(pair.chosen) == "the cat sat<|im_end|>\n"
    explicit = pair_of(
        {"prompt": before, "chosen": CHOSEN, "rejected": REJECTED, "system": "x"}, system_prompt="system"
    )
    assert explicit.chosen.ids.tolist() == pair.chosen.ids.tolist()
    np.testing.assert_array_equal(explicit.rejected.weights, pair.rejected.weights)
    everything = pair_of(record, system_prompt="system", mask_user_turns=False)
    assert counted(everything.chosen) == TOKENIZER.decode(pair.chosen.ids[1:])


def test_the_same_answer_twice_is_told():
    assert pair_of({"chosen": PROMPT + CHOSEN, "rejected": PROMPT + CHOSEN}).same


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"chosen": PROMPT + CHOSEN}, "no key 'rejected'; it has 'chosen'"),
        ({"chosen": [], "rejected": PROMPT}, "'chosen' is empty"),
        ({"chosen": 5, "rejected": PROMPT}, "'chosen' is int, expected a list of messages, or text"),
        (
            {"chosen": "a", "rejected": PROMPT},
            "chosen, rejected: expected both of them as lists of messages, or both as text",
        ),
        (
            {"prompt": "a", "chosen": CHOSEN, "rejected": REJECTED},
            "no common prompt: .*; write prompt as a list of messages",
        ),
        (
            {"chosen": CHOSEN, "rejected": REJECTED},
            "no common prompt: one begins with assistant: 'the cat sat', the other",
        ),
        ({"chosen": "abc", "rejected": "xyz"}, "no common prompt: one begins with 'abc', the other with 'xyz'"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "'chosen' is empty"),
        ({"chosen": "a", "rejected": "ab"}, 'no common prompt: .*; give "prompt": "" for texts without one'),
        ({"prompt": PROMPT, "chosen": "a", "rejected": "b"}, "prompt is a list of messages, and chosen, rejected are"),
        (
            {"prompt": PROMPT, "chosen": PROMPT + CHOSEN, "rejected": PROMPT + REJECTED},
            "chosen, rejected begin with the messages of prompt: remove prompt, or these messages",
        ),
        ({"chosen": PROMPT, "rejected": PROMPT + REJECTED}, "chosen: empty completion: the assistant says nothing"),
        ({"prompt": PROMPT, "chosen": PROMPT, "rejected": REJECTED}, "chosen: empty completion: the assistant says"),
        ({"chosen": "a\ud800", "rejected": "ab"}, r"'chosen': not text: \\ud800 at character 1"),
        ({"chosen": [{"role": "usr", "content": "x"}], "rejected": PROMPT}, "chosen: message 1: unknown role 'usr'"),
        ([1], "expected an object with the key 'chosen', found list"),
    ],
)
def test_what_is_no_preference(record, expected):
    with pytest.raises(DataError, match=expected) as info:
        pair_of(record)
    assert str(info.value).startswith("pairs.jsonl:1")
