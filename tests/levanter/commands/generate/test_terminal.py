"""A model at the terminal: answers are transformers', Ctrl-C ends one and no more, what is refused is said."""

import io
import json
import os
import signal
from typing import Any

import numpy as np
import pytest
from helpers.hf_folder import tensors, write_folder

from levanter.commands.cli.devices import local_target
from levanter.commands.cli.errors import run_entry_point
from levanter.commands.generate import generate, repl
from levanter.commands.generate.chat_session import Dialogue
from levanter.commands.generate.engine_setup import running
from levanter.commands.generate.prompts import prompt_reader
from levanter.commands.generate.repl_config import InferenceReplConfig
from levanter.commands.generate.terminal import Terminal
from levanter.config import ExplicitKeys, load_written
from levanter.inference.engine import make_schedule
from levanter.mesh import local_devices

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
TRAINER = {"mp": "f32", "tracker": {"type": "noop"}, "mesh": {"axes": {"data": -1, "model": 2}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    where = tmp_path_factory.mktemp("terminal") / "model"
    weights = {
        name: each if "norm" in name else (0.3 * each.astype(np.float32)).astype(each.dtype)
        for name, each in tensors().items()
    }
    write_folder(where, weights=weights, adds_bos=True)
    (where / "chat_template.jinja").write_text(TEMPLATE)
    return where


@pytest.fixture(scope="module")
def theirs(model):
    """What transformers writes behind a text, token by token the likeliest."""
    import tokenizers
    import torch
    import transformers

    net: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))

    def written(text: str, new: int, *, begin: tuple[int, ...] = (1,)) -> str:
        ids = [*begin, *tokenizer.encode(text, add_special_tokens=False).ids]
        options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
        with torch.no_grad():
            made = net.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
        return tokenizer.decode(made)

    return written


def document(model, tmp_path, **more) -> list[str]:
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({"trainer": TRAINER, **more}))
    return ["--config_path", str(path)]


@pytest.fixture(scope="module")
def dialogue(model, tmp_path_factory, devices):
    sampling = {"temperature": 0, "max_tokens": 12}
    words = document(
        model,
        tmp_path_factory.mktemp("config"),
        **{"hf_checkpoint": str(model), "interactive": True, "sampling": sampling},
        inference={"max_rows": 1, "prefill_chunk": 8, "steps": 2},
    )
    loaded = load_written(generate.GenerateConfig, words)
    found = local_devices(loaded.config.trainer.mesh)
    plan = generate.describe(loaded.config, local_target(found), written=loaded.written).check()
    schedule = make_schedule(plan.work.programs)
    reader = prompt_reader(plan.work, schedule)
    with running(plan.work, plan.mesh.build(found.devices), schedule=schedule, reader=reader, show=False) as ready:
        assert ready.engine is not None
        yield Dialogue(ready.engine, reader, reader.defaults)


def test_pieces_are_the_text_and_a_stopped_answer_harms_no_other(dialogue, theirs):
    pieces: list[str] = []
    said = dialogue.say(dialogue.complete("the cat sat"), pieces.append)
    expected = theirs("the cat sat", 12)
    assert said.text == "".join(pieces) == expected and said.reason in ("stop", "length")
    few: list[str] = []
    stopped = dialogue.say(dialogue.complete("the cat sat"), few.append, lambda: len(few) >= 2)
    assert stopped.reason == "cancelled" and 2 <= stopped.tokens < 12
    assert expected.startswith(stopped.text) and stopped.text == "".join(few)
    assert dialogue.say(dialogue.complete("the cat sat"), pieces.append).text == expected


def test_a_text_that_nearly_fills_the_context_gets_what_is_left(dialogue):
    said = dialogue.say(dialogue.complete("a b " * 15), lambda _: None)
    assert said.prompt_tokens + said.tokens <= 64 and (said.reason == "stop" or said.prompt_tokens + said.tokens == 64)
    with pytest.raises(ValueError, match="more than the context"):
        dialogue.say(dialogue.complete("a b " * 60), lambda _: None)
    with pytest.raises(ValueError, match="surrogate"):
        dialogue.say(dialogue.complete("a\udc80"), lambda _: None)


