"""`generate` as a command: a file of requests in, a file of answers out, against `transformers` on the same folder."""

import json
import re
from typing import Any

import numpy as np
import pytest
from helpers.hf_folder import tensors, write_folder

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.generate import generate
from levanter.commands.generate.config import GenerateConfig
from levanter.config import load_written
from levanter.inference import output_writer
from levanter.plan.target_from_name import pod_target

TEMPLATE = """{% for message in messages %}
{% if message.role == "robot" %}
{{ raise_exception("no robots") }}
{% endif %}
{{ bos_token + message.role + ":" + message.content + eos_token }}{% endfor %}
{% if add_generation_prompt %}
assistant:{% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", 3]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    "required": ["a", "b"],
    "additionalProperties": False,
    # A model of random weights would fill its answer with spaces.
    "x-guidance": {"whitespace_flexible": False},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}}
LINES = [
    {"id": "greedy", "prompt": "the cat sat", "temperature": 0, "max_tokens": 12, "logprobs": 2},
    {"prompt": [5, 6, 7, 8], "temperature": 0, "max_tokens": 12},
    "{not json",
    {"id": "sampled", "prompt": "def f(x):", "n": 3, "seed": 7, "max_tokens": 9, "ignore_eos": True},
    {"id": "too long", "prompt": "the cat", "max_tokens": 500},
    {"id": "misspelt", "prompt": "the cat", "temprature": 0.5},
    {"id": "stranger", "prompt": [5, 320], "max_tokens": 2},
    {"id": "empty", "prompt": [], "max_tokens": 2},
    {"id": "unseeded", "prompt": "日本語", "max_tokens": 9, "ignore_eos": True, "frequency_penalty": 1.0},
    {"id": "one", "prompt": "the", "temperature": 0, "max_tokens": 1},
    {"id": "chat", "messages": [{"role": "user", "content": "the mat"}], "temperature": 0, "max_tokens": 8},
    {"id": "robot", "messages": [{"role": "robot", "content": "the mat"}]},
    {"id": "echo", "prompt": "the cat sat on the mat", "echo": True, "logprobs": 3, "max_tokens": 0},
    {"id": "echo behind", "tokens": [5, 6, 7], "echo": True, "temperature": 0, "max_tokens": 2, "stop": "</s>"},
    {"id": "regex", "prompt": "the", "regex": "[a-c]{3,6}x(日本)?", "n": 2, "seed": 4, "max_tokens": 24},
    {"id": "schema", "prompt": "the", "response_format": FORMAT, "seed": 5, "max_tokens": 40},
    {"id": "nonsense", "prompt": "the", "json_schema": {"type": "nonsense"}},
]
BROKEN = {
    **{2: "not JSON", 4: "500 new tokens", 5: "temprature", 6: "id 320", 7: "empty"},
    **{11: "refuses these messages at its line 3 (no robots)", 16: "json_schema: "},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("generate")
    weights = {
        name: each if "norm" in name else (0.3 * each.astype(np.float32)).astype(each.dtype)
        for name, each in tensors().items()
    }
    write_folder(where / "model", weights=weights, adds_bos=True)
    (where / "model" / "chat_template.jinja").write_text(TEMPLATE)
    lines = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in LINES]
    (where / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return where


def words_of(folder, out, **inference) -> list[str]:
    document = {
        "hf_checkpoint": str(folder / "model"),
        "input_path": str(folder / "prompts.jsonl"),
        "output_path": str(out),
        "inference": {"max_rows": 4, "prefill_chunk": 8, "prompt_logprobs": True, **inference},
        "trainer": {
            "mp": "f32",
            "tracker": {"type": "noop"},
            "mesh": {"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model"}},
        },
    }
    path = out.with_suffix(".yaml")
    path.write_text(json.dumps(document))
    return ["--config_path", str(path)]


def run(words) -> int:
    return run_entry_point(GenerateConfig, generate.main, words)


@pytest.fixture(scope="module")
def whole(folder, devices):
    """What one run writes."""
    out = folder / "whole.jsonl"
    assert run(words_of(folder, out)) == 2  # some lines are no requests
    assert not out.with_name("whole.jsonl.parts").exists()
    return out.read_bytes()


def test_every_line_has_its_answer_in_its_place(folder, whole):
    import tokenizers
    import torch
    import transformers

    found = [json.loads(line) for line in whole.splitlines()]
    assert [each["id"] for each in found] == [
        *("greedy", "2", None, "sampled", "too long", "misspelt", "stranger", "empty", "unseeded", "one", "chat"),
        *("robot", "echo", "echo behind", "regex", "schema", "nonsense"),
    ]
    for index, said in BROKEN.items():
        assert found[index]["line"] == index + 1
        assert said in found[index]["error"]
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    of_file = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "model" / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    spoken = of_file.apply_chat_template(
        LINES[10]["messages"], chat_template=TEMPLATE, add_generation_prompt=True, return_dict=False
    )
    prompts = {
        0: [1, *tokenizer.encode("the cat sat", add_special_tokens=False).ids],
        1: LINES[1]["prompt"],
        10: spoken,
        13: LINES[13]["tokens"],
    }
    for index, prompt in prompts.items():
        (choice,) = found[index]["choices"]
        assert found[index]["prompt_tokens"] == len(prompt)
        with torch.no_grad():
            written = theirs.generate(
                torch.tensor([prompt]),
                **{
                    "max_new_tokens": LINES[index]["max_tokens"],
                    "do_sample": False,
                    "pad_token_id": 0,
                    "eos_token_id": 2,
                },
            )[0, len(prompt) :].tolist()
        assert choice["tokens"] == written
        ended = written[-1] == 2
        assert choice["finish_reason"] == ("stop" if ended else "length")
        assert choice["text"] == tokenizer.decode(written[:-1] if ended else written)
    top = found[0]["choices"][0]["top_logprobs"]
    assert [pairs[0][0] for pairs in top] == found[0]["choices"][0]["tokens"]
    assert [pairs[0][1] for pairs in top] == found[0]["choices"][0]["logprobs"]
    choices = found[3]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2] and found[3]["seed"] == 7
    assert len({tuple(choice["tokens"]) for choice in choices}) == 3
    assert all(len(choice["tokens"]) == 9 for choice in choices)
    _check_echoes(found[12], found[13], theirs)
    _check_conforming(found[14], found[15])


def _check_echoes(scored, behind, theirs) -> None:
    """A prompt's log-probabilities and the likeliest tokens in its places, by torch."""
    import torch

    ids = scored["prompt_ids"]
    assert scored["prompt"] == "<s>the cat sat on the mat" and ids[0] == 1 and len(ids) == scored["prompt_tokens"]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    assert scored["prompt_logprobs"][0] is None and scored["prompt_top_logprobs"][0] is None
    of_tokens = expected[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    np.testing.assert_allclose(scored["prompt_logprobs"][1:], of_tokens, atol=2e-4)
    values, likeliest = expected.topk(3)
    top = scored["prompt_top_logprobs"][1:]
    np.testing.assert_allclose([[value for _, value in one] for one in top], values, atol=2e-4)
    assert [[id for id, _ in one] for one in top] == likeliest.tolist()
    assert scored["choices"] == [{"index": 0, "text": "", "tokens": [], "finish_reason": "length"}]
    assert behind["prompt_ids"] == [5, 6, 7] and "prompt_logprobs" not in behind


def _check_conforming(regex, schema) -> None:
    import jsonschema

    texts = [choice["text"] for choice in regex["choices"]]
    assert len(texts) == 2 and all(re.fullmatch(LINES[14]["regex"], text) for text in texts), texts
    (choice,) = schema["choices"]
    jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    assert {choice["finish_reason"] for choice in (*regex["choices"], choice)} == {"stop"}


class Killed(BaseException):
    """As by SIGKILL: nothing is stored any more. What really is killed is in tests/attacks/test_generation.py."""


def test_a_run_that_was_interrupted_and_killed_goes_on_and_writes_the_same(folder, whole, tmp_path, monkeypatch):
    """Also with pages, other parts of prompts, more tokens a call and other rows beside: none of it is in the text."""
    monkeypatch.setattr(output_writer, "PART_LINES", 1)
    out = tmp_path / "again.jsonl"
    words = words_of(folder, out, allocation="paged", page_size=8, steps=4, prefill_chunk=16)
    take, taken = generate._Run.take, []

    def kept() -> int:
        parts = out.with_name("again.jsonl.parts").glob("part-*")
        return sum(len(path.read_bytes().splitlines()) - 1 for path in parts)

    with monkeypatch.context() as patch:

        def interrupted(self, event, engine):
            take(self, event, engine)
            taken.append(event)
            if len(taken) == 45:
                raise KeyboardInterrupt
            if len(taken) == 50:
                patch.setattr(output_writer.OutputWriter, "store", lambda self: None)
                raise Killed

        patch.setattr(generate._Run, "take", interrupted)
        assert run(words) == 130
        first = kept()
        assert 0 < first < len(LINES)
        with pytest.raises(Killed):
            run(words)
    assert not out.exists() and first <= kept() < len(LINES)
    assert run(words) == 2
    _check_same(out.read_bytes(), whole)


def _check_same(found: bytes, whole: bytes) -> None:
    """Byte for byte, but for the last digit of a prompt's log-probabilities: another length is another Program."""
    ours, theirs = ([json.loads(line) for line in each.splitlines()] for each in (found, whole))
    for one, other in zip(ours, theirs, strict=True):
        for name in ("prompt_logprobs", "prompt_top_logprobs"):
            if name in other:
                flat, expected = (np.asarray(each.pop(name)[1:], np.float64) for each in (one, other))
                np.testing.assert_allclose(flat, expected, atol=2e-5, rtol=0)
    assert ours == theirs


def test_what_is_there_already_is_not_written_over(folder, whole, capfd):
    assert run(words_of(folder, folder / "whole.jsonl")) == 2
    assert "exists already" in capfd.readouterr().err
    assert (folder / "whole.jsonl").read_bytes() == whole


PLANNED = {
    "model": {
        "type": "llama",
        **{"hidden_dim": 8192, "intermediate_dim": 28672, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8},
        **{"vocab_size": 128256, "max_seq_len": 8192},
    },
    "tokenizer": "passthrough",
    "trainer": {"mp": "bfloat16", "mesh": {"axes": {"data": 1, "model": -1}, "shared_mapping": {"vocab": "model"}}},
}


def planned(tmp_path, target: str, *, more=None, **inference):
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps({**PLANNED, **(more or {}), "inference": inference}))
    loaded = load_written(GenerateConfig, ["--config_path", str(path)])
    return generate.describe(loaded.config, pod_target(target), written=loaded.written)


