"""Lines of JSON in and out: what is wrong is named and concerns nobody else, and killed runs go on where they were."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from helpers.small_tokenizer import BOS, SmallTokenizer

from levanter.inference import jsonl
from levanter.inference import output_writer as answers_module
from levanter.inference.jsonl import InvalidLine, request_lines
from levanter.inference.output_writer import Choice, OutputWriter, answer_line, error_line
from levanter.inference.prompts import PromptRequest, derive_seed, engine_request
from levanter.inference.requests import ChoiceId, ConstraintSpec, SamplingParams
from levanter.io import OtherRunError

TOKENIZER = SmallTokenizer()


def lines_of(*lines, **more):
    data = b"".join(line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass") for line in lines)
    return list(request_lines(io.BytesIO(data), **more))


def read_one(line):
    (found,) = lines_of(line)
    return found


def as_request(asked, **more):
    given = dict(
        encode=lambda text: [BOS, *TOKENIZER.encode_batch([text])[0]], chat=None, vocab_size=264, model_ends=(2,)
    )
    return engine_request(asked, **(given | {"seed": 1} | more))


def test_a_line_is_a_request():
    found = read_one('{"id": "a", "prompt": "the 日本", "temperature": 0, "max_tokens": 3, "stop": "x", "n": 2}\n')
    assert found == PromptRequest(
        line=1,
        id="a",
        prompt="the 日本",
        params=SamplingParams(temperature=0.0, max_tokens=3, stop=("x",), n=2),
    )
    made = as_request(found)
    assert made.tokens == (BOS, 259, 261) and made.stop_ids == (2,) and made.id == "a"
    assert read_one('{"prompt": [5, 6]}') == PromptRequest(line=1, id="1", prompt=(5, 6), params=SamplingParams())


def test_defaults_of_a_run_and_of_a_line():
    plain, own = lines_of(
        '{"prompt": "a"}\n', '{"prompt": "a", "max_tokens": 7}', defaults={"max_tokens": 5, "top_k": 3}
    )
    assert (plain.params.max_tokens, plain.params.top_k) == (5, 3)
    assert (own.params.max_tokens, own.params.top_k) == (7, 3)


def test_constraints():
    assert read_one('{"prompt": "a", "json_object": true}').constraint == ConstraintSpec(kind="json_object")
    found = read_one('{"prompt": "a", "json_schema": {"type": "integer"}}').constraint
    assert found == ConstraintSpec(kind="json_schema", text='{"type": "integer"}')
    assert read_one('{"prompt": "a", "regex": "a+", "json_object": false}').constraint.text == "a+"
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "integer"}}}
    assert read_one(json.dumps({"prompt": "a", "response_format": wanted})).constraint == found
    for kind, spec in (("text", None), ("json_object", ConstraintSpec(kind="json_object"))):
        assert read_one(json.dumps({"prompt": "a", "response_format": {"type": kind}})).constraint == spec


def test_ids_may_be_called_tokens():
    assert read_one('{"tokens": [5, 6]}').prompt == (5, 6)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON: Expecting property name"),
        ('{"prompt": "a"} x', "not JSON: Extra data at character 17"),
        ("[1]", "expected an object, got a list"),
        ("null", "expected an object, got null"),
        ("3", "expected an object, got a number"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        ('{"prompt": ' + "[" * 300 + "]" * 300 + "}", "nested more than 256 deep"),
        ('{"prompt": "a", "n": ' + "9" * 5000 + "}", "a number is longer than the limit"),
        ('{"prompt": "a", "temperature": NaN}', "temperature: must be a finite number"),
        ('{"prompt": "a", "seed": Infinity}', "seed: expected a whole number"),
        ('{"prompt": [1, NaN]}', "prompt: expected a string or a list of token ids"),
        ('{"prompt": [1, -1]}', "prompt: expected a string or a list of token ids"),
        ('{"prompt": [1, true]}', "prompt: expected a string or a list of token ids"),
        ('{"prompt": {"text": 1}}', "prompt: expected a string or a list of token ids"),
        ('{"prompt": "a\\ud800"}', "prompt: half of a surrogate pair"),
        (
            '{"messages": [{"role": "user", "content": ["\\udfff"]}]}',
            "messages[0].content[0]: half of a surrogate pair",
        ),
        ('{"prompt": "a", "\\ud800": 1}', "\\ud800: half of a surrogate pair"),
        ("{}", "prompt: expected one of `prompt`, `tokens` and `messages`"),
        ('{"prompt": "a", "messages": [{}]}', "one of `prompt`, `tokens` and `messages`, got prompt and messages"),
        ('{"tokens": "a"}', "tokens: expected a list of token ids"),
        ('{"messages": [{"role": "user"}, {"content": "a"}]}', "messages[1]: expected a string as its `role`"),
        ('{"prompt": "a", "response_format": "json"}', "response_format: expected an object with `type`"),
        (
            '{"prompt": "a", "response_format": {"type": "json_schema"}}',
            "response_format.json_schema: expected an",
        ),
        (
            '{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"shema": {}}}}',
            "response_format.json_schema.shema: not known; did you mean `schema`?",
        ),
        ('{"prompt": "a", "regex": "a", "response_format": {"type": "json_object"}}', "regex and response_format"),
        ('{"messages": []}', "messages: expected a list of objects, at least one"),
        ('{"prompt": "a", "id": 3}', "id: expected a string of 1 to 256 characters"),
        ('{"prompt": "a", "id": ""}', "id: expected a string of 1 to 256 characters"),
        ('{"prompt": "a", "prompt": "b"}', "prompt: written twice"),
        ('{"prompt": "a", "tempature": 1}', "tempature: not a parameter; did you mean `temperature`?"),
        ('{"prompt": "a", "suffix": "b"}', "suffix: refused"),
        (
            '{"prompt": "a", "regex": "a", "grammar": "b"}',
            "regex and grammar: ",
        ),
        ('{"prompt": "a", "regex": ""}', "regex: expected a string that is not empty"),
        ('{"prompt": "a", "json_schema": "{}"}', "json_schema: expected an object"),
        ('{"prompt": "a", "json_schema": {"minimum": NaN}}', "json_schema: NaN and infinity are not valid JSON"),
        ('{"prompt": "a", "json_object": 1}', "json_object: expected true or false"),
    ],
)
def test_what_is_wrong_is_named_and_others_are_read(line, said):
    line = line if isinstance(line, bytes) else line.encode()
    first, broken, last = lines_of('{"prompt": "a"}\n', line + b"\n", '{"prompt": "b"}')
    assert isinstance(broken, InvalidLine) and said in broken.error and broken.line == 2
    assert (first.id, last.id, last.prompt) == ("1", "3", "b")
    # The answer is a line of JSON whatever was in the request.
    assert json.loads(error_line(broken))["line"] == 2


def test_everything_that_is_wrong_with_a_line():
    found = read_one('{"id": 1, "top_p": 2, "n": 0, "beta": 1}')
    assert [problem.split(":")[0] for problem in found.error.splitlines()] == ["id", "prompt", "beta", "top_p", "n"]


def test_a_line_that_is_too_long_is_skipped(monkeypatch):
    monkeypatch.setattr(jsonl, "LINE_BYTES", 100)
    monkeypatch.setattr(jsonl, "MIB", 7)
    exact = '{"prompt": "' + "x" * 85 + '"}\n'
    assert len(exact) == 100
    long = '{"prompt": "' + "x" * 90 + '"}\n'
    found = lines_of(exact, long, '{"prompt": "b"}\n', long[:-1])
    assert [type(one) for one in found] == [PromptRequest, InvalidLine, PromptRequest, InvalidLine]
    assert found[1].error.startswith("more than") and found[2].line == 3


def test_ids_are_unique():
    found = lines_of('{"prompt": "a", "id": "3"}\n', "  \n", '{"prompt": "b"}\n', '{"prompt": "c", "id": "3"}\n')
    assert [one.line for one in found] == [1, 3, 4]
    assert [one.error for one in found[1:]] == ["id: '3' is already the id of line 1"] * 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": []}', "prompt: empty"),
        ('{"prompt": [263, 264, 265]}', "prompt[1]: id 264 is not one of the model's 264 ids (0 to 263) (and 1 more)"),
        ('{"prompt": "a", "stop_token_ids": [264]}', "stop_token_ids: id 264"),
        ('{"prompt": "a", "logit_bias": {"300": 1}}', "logit_bias: id 300"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "this model has no chat template"),
    ],
)
def test_requests_that_do_not_go_with_the_model(line, said):
    with pytest.raises(ValueError) as caught:
        as_request(read_one(line))
    assert said in str(caught.value)


def test_conversations_are_rendered():
    asked = read_one('{"messages": [{"role": "user", "content": "é"}]}')
    made = as_request(asked, chat=lambda messages: [7, *TOKENIZER.encode_batch([str(messages[0]["content"])])[0]])
    assert made.tokens == (7, 262)  # with the beginning that the template gave it, and no other


def test_a_stop_string_that_is_a_special_token_is_its_id():
    asked = read_one('{"prompt": "a", "stop": ["<|end|>", "x"], "stop_token_ids": [9]}')
    assert as_request(asked, special_tokens={"<|end|>": 7, "<|other|>": 8}).stop_ids == (2, 9, 7)
    assert as_request(asked).stop_ids == (2, 9)


@pytest.mark.parametrize("field", ["ignore_eos", "min_tokens"])
def test_where_a_text_that_conforms_ends_is_not_for_the_request_to_say(field):
    asked = read_one(json.dumps({"prompt": "a", "json_object": True, field: True if field == "ignore_eos" else 3}))
    with pytest.raises(ValueError, match=f"^{field}: "):
        as_request(asked)


def test_seeds():
    """Named ones are kept; others depend on the run and the request, not on its place or on what ran before."""
    a, b = (as_request(read_one(json.dumps({"prompt": "x", "id": id}))) for id in "ab")
    again = as_request(lines_of("{}\n", '{"prompt": "x", "id": "a"}')[1])
    assert a.seed == again.seed == derive_seed(1, "a") != b.seed
    assert as_request(read_one('{"prompt": "x", "id": "a"}'), seed=2).seed != a.seed
    assert as_request(read_one('{"prompt": "x", "seed": 0}')).seed == 0
    assert all(0 <= derive_seed(n, str(n)) < 2**63 for n in range(50))


def test_an_answer():
    made = as_request(read_one('{"id": "日", "prompt": "a", "n": 2, "seed": 5}'))
    top = (((7, -0.5), (8, -1.123456789)),)
    choices = [
        Choice(of=ChoiceId("日", 1), text="é\u2028\n\r", tokens=(7,), reason="stop", logprobs=(-0.5000001,), top=top),
        Choice(of=ChoiceId("日", 0), text="", tokens=(2,), reason="length"),
    ]
    line = answer_line(made, choices)
    assert line.count(b"\n") == 1 and "日".encode() in line
    assert json.loads(line) == {
        "id": "日",
        "seed": 5,
        "prompt_tokens": 2,
        "choices": [
            {"index": 0, "text": "", "tokens": [2], "finish_reason": "length"},
            {
                "index": 1,
                "text": "é\u2028\n\r",
                "tokens": [7],
                "finish_reason": "stop",
                "logprobs": [-0.5],
                "top_logprobs": [[[7, -0.5], [8, -1.12346]]],
            },
        ],
    }


def answer(n):
    return json.dumps({"id": n, "text": "日\r" * n}).encode() + b"\n"


EXPECTED = b"".join(answer(n) for n in range(100))


def test_answers_come_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setattr(answers_module, "PART_LINES", 7)
    out = str(tmp_path / "out.jsonl")
    store = OutputWriter(out, {"model": "m"})
    assert store.begin() == 0
    order = list(range(100))
    random.Random(3).shuffle(order)
    for n in order:
        store.add(n, answer(n))
    assert store.finish() == 100 and Path(out).read_bytes() == EXPECTED
    assert os.listdir(tmp_path) == ["out.jsonl"]
    with pytest.raises(OtherRunError, match="exists already"):
        OutputWriter(out, {"model": "m"}).begin()


def test_nothing_in_an_empty_file(tmp_path):
    store = OutputWriter(str(tmp_path / "out.jsonl"), {})
    store.begin()
    assert store.finish() == 0 and (tmp_path / "out.jsonl").read_bytes() == b""


def test_another_run_does_not_go_on(tmp_path):
    out = str(tmp_path / "out.jsonl")
    OutputWriter(out, {"model": "m", "seed": 1, "input": "x"}).begin()
    with pytest.raises(OtherRunError, match=r"(?s)model: there 'm', now 'n'.*seed: there 1, now 2") as caught:
        OutputWriter(out, {"model": "n", "seed": 2, "input": "x"}).begin()
    assert "input:" not in str(caught.value)
    (tmp_path / "out.jsonl.parts" / "run.json").write_text("{")
    with pytest.raises(OtherRunError):
        OutputWriter(out, {"model": "m", "seed": 1, "input": "x"}).begin()


def test_parts_of_an_earlier_version_are_gone_on_with(tmp_path):
    parts, identity = tmp_path / "out.jsonl.parts", {"model": "m", "seed": 1}
    parts.mkdir()
    (parts / "run.json").write_bytes(json.dumps(identity, indent=1, sort_keys=True).encode() + b"\n")
    body = b"".join(answer(n) for n in range(40))
    head = json.dumps({"first": 0, "lines": 40, "crc32": zlib.crc32(body)}).encode()
    (parts / "part-000000000.jsonl").write_bytes(head + b"\n" + body)
    store = OutputWriter(str(tmp_path / "out.jsonl"), identity)
    assert store.begin() == 40
    for n in range(40, 100):
        store.add(n, answer(n))
    assert store.finish() == 100 and (tmp_path / "out.jsonl").read_bytes() == EXPECTED and not parts.exists()


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "head"])
def test_a_damaged_part_is_answered_again(tmp_path, damage):
    out = str(tmp_path / "out.jsonl")
    store = OutputWriter(out, {})
    store.begin()
    for n in range(60):
        store.add(n, answer(n))
        if n % 10 == 9:
            store.store()
    path = tmp_path / "out.jsonl.parts" / "part-000000020.jsonl"
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[:-5],
            "changed": content.replace(b'"id": 21', b'"id": 31'),
            "head": b"x" + content,
            "gone": b"",
        }[damage]
    )
    if damage == "gone":
        path.unlink()
    store = OutputWriter(out, {})
    assert store.begin() == 20
    assert sorted(os.listdir(f"{out}.parts")) == ["part-000000000.jsonl", "part-000000010.jsonl", "run.json"]
    for n in range(20, 100):
        store.add(n, answer(n))
    store.finish()
    assert Path(out).read_bytes() == EXPECTED


def test_parts_that_became_the_output_become_it_again(tmp_path):
    """A run that is killed between the output and the removal of its parts."""
    out = str(tmp_path / "out.jsonl")
    store = OutputWriter(out, {})
    store.begin()
    for n in range(100):
        store.add(n, answer(n))
    store.store()
    (tmp_path / "out.jsonl").write_bytes(EXPECTED)
    store = OutputWriter(out, {})
    assert store.begin() == 100
    assert store.finish() == 100 and Path(out).read_bytes() == EXPECTED
    assert os.listdir(tmp_path) == ["out.jsonl"]


KILLED = """
import json, os, random, signal, sys
from levanter.inference import output_writer
output_writer.PART_LINES = 5
out, after, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
left = after
store = output_writer.OutputWriter(out, {"model": "m"})
first = store.begin()
rng = random.Random(seed)
window = []
for n in range(first, 100):
    window.append(n)
    if len(window) == 8 or n == 99:
        rng.shuffle(window)
        for m in window:
            store.add(m, json.dumps({"id": m, "text": "日\\r" * m}).encode() + b"\\n")
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        window = []
store.finish()
"""


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    """Killed with SIGKILL again and again; what is written in the end is what one run writes."""
    out, runs = str(tmp_path / "out.jsonl"), []
    for attempt, after in enumerate([1, 7, 30, 30, 200]):
        command = [sys.executable, "-c", KILLED, out, str(after), str(attempt)]
        runs.append(subprocess.run(command, timeout=250, check=False).returncode)
    assert runs == [-signal.SIGKILL] * 4 + [0]
    assert Path(out).read_bytes() == EXPECTED
    assert os.listdir(tmp_path) == ["out.jsonl"]
