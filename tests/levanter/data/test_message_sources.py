"""One record in every source and every spelling gives the same ids; transformers and trl are the judges.

Records are drawn by a seed: turns, tools, calls, results. Every record is written as JSON lines, a JSON list, Parquet,
both Arrow formats, with tools and arguments as JSON text, with contents in parts, and as ShareGPT; and it is the body
of a request, and a line of `generate`.
"""

import copy
import io
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.hf_folder import byte_level_tokenizer
from transformers import PreTrainedTokenizerFast

from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.data.chat import ChatTemplate
from levanter.data.conversations import ChatEncoder, chat_template
from levanter.data.errors import DataError
from levanter.data.formats import ChatLmDatasetFormat, PreferenceChatLmDatasetFormat
from levanter.data.messages import template_arguments
from levanter.data.preference import PairEncoder
from levanter.data.readers import read_records
from levanter.inference.jsonl import request_lines
from levanter.serving.chat import template_messages, template_variables
from levanter.serving.request_parsing import ProtocolError, decode
from levanter.serving.request_schema import ChatBody

pytestmark = pytest.mark.quick

CALLS = (
    "{% for c in m.tool_calls or [] %}CALL {{ (c.function or c).name }} {{ (c.function or c).arguments | tojson }}"
    "{% endfor %}"
)
TEMPLATES = {
    # What published templates do with a content that may be absent, and with the arguments of calls.
    "tested": "{% if m.content %}{{ m.content }}{% endif %}" + CALLS,
    "asks for null": "{% if m.content is none %}(none)" + CALLS + "{% else %}{{ m.content }}" + CALLS + "{% endif %}",
    "whole message": "{{ m | tojson }}",
    "with thoughts": "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}" + CALLS,
}