def test_a_plan_needs_no_weights_and_no_prompts(tmp_path):
    plan = planned(tmp_path, "v6e-8", max_rows=4)
    assert not plan.errors
    assert {"input_path", "output_path", "weights"} <= {check.name for check in plan.checks if check.error is not None}
    names = [program.name for program in plan.computing]
    # With several prompts in a call, a TPU's compiler would copy the cache.
    assert names == ["start_rows", "prefill_1x32", "prefill_1x128", "prefill_1x512", "decode_4"]
    # 80 layers of 8 heads of 128, keys and values, two bytes each, over 8 chips.
    row = 80 * 8 * 128 * 2 * 2 * 8192 // 8
    assert plan.resident_bytes is not None and plan.resident_bytes["cache"] == 4 * row
    assert {workload.program for workload in plan.workloads} == set(names) - {"start_rows"}


def test_integers_are_planned_to_the_byte(tmp_path):
    plan = planned(tmp_path, "v5e-8", more={"quantize": "int8"}, max_rows=32, cache_dtype="int8")
    assert not plan.errors
    # Of each head and position 128 integers and a scale of two bytes, for keys and for values.
    assert plan.resident_bytes is not None
    assert plan.resident_bytes["cache"] == 32 * 80 * 2 * 8192 * (128 + 2)
    q = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + 128256 * 8192
    # Axes that are contracted are cut for two of the matrices, whose scales are whole on every chip.
    whole, cut = 80 * 2 * 8192, 80 * (8192 + 2 * 1024 + 2 * 28672) + 128256
    norms, table = 2 * (80 * 2 + 1) * 8192, 2 * 128256 * 8192
    assert plan.resident_bytes["parameters"] == (q + table + 4 * cut) // 8 + 4 * whole + norms
    said = {check.name: check.message for check in plan.checks}
    assert "int8 with a bfloat16 scale each" in said["cache"]
    assert said["int8"].startswith(f"8 projections; bytes: {q:,} of integers, {4 * (whole + cut):,} of scales")
    assert any(program.name.startswith("load.derive.") for program in plan.load.programs)


