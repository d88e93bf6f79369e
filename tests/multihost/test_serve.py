"""A server of several processes: process 0 answers, all compute; what ends, and how."""

import json
import re
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest
from helpers.processes import Run, check_named

pytest.importorskip("uvicorn", reason="the `serve` extra is not installed")

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.generate import main

# Real processes on a machine that has other things to do.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS = ["the cat sat on the mat"[: 3 * n + 1] for n in range(6)]
GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


def started(run: Run) -> str:
    """The address of a server that is ready."""
    run.wait_for(0, "ready: http://")
    found = re.search(r"ready: (http://\S+)", run.output(0))
    assert found is not None
    return found[1]


def post(address: str, body: dict) -> dict:
    asked = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=300) as answer:
        return json.load(answer)


def pieces(address: str, body: dict) -> Iterator[dict]:
    """What is streamed, until the end or the connection's."""
    asked = urllib.request.Request(
        f"{address}/v1/completions", json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


@pytest.fixture(scope="module")
def expected(tmp_path_factory, inputs) -> list[str]:
    """What `generate` writes behind the prompts, as one process."""
    folder = tmp_path_factory.mktemp("alone")
    command = inputs.generate(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p, **GREEDY}) + "\n" for p in PROMPTS))
    assert run_entry_point(GenerateConfig, main, command[1:]) == 0
    lines = (folder / "answers.jsonl").read_text().splitlines()
    return [json.loads(line)["choices"][0]["text"] for line in lines]


def test_two_processes_answer_as_one_and_end_together(inputs, expected, tmp_path):
    """All at once, and one after another; then the launcher tells both to end, and an answer still comes."""
    with Run(tmp_path / "run", 2, inputs.serve(tmp_path), devices=4, cache=inputs.cache) as run:
        address = started(run)
        answers: dict[str, str] = {}

        def ask(prompt: str) -> None:
            answers[prompt] = post(address, {"prompt": prompt, **GREEDY})["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answers[prompt] for prompt in PROMPTS] == expected
        answers.clear()
        ask(PROMPTS[3])
        assert answers == {PROMPTS[3]: expected[3]}

        streamed = pieces(address, {"prompt": PROMPTS[5], **GREEDY, "max_tokens": 20})
        text = next(streamed)["choices"][0]["text"]
        # Those that follow end when process 0 does, whichever is told first.
        run.kill(1, signal.SIGTERM)
        run.kill(0, signal.SIGTERM)
        rest = list(streamed)
        text += "".join(choice["text"] for piece in rest for choice in piece["choices"])
        assert text.startswith(expected[5]) and rest[-1]["choices"][0]["finish_reason"] == "length"
        ended = run.wait()
    assert [each.code for each in ended] == [0, 0], ended[1].output[-3000:]
    assert "is closed" in ended[0].output


def test_a_killed_process_is_named_and_whoever_waits_is_told(inputs, tmp_path):
    with Run(tmp_path / "run", 2, inputs.serve(tmp_path), devices=4, cache=inputs.cache) as run:
        address = started(run)
        streamed = pieces(address, {"prompt": "a", **GREEDY, "max_tokens": 40})
        next(streamed)
        run.kill(1)
        *_, last = streamed
        assert re.search("is missing|failed", last["error"]["message"])
        ended = run.wait()
        where = address.removeprefix("http://").split(":")
        with socket.socket() as probe:
            assert probe.connect_ex((where[0], int(where[1]))) != 0
    check_named(ended, 1)
    assert ended[0].code == 5