def whole(body: str) -> str:
    return (
        "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + body
        + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def made_tokenizers():
    built = byte_level_tokenizer()
    built.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    ours = FastTokenizer(
        json.loads(built.to_str()), name="test", bos_id=1, eos_id=2, pad_id=0, chat_template=whole(TEMPLATES["tested"])
    )
    return ours, PreTrainedTokenizerFast(tokenizer_object=built)


TOKENIZER, JUDGE = made_tokenizers()
WORDS = ["the cat", "Ölfeld", "日本", "a\nb", '"quoted"', "None", "{}", "sat on", "\N{GRINNING FACE}"]
# One type for each name: a column of Arrow has one type. The first record has all of them, in this order.
SCHEMAS = {
    "city": {"type": "string"},
    "amount": {"type": "number"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "place": {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}},
}


def value_of(dice: random.Random, name: str):
    place = {"name": dice.choice(WORDS), "lat": dice.randrange(9) + 0.5}
    return {
        "city": dice.choice(WORDS),
        "amount": dice.randrange(100) / 4,
        "tags": [dice.choice(WORDS) for _ in range(dice.randrange(3))],
        "place": place if dice.random() < 0.5 else {"name": dice.choice(WORDS)},
    }[name]


def drawn_tool(dice: random.Random, number: int, names: list[str]) -> dict:
    parameters = {
        "type": "object",
        "properties": {name: copy.deepcopy(SCHEMAS[name]) for name in names},
        "required": names[:1],
    }
    function = {"name": f"tool{number}", "description": dice.choice(WORDS), "parameters": parameters}
    return {"type": "function", "function": function}


def drawn_record(seed: int) -> dict:
    """A conversation with tools, calls of them and their results; the record 0 has every field."""
    dice = random.Random(f"record {seed}")
    names = [name for name in SCHEMAS if seed == 0 or dice.random() < 0.5] or ["city"]
    tools = [drawn_tool(dice, n, names) for n in range(dice.randrange(1, 3))]
    messages: list[dict] = [{"role": "system", "content": dice.choice(WORDS)}] if dice.random() < 0.5 else []
    for turn in range(dice.randrange(1, 4)):
        messages.append({"role": "user", "content": f"{dice.choice(WORDS)} {turn}?"})
        if seed == 0 or dice.random() < 0.6:
            arguments = {name: value_of(dice, name) for name in names if seed == 0 or dice.random() < 0.7}
            function = {"name": dice.choice(tools)["function"]["name"], "arguments": arguments}
            call = {"id": f"call{turn}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "content": dice.choice(WORDS), "tool_call_id": f"call{turn}"})
        answer = {"role": "assistant", "content": dice.choice(WORDS)}
        thought = {"reasoning_content": dice.choice(WORDS)} if seed == 0 or dice.random() < 0.3 else {}
        messages.append({**answer, **thought})
    return {"messages": messages, "tools": tools}


RECORDS = [drawn_record(seed) for seed in range(8)]


def spelled(record: dict, spelling: str) -> dict:
    """The record in another form with the same meaning."""
    record = copy.deepcopy(record)
    if "json tools" in spelling:
        record["tools"] = json.dumps(record["tools"], ensure_ascii=False)
    if "listed json tools" in spelling:
        record["tools"] = [json.dumps(tool) for tool in json.loads(record["tools"])]
    for message in record["messages"]:
        if "json arguments" in spelling:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        if "parts" in spelling and message["content"] is not None:
            text = message["content"]
            lines = text.split("\n") if spelling == "parts, several" else [text]
            message["content"] = [{"type": "text", "text": line} for line in lines]
        if "absent" in spelling and message["content"] is None:
            del message["content"]
        if "nulls" in spelling:
            message.update({"name": None, "refusal": None, "audio": None, "function_call": None})
            message.setdefault("tool_calls", None)
    if spelling == "sharegpt":
        keys, roles = {"role": "from", "content": "value"}, {"user": "human", "assistant": "gpt"}
        record["messages"] = [
            {keys.get(key, key): roles.get(value, value) if key == "role" else value for key, value in message.items()}
            for message in record["messages"]
        ]
    return record


def records_for(name: str) -> list[dict]:
    """The records; without reasoning for a template that writes whole messages, where it has several names."""
    records = copy.deepcopy(RECORDS)
    for message in (message for record in records for message in record["messages"] if name == "whole message"):
        message.pop("reasoning_content", None)
    return records


SPELLINGS = [
    "plain", "json tools", "listed json tools", "json tools, json arguments", "parts", "parts, several", "absent",
    "nulls", "nulls, absent, json arguments", "sharegpt",
]  # fmt: skip


def write(records: list[dict], path: Path) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record, ensure_ascii=len(record) % 2 == 0) + "\n" for record in records))
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=5)
    else:
        table = pa.Table.from_pylist(records)
        with (pa.ipc.new_stream if path.suffix == ".arrow" else pa.ipc.new_file)(path, table.schema) as writer:
            writer.write_table(table)


def rendered(template: ChatTemplate, messages, tools) -> str:
    return template.render(messages, template_arguments({"tools": tools}, None, "test"), "test")[0]


def judged(record: dict, body: str) -> list[int]:
    return JUDGE.apply_chat_template(
        record["messages"], tools=record["tools"], chat_template=whole(body), tokenize=True, return_dict=False
    )


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_source_and_spelling_gives_the_same_ids(tmp_path, spelling):
    """Files of every kind, against transformers on the plain record."""
    for name, body in TEMPLATES.items():
        records = [spelled(record, spelling) for record in records_for(name)]
        format = ChatLmDatasetFormat(chat_template=whole(body), mask_user_turns=False)
        encoder = ChatEncoder(format=format, template=chat_template(format, TOKENIZER), tokenizer=TOKENIZER)
        expected = [judged(record, body) for record in records_for(name)]
        for ending in ("jsonl", "json", "parquet", "arrow", "feather"):
            path = tmp_path / f"records.{ending}"
            write(records, path)
            read = [encoder.encode([record])[0].ids.tolist() for record in read_records(str(path))]
            assert read == expected, (name, ending)