def test_heads_that_are_cut_further_than_keys_repeat_the_cache(tmp_path):
    path = tmp_path / "plan.yaml"
    mesh = {"axes": {"data": 1, "model": 8, "group": 2}, "shared_mapping": {"heads": ["model", "group"]}}
    path.write_text(json.dumps({**PLANNED, "trainer": {"mp": "bfloat16", "mesh": mesh}, "inference": {"max_rows": 1}}))
    loaded = load_written(GenerateConfig, ["--config_path", str(path)])
    plan = generate.describe(loaded.config, pod_target("v5e-16"), written=loaded.written)
    (said,) = [check.message for check in plan.checks if check.name == "cache"]
    assert "each key and value is on 2 devices" in said
    assert plan.resident_bytes is not None
    assert plan.resident_bytes["cache"] == 80 * 8 * 128 * 2 * 2 * 8192 // 8


@pytest.mark.parametrize(
    ("inference", "said"),
    [
        ({"max_rows": 3}, "max_rows 3 is not a multiple of the 2 shards of the batch; the nearest above is 4"),
        ({"allocation": "paged", "pages": 64}, "at least 128 are needed"),
        ({"pages": 64}, "only a paged cache"),
        ({"cache_dtype": "int3"}, "float32, bfloat16, float16, int8"),
        ({"steps": 9}, "inference.steps"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_what_can(inference, said, tmp_path):
    path = tmp_path / "plan.yaml"
    mesh = {"axes": {"data": 2, "model": -1}}
    path.write_text(json.dumps({**PLANNED, "trainer": {"mesh": mesh}, "inference": inference}))

    def describe() -> None:
        loaded = load_written(GenerateConfig, ["--config_path", str(path)])
        generate.describe(loaded.config, pod_target("v6e-8"), written=loaded.written)

    with pytest.raises(ValueError, match=said):
        describe()