class Typed:
    """Lines that somebody types, and what is written."""

    def __init__(self, *lines: str):
        self.lines, self.out = list(lines), ""

    def read(self, prompt: str) -> str:
        if not self.lines:
            raise EOFError
        self.out += prompt
        return self.lines.pop(0)

    def write(self, text: str) -> None:
        self.out += text


def test_a_session(dialogue, theirs):
    typed = Typed("hi", "", "x", "/text the mat", "/txt a", "/new", "hi", "/exit", "never read")
    session = Terminal(dialogue, write=typed.write, read=typed.read).run()
    first = theirs("u:hi\na:", 12, begin=())
    second = theirs(f"u:hi\na:{first}\nu:x\na:", 12, begin=())
    assert [typed.out.count(f"{text}\n[") for text in (first, second, theirs("the mat", 12))] == [2, 1, 1]
    assert session.answers == 4 and session.refused == {5: "/txt: no such command; did you mean `/text`?"}
    assert typed.lines == ["never read"]


def test_ctrl_c_ends_an_answer_and_at_a_pipe_the_program(dialogue, theirs):
    typed = Typed("/text the cat sat", "/text the mat")
    pressed: list[int] = []

    def write(text: str) -> None:
        typed.write(text)
        if text.strip() and typed.out.startswith("a conversation") and "> " in typed.out and not pressed:
            pressed.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    session = Terminal(dialogue, write=write, read=typed.read).run()
    assert ", stopped]" in typed.out and session.answers == 2
    assert f"{theirs('the mat', 12)}\n[" in typed.out

    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Terminal(dialogue, write=typed.write, read=interrupted).run()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def run_repl(model, tmp_path, *words: str, **more) -> int:
    given = document(model, tmp_path, **{"checkpoint": str(model), "temperature": 0, "max_tokens": 8, **more})
    return run_entry_point(InferenceReplConfig, repl.main, [*given, *words])


def test_the_repl_runs_upstreams_commands(model, theirs, tmp_path, capsys, monkeypatch, devices):
    service = {"max_pages_per_seq": 8, "page_size": 8, "max_seqs": 1, "max_pages": 32, "hbm_utilization": 0.5}
    server = {"service": service, "port": 10243}
    batch = [{"prompt": "the mat"}, {"messages": [{"role": "user", "content": "x"}]}, {}]
    lines = ["complete the cat sat", "chat hi", "load other", "fly", "chat", "x", "exit", f"batch {json.dumps(batch)}"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert run_repl(model, tmp_path, server=server) == 2
    out = capsys.readouterr().out
    for text, begin, times in (
        *(("the cat sat", (1,), 1), ("u:hi\na:", (), 1)),
        *(("u:x\na:", (), 2), ("the mat", (1,), 1)),
    ):
        assert out.count(f"{theirs(text, 8, begin=begin)}\n[") == times, text
    assert "error: load: restart with another checkpoint" in out
    assert "error: fly: no such command" in out and "error: batch: a request needs `prompt`" in out
    assert "server.service.hbm_utilization: without effect" in out and "server.port: without effect" in out
    assert "5 answers" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--command", "serve"], "command: serve: `python -m levanter.main.serve` is the server"),
        (["--command", "fly"], "command: one of chat, complete, batch, help"),
        (["--command", "complete"], "args: `complete` needs an argument"),
    ],
)
def test_commands_that_cannot_be(model, tmp_path, words, said, capsys):
    assert run_repl(model, tmp_path, *words) == 2
    assert said in capsys.readouterr().err


def test_sizes_that_upstream_has_where_a_document_says_nothing():
    config = InferenceReplConfig(checkpoint="a")
    made = config.generating(ExplicitKeys.in_python(config), ours=False).inference
    assert (made.max_rows, made.max_seq_len, made.page_size, made.pages) == (2, 64, 8, 512)
    assert (made.prefill_chunk, made.steps, made.allocation) == (64, 4, "paged")


def test_files_and_a_terminal_do_not_go_together(model, tmp_path):
    words = document(model, tmp_path, hf_checkpoint=str(model), interactive=True, input_path="a.jsonl")
    with pytest.raises(ValueError, match="interactive: reads prompts from the terminal"):
        load_written(generate.GenerateConfig, words)