@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if s != "sharegpt" and "json arguments" in s])
@pytest.mark.parametrize("name", TEMPLATES)
def test_requests_give_the_same_texts(name, spelling):
    """The body of a chat completion, and a line of `generate`, against the record of training."""
    template = ChatTemplate(text=whole(TEMPLATES[name]))
    for record in records_for(name):
        # In a request arguments are text, as in OpenAI's messages.
        body = spelled(record, f"{spelling}, absent")
        body["tools"] = record["tools"]
        expected = JUDGE.decode(judged(record, TEMPLATES[name]))
        decode(ChatBody, body)
        messages, more = template_messages(body["messages"]), template_variables(None, body["tools"])
        assert template.render(messages, more, "request")[0] == expected
        line = (json.dumps({"messages": body["messages"]}) + "\n").encode()
        (read,) = request_lines(io.BytesIO(line))
        assert template.render(read.messages, more, "line")[0] == expected  # pyright: ignore[reportAttributeAccessIssue]


def test_explicit_nulls_are_kept_where_a_source_has_them(tmp_path):
    """A null in a schema or an argument: JSON says so, and so does JSON text in a row; a struct of Arrow cannot."""
    record = drawn_record(0)
    function = record["tools"][0]["function"]
    function["parameters"]["properties"]["city"]["default"] = None
    record["messages"][-3]["tool_calls"][0]["function"]["arguments"]["city"] = None
    format = ChatLmDatasetFormat(mask_user_turns=False)
    encoder = ChatEncoder(format=format, template=chat_template(format, TOKENIZER), tokenizer=TOKENIZER)
    expected = judged(record, TEMPLATES["tested"])
    assert "null" in JUDGE.decode(expected)
    for ending, spelling in (("jsonl", "plain"), ("parquet", "json tools, json arguments")):
        write([spelled(record, spelling)], tmp_path / f"x.{ending}")
        (row,) = read_records(str(tmp_path / f"x.{ending}"))
        assert encoder.encode([row])[0].ids.tolist() == expected
    # `datasets` stores mixed types as an extension of Arrow.
    tools = pa.array([json.dumps(record["tools"])], pa.json_())
    texts = pa.array([json.dumps(message) for message in record["messages"]], pa.json_())
    messages = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts)
    pq.write_table(pa.table({"messages": messages, "tools": tools}), tmp_path / "json.parquet")
    (row,) = read_records(str(tmp_path / "json.parquet"))
    assert encoder.encode([row])[0].ids.tolist() == expected


def test_maps_and_bytes_of_rows(tmp_path):
    """Arguments as a map, and texts without the annotation of text."""
    kind = pa.list_(pa.struct([("role", pa.binary()), ("content", pa.binary()), ("meta", pa.map_("string", "string"))]))
    rows = [[{"role": b"user", "content": "ä".encode(), "meta": [("a", "b"), ("c", None)]}]]
    pq.write_table(pa.table({"messages": pa.array(rows, kind), "image": [b"\xff\xd8"]}), tmp_path / "x.parquet")
    ((record, _),) = read_records(str(tmp_path / "x.parquet"))
    assert record == {"messages": [{"role": "user", "content": "ä", "meta": {"a": "b"}}], "image": b"\xff\xd8"}


@pytest.mark.parametrize("content", ["m.content", "m.content + ''", "(m.content | trim)"])
@pytest.mark.parametrize("stored", [{}, {"content": None}])
def test_a_message_without_a_content(content, stored):
    """No template writes the word None, or fails, because a message that calls tools has no content."""
    text = whole("{{ " + content + " }}" + CALLS)
    format = ChatLmDatasetFormat(chat_template=text, mask_user_turns=False)
    encoder = ChatEncoder(format=format, template=chat_template(format, TOKENIZER), tokenizer=TOKENIZER)
    call = {"function": {"name": "look", "arguments": {"at": "None"}}}
    user = {"role": "user", "content": "None"}
    record = {"messages": [user, {"role": "assistant", **stored, "tool_calls": [call]}]}
    (encoded,) = encoder.encode([(record, "test:1")])
    head = "<|im_start|>user\nNone<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(encoded.ids) == head + 'CALL look {"at": "None"}<|im_end|>\n'


