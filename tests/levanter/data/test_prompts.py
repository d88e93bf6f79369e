"""Prompts: ids with the generation prompt by transformers' own template code, rows for rewards, and bad records."""

import json
from dataclasses import replace

import numpy as np
import pytest
from helpers.hf_folder import byte_level_tokenizer

from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.config import parse_text
from levanter.data import DataError
from levanter.data.component_formats import FORMATS
from levanter.data.config import DatasetComponent
from levanter.data.documents import component_format
from levanter.data.formats import LmDatasetFormatBase, PromptsLmDatasetFormat
from levanter.data.prompts import PromptEncoder

pytestmark = pytest.mark.quick

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat?"}]
RECORD = {"messages": MESSAGES, "question": "the cat?", "solution": "5", "level": 2, "name": "a"}


def tokenizer(template: str | None = CHATML):
    built = byte_level_tokenizer()
    built.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    definition = json.loads(built.to_str())
    return FastTokenizer(definition, name="a test", bos_id=1, eos_id=2, pad_id=0, chat_template=template)


TOKENIZER = tokenizer()


def encoded(*records, tokenizer=TOKENIZER, most=64, **format):
    encoder = PromptEncoder.for_set(PromptsLmDatasetFormat(**format), tokenizer, most=most)
    return encoder.encode([(record, f"line {n}") for n, record in enumerate(records, 1)])


def ids(text):
    return TOKENIZER.encode_batch([text])[0].tolist()


def test_conversations_end_with_the_generation_prompt():
    """As `apply_chat_template(add_generation_prompt=True)` of transformers writes them."""
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = chat_template_utils.render_jinja_template(
        [MESSAGES], chat_template=CHATML, add_generation_prompt=True
    )
    (prompt,) = encoded(RECORD, messages="messages", answer="solution", columns=["level"], id="name")
    assert prompt.text == expected[0]
    assert prompt.ids.tolist() == ids(expected[0])
    assert prompt.ids.dtype == np.int32
    assert (prompt.id, dict(prompt.row)) == ("a", {"answer": "5", "level": 2})


def test_a_text_is_the_message_of_a_user_unless_it_stays_as_it_is():
    (as_user,) = encoded(RECORD, prompt="question")
    assert as_user.text == "<|im_start|>user\nthe cat?<|im_end|>\n<|im_start|>assistant\n"
    assert as_user.ids.tolist() == ids(as_user.text)
    (plain,) = encoded(RECORD, prompt="question", prompt_role=None)
    assert (plain.text, plain.ids.tolist()) == ("the cat?", TOKENIZER.frame.around(ids("the cat?")))
    assert dict(plain.row) == {}


def test_a_system_message_comes_first():
    (prompt,) = encoded(RECORD | {"system": "speak"}, prompt="question", system_prompt="system")
    assert prompt.text.startswith("<|im_start|>system\nspeak<|im_end|>\n<|im_start|>user")


def test_ids_do_not_depend_on_the_other_prompts():
    records = [{"q": text} for text in ("one", "two", "one", "three", "one")]
    prompts = encoded(*records, prompt="q")
    first, alone = prompts[0].id, encoded(records[1], prompt="q")[0].id
    assert [p.id for p in prompts] == [first, alone, f"{first}-2", prompts[3].id, f"{first}-3"]
    assert len({p.id for p in prompts}) == 5


def test_prompts_without_room_for_an_answer_are_dropped_or_refused():
    records = [{"q": "the"}, {"q": "the cat sat on the mat " * 9}, {"q": "mat"}]
    assert [p.text for p in encoded(*records, prompt="q", prompt_role=None, most=8, overlength="drop")] == [
        "the",
        "mat",
    ]
    with pytest.raises(DataError, match=r"line 2: \d+ tokens, and a prompt may have 8; overlength: drop"):
        encoded(*records, prompt="q", prompt_role=None, most=8)


@pytest.mark.parametrize(
    ("record", "format", "message"),
    [
        (RECORD, {"messages": "turns"}, "line 1: no key 'turns'"),
        (RECORD, {"prompt": "level"}, "line 1: 'level' is int, expected a string"),
        (RECORD, {"prompt": "question", "answer": "right", "columns": ["a", "level"]}, "line 1: no key 'a', 'right'; "),
        (RECORD, {"prompt": "question", "id": "missing"}, "line 1: 'missing' is NoneType, expected text"),
        ({"m": [*MESSAGES, {"role": "assistant", "content": "a"}]}, {"messages": "m"}, "last message is the"),
        ({"m": [{"role": "usr", "content": "x"}]}, {"messages": "m"}, "unknown role 'usr'"),
        ({"m": []}, {"messages": "m"}, "line 1: 'm' has no message"),
    ],
)  # fmt: skip
def test_records_that_are_refused(record, format, message):
    with pytest.raises(DataError, match=message):
        encoded(record, **format)


def test_entry_points_that_do_not_read_the_format_refuse_it_by_name():
    component = DatasetComponent(format=PromptsLmDatasetFormat(prompt="q"))
    with pytest.raises(DataError, match=r"`text`, .* are read; `prompts` is not"):
        component_format("data.components.a", component, FORMATS)


def test_ids_that_occur_twice_are_refused():
    records = [RECORD | {"name": name} for name in ("a", "b", "a", "c", "a", "c")]
    with pytest.raises(DataError, match="ids of prompts must differ: 'a' 3 times, 'c' 2 times"):
        encoded(*records, prompt="question", id="name")


def test_templates_that_cannot_be_used_are_refused():
    with pytest.raises(DataError, match="has none; prompt_role: null leaves a prompt as it is"):
        encoded(RECORD, prompt="question", tokenizer=tokenizer(None))
    with pytest.raises(DataError, match=r"a test has none$"):
        encoded(RECORD, messages="messages", tokenizer=tokenizer(None))
    without = CHATML[: CHATML.index("{% if add")]
    with pytest.raises(DataError, match="no generation prompt"):
        encoded(RECORD, messages="messages", chat_template=without)


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ({}, "neither is set"),
        ({"prompt": "a", "messages": "b"}, "both are set"),
        ({"prompt": "a", "prompt_role": None, "chat_template": "x"}, "has no effect"),
        ({"prompt": "a", "answer": "solution", "columns": ["answer"]}, "rewards read the key 'solution'"),
    ],
)
def test_formats_that_are_refused(format, message):
    with pytest.raises(ValueError, match=message):
        PromptsLmDatasetFormat(**format)


def test_the_format_is_read_from_a_document():
    text = "{type: prompts, prompt: question, answer: solution, columns: [level], overlength: drop}"
    expected = PromptsLmDatasetFormat(prompt="question", answer="solution", columns=["level"], overlength="drop")
    assert parse_text(LmDatasetFormatBase, text) == expected
    assert replace(expected, prompt_role=None).plain
