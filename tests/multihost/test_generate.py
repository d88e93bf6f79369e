"""Generation as several processes: what they write is what one writes, and a process that is killed is named.

What is told between them is tested in `tests/levanter/inference/test_multihost.py`.
"""

import json

import pytest
from helpers.processes import Run, check_named, run_together

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.generate import main

# Real processes on a machine that has other things to do.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MORE = [
    {"prompt": "the cat", "regex": "[a-c]{3,6}x", "n": 2, "max_tokens": 20},
    {"prompt": "the cat sat", "echo": True, "logprobs": 2, "max_tokens": 4, "ignore_eos": True},
    {"prompt": "a", "nonsense": 1},
]


def command_in(inputs, folder, lines=(), **inference) -> list[str]:
    command = inputs.generate(folder, prompt_logprobs=True, **inference)
    with (folder / "prompts.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return command


@pytest.fixture(scope="module")
def alone(tmp_path_factory, inputs) -> list[dict]:
    """What one process with eight devices writes."""
    folder = tmp_path_factory.mktemp("alone")
    assert run_entry_point(GenerateConfig, main, command_in(inputs, folder, MORE)[1:]) == 2
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("count", "inference"), [(2, {}), (4, {"allocation": "paged", "page_size": 8, "steps": 4})])
def test_the_answers_are_those_of_one_process(count, inference, alone, inputs, tmp_path):
    command = command_in(inputs, tmp_path, MORE, **inference)
    with Run(tmp_path / "run", count, command, devices=8 // count, cache=inputs.cache) as run:
        ended = run.wait()
    assert [each.code for each in ended] == [2] * count, ended[0].output[-2000:]
    found = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(found) == len(alone) == 10
    for ours, theirs in zip(found, alone, strict=True):
        # The last digits of log-probabilities depend on how sums are cut.
        for each in (ours, theirs):
            each.pop("prompt_logprobs", None), each.pop("prompt_top_logprobs", None)
            for choice in each.get("choices", ()):
                choice.pop("logprobs", None), choice.pop("top_logprobs", None)
        assert ours == theirs


def test_a_killed_process_is_named(inputs, tmp_path):
    lines = [{"prompt": "the cat", "max_tokens": 40, "ignore_eos": True} for _ in range(200)]
    command = command_in(inputs, tmp_path, lines)
    with Run(tmp_path / "run", 2, command, devices=4, cache=inputs.cache) as run:
        run.wait_for(0, "generating: 0 tokens")
        run.kill(1)
        ended = run.wait()
    check_named(ended, 1)
    assert ended[0].code == 5


def test_two_processes_and_nobody_answers_twice(inputs, tmp_path):
    outputs = run_together(tmp_path / "run", 2, command_in(inputs, tmp_path / "own"), devices=4, cache=inputs.cache)
    assert "7 answers" in outputs[0] and "answers in" not in outputs[1]