ADDS_ARGUMENTS = whole("{% for c in m.tool_calls or [] %}{{ 'CALL ' + c.function.arguments }}{% endfor %}")
WRITES_ARGUMENTS = whole("{% for c in m.tool_calls or [] %}CALL {{ c.function.arguments }}{% endfor %}")


@pytest.mark.parametrize("text", [ADDS_ARGUMENTS, WRITES_ARGUMENTS])
@pytest.mark.parametrize("arguments", [{"at": "日本", "n": None}, '{"at":"日本"}'])
def test_a_template_that_expects_arguments_as_text(text, arguments):
    """Text is written as it is, an object as JSON, not in Python's form."""
    template = ChatTemplate(text=text)
    call = {"function": {"name": "look", "arguments": arguments}}
    expected = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    messages = template_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    written = template.render(messages, {}, "test")[0]
    assert f"CALL {expected}<|im_end|>" in written


MARKED = whole(
    "{% if m.role == 'assistant' %}{% generation %}{{ m.reasoning_content }}{% endgeneration %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
)


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss"])
@pytest.mark.parametrize("marked", [False, True])
def test_answers_that_a_record_excludes(key, marked):
    """Every choice of excluded answers, for templates that mark what counts and such that do not."""
    dice = random.Random(f"weights {key} {marked}")
    text = MARKED if marked else whole(TEMPLATES["tested"])
    for turns in ("all", "last", "split"):
        format = ChatLmDatasetFormat(chat_template=text, turns=turns)
        encoder = ChatEncoder(format=format, template=chat_template(format, TOKENIZER), tokenizer=TOKENIZER)
        for chosen in range(8):
            messages = []
            for turn in range(3):
                messages.append({"role": "user", "content": f"question {turn}", key: dice.choice([None, 0, 1])})
                counts = bool(chosen >> turn & 1)
                value = dice.choice([1, True, 1.0, None]) if counts else dice.choice([0, False, 0.0])
                answer = {"role": "assistant", "content": f"answer{turn}", "reasoning_content": f"thought{turn}"}
                messages.append({**answer, key: value})
            expected = [turn for turn in range(3) if chosen >> turn & 1 and (turns != "last" or turn == 2)]
            counted = ""
            for encoded in encoder.encode([({"messages": messages}, "test:1")]):
                if encoded.weights is not None and len(encoded.ids):
                    counted += TOKENIZER.decode(encoded.ids[1:][encoded.weights[:-1] > 0])
            assert [turn for turn in range(3) if f"answer{turn}" in counted] == expected
            assert "question" not in counted
            if marked:
                assert [turn for turn in range(3) if f"thought{turn}" in counted] == expected


def chat_error(record: dict, **format) -> str:
    chat = ChatLmDatasetFormat(**{"chat_template": whole(TEMPLATES["tested"]), **format})
    with pytest.raises(DataError) as info:
        ChatEncoder(format=chat, template=chat_template(chat, TOKENIZER), tokenizer=TOKENIZER).encode([(record, "x:1")])
    return str(info.value)


USER = {"role": "user", "content": "hi"}


def answer(**fields) -> dict:
    return {"messages": [USER, {"role": "assistant", "content": "ok", **fields}]}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (answer(weight=0.5), "message 2: weight: 0.5: an answer counts in the loss (1, true) or not (0, false)"),
        (answer(train="yes"), "message 2: train: 'yes': an answer counts"),
        (answer(function_call={"name": "f"}), "message 2: function_call: an older form of calls; write it as tool_cal"),
        (answer(tool_calls="[{"), "message 2: tool_calls: text, but not JSON"),
        (answer(tool_calls=[3]), "message 2: tool_calls: expected a list of calls"),
        (answer(tool_calls=[{"function": "f"}]), "message 2: tool_calls[0].function: a string, expected an object"),
        (
            answer(tool_calls=[{"function": {"name": "f", "arguments": "x"}}]),
            "message 2: tool_calls[0].function.arguments: text, but not JSON",
        ),
        (answer(tool_calls=[{"arguments": "[1]"}]), "message 2: tool_calls[0].arguments: expected a JSON object"),
        (answer(content=[{"type": "image_url"}]), "message 2: content[0]: 'image_url', and only text is read"),
        (answer(content={"text": "x"}), "message 2: content: an object, expected text, or a list of text parts"),
        (answer(reasoning_content="a\ud800"), "message 2: reasoning_content: has U+D800 at 1, which no text contains"),
        (answer(tool_calls=[{"name": "f", "arguments": '{"\\ud83d": 1}'}]), "U+D83D at 0"),
        ({**answer(), "tools": "[{"}, "tools: text, but not JSON"),
        ({**answer(), "tools": {"name": "x"}}, "tools: an object, expected a list of tools"),
        ({**answer(), "tools": ["3"]}, "tools[0]: a number, expected an object: a tool's schema"),
        ({**answer(), "tools": [{"name": "x\udc00"}]}, "tools[0].name: has U+DC00 at 1, which no text contains"),
        ({**answer(), "tools": [{"name": "\ufdd0"}]}, "tools[0].name: has U+FDD0 at 0, which no text contains"),
        (
            {**answer(), "chat_template_kwargs": {"date": "\ud800"}},
            "chat_template_kwargs.date: has U+D800 at 0, which no text contains",
        ),
        ({"conversations": [USER]}, "no key 'messages', but 'conversations': set messages_field: conversations"),
        ({"messages": None}, "'messages' is null, expected a list"),
        (
            {"messages": [{"from": "observation", "value": "x"}]},
            "message 1: unknown role 'observation'; known are system, developer, user, assistant, tool, function, "
            "ipython, environment; map others with format.roles (roles: {observation: …})",
        ),
    ],
)
def test_what_stays_refused_says_what_to_do(record, expected):
    assert expected in chat_error(record)


def test_a_template_that_writes_half_a_pair():
    """What a template writes is checked as contents are."""
    text = "{{ '\\ud83d' }}" + whole(TEMPLATES["tested"])
    assert "x:1: the chat template writes U+D83D, which no text contains" in chat_error(answer(), chat_template=text)
    assert "chat_template: has U+FDD1 at 0" in chat_error_of_template("\ufdd1{{ messages }}")
    every = {"mask_user_turns": False}
    expected = "message 2 is not to count in the loss (weight: 0), but mask_user_turns: false counts every token"
    assert expected in chat_error(answer(weight=0), **every)


def chat_error_of_template(text: str) -> str:
    with pytest.raises(DataError) as info:
        chat_template(ChatLmDatasetFormat(chat_template=text), TOKENIZER)
    return str(info.value)


def test_requests_with_what_no_text_has():
    with pytest.raises(ProtocolError, match=r"messages\[0\]\.content: has U\+FDD0 at 1"):
        template_messages([{"role": "user", "content": "a\ufdd0"}])
    with pytest.raises(ProtocolError, match=r"tools\[0\]\.function\.description: has U\+FDD1 at 0"):
        template_variables(None, [{"type": "function", "function": {"name": "f", "description": "\ufdd1"}}])


def drawn_preference(dice: random.Random) -> dict:
    """A record of preferences in one of the shapes that trl reads."""
    turns = [{"role": "system", "content": "sys"}] if dice.random() < 0.4 else []
    for turn in range(dice.randrange(1, 3)):
        turns += [{"role": "user", "content": f"{dice.choice(WORDS)}{turn}"}]
        turns += [{"role": "assistant", "content": dice.choice(WORDS)}]
    prompt = turns[:-1]
    answers = dice.sample(WORDS, 2)
    sides = [[{"role": "assistant", "content": text}] for text in answers]
    shape = dice.choice(["explicit", "implicit", "text beside", "null beside", "texts", "texts, implicit", "empty"])
    if shape == "explicit":
        return {"prompt": prompt, "chosen": sides[0], "rejected": sides[1]}
    if shape == "empty":
        return {"prompt": "", "chosen": answers[0], "rejected": answers[1]}
    if shape.startswith("texts"):
        head = f"Question: {dice.choice(WORDS)}?"
        if shape == "texts":
            return {"prompt": head, "chosen": f" {answers[0]}", "rejected": f" {answers[1]}"}
        tails = [dice.choice(["x", "xy", "xyz", "y z", "y w"]) for _ in range(2)]
        return {"chosen": f"{head} {tails[0]}", "rejected": f"{head} {tails[1]}"}
    record = {"chosen": prompt + sides[0], "rejected": prompt + sides[1]}
    if shape == "text beside":
        return {"prompt": prompt[-1]["content"], **record}
    return {"prompt": None, **record} if shape == "null beside" else record


@pytest.mark.slow
def test_preferences_are_trls():
    """Prompt and answers of every shape, against trl's `maybe_extract_prompt` and transformers' template."""
    trl = pytest.importorskip("trl.data_utils", reason="trl is not installed (the extra `judges`)")
    dice = random.Random("preferences")
    text = whole(TEMPLATES["tested"])
    format = PreferenceChatLmDatasetFormat(chat_template=text)
    encoder = PairEncoder(format=format, template=chat_template(format, TOKENIZER), tokenizer=TOKENIZER, bos=1, eos=2)
    for _ in range(200):
        record = drawn_preference(dice)
        theirs = trl.maybe_extract_prompt({key: value for key, value in record.items() if value is not None})
        (pair,) = encoder.encode([(copy.deepcopy(record), "pairs:1")])
        for side, encoded in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            prompt, answer = theirs["prompt"], theirs[side]
            if isinstance(prompt, str):
                # Prompt and answer are tokenized separately here.
                first, second = TOKENIZER.encode_batch([prompt, answer])
                before, ids = 1 + len(first), [1, *first, *second, 2]
            else:
                more = {"chat_template": text, "tokenize": True, "return_dict": False}
                before = len(JUDGE.apply_chat_template(prompt, add_generation_prompt=True, **more))
                ids = JUDGE.apply_chat_template(prompt + answer, **more)
            assert encoded.ids.tolist() == ids, record
            expected = np.zeros(len(ids))
            expected[before - 1 : -1] = 1
            np.testing.assert_array_equal(encoded.weights, expected, err_msg=str(record))


@pytest.mark.slow
def test_conversations_of_sharegpt_are_trls():
    """`from` and `value`, against trl's `maybe_convert_to_chatml`, in conversations and in preferences."""
    trl = pytest.importorskip("trl.data_utils", reason="trl is not installed (the extra `judges`)")
    format = ChatLmDatasetFormat(messages_field="conversations", mask_user_turns=False)
    encoder = ChatEncoder(format=format, template=chat_template(format, TOKENIZER), tokenizer=TOKENIZER)
    for record in RECORDS:
        plain = [{"from": m["role"], "value": m["content"]} for m in record["messages"] if m["content"]]
        theirs = trl.maybe_convert_to_chatml({"conversations": copy.deepcopy(plain)})["messages"]
        (encoded,) = encoder.encode([({"conversations": plain}, "test:1")])
        text = whole(TEMPLATES["tested"])
        assert encoded.ids.tolist() == JUDGE.apply_chat_template(theirs, chat_template=text, return_dict=False)
