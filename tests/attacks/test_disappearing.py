"""What a run relies on disappears while it runs: its partial results, its output folder, the working folder."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.attacks import NEVER, Attack, judge, strike
from helpers.tiny_runs import make_inputs

from levanter.checkpoint.checkpointer import Checkpointer
from levanter.eval.needles.results import NeedleStore
from levanter.inference import output_writer
from levanter.inference.output_writer import OutputWriter
from levanter.memorization.partial_results import PartStore

OK, BAD = 0, 2


def removes(folder: Path, of: type, method: str, monkeypatch: pytest.MonkeyPatch, *, calls: int = 1) -> list[int]:
    """Removes a folder after a method was called; the list has an item for each removal."""
    real: Callable[..., object] = getattr(of, method)
    removed: list[int] = []
    done = [0]

    def and_remove(self: object, *args: object, **keywords: object) -> object:
        result = real(self, *args, **keywords)
        done[0] += 1
        if folder.is_dir() and done[0] == calls:
            shutil.rmtree(folder)
            removed.append(done[0])
        return result

    monkeypatch.setattr(of, method, and_remove)
    return removed


def test_the_parts_of_generated_answers(tmp_path, monkeypatch):
    """An output with fewer lines than requests must not appear; the next run writes what is missing."""
    command = make_inputs(tmp_path).generate(tmp_path / "run")[1:]
    monkeypatch.setattr(output_writer, "PART_LINES", 2)
    with monkeypatch.context() as patched:
        removed = removes(tmp_path / "run" / "answers.jsonl.parts", OutputWriter, "store", patched)
        says = ("answers.jsonl.parts: it holds", "of the 7 responses that were stored there", "start the command again")
        attack = Attack(name="parts", command="generate", words=command, code=BAD, says=says)
        judge(attack, strike(attack, tmp_path))
        assert removed
    assert not (tmp_path / "run" / "answers.jsonl").exists()
    judge(again := Attack(name="again", command="generate", words=command, code=OK), strike(again, tmp_path))
    lines = (tmp_path / "run" / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt_tokens"] for line in lines] == sorted(
        json.loads(line)["prompt_tokens"] for line in lines
    )
    assert len(lines) == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "of", "method", "folder"),
    [
        ("eval_careless_lm", PartStore, "write", "out"),
        ("eval_careless_lm", PartStore, "write", "out/a-small-book/parts"),
        ("eval_needles", NeedleStore, "write", "out/parts"),
    ],
    ids=["book", "parts of a book", "parts of needles"],
)
def test_the_folder_of_results(tmp_path, monkeypatch, command, of, method, folder):
    """What was computed is in memory, so nothing is lost; or the lease that was lost is named."""
    words = getattr(make_inputs(tmp_path), command)(tmp_path / "run")[1:]
    target = tmp_path / "run" / folder
    removed: list[int] = []
    with monkeypatch.context() as patched:
        removed = removes(target, of, method, patched)
        outcome = strike(Attack(name=command, command=command, words=words, code=OK), tmp_path)
    assert removed or not target.exists()
    assert not [never for never in NEVER if never in outcome.text], outcome.text[-3000:]
    assert outcome.code == OK or "lease" in outcome.text, outcome.text[-3000:]
    again = Attack(name="again", command=command, words=words, code=OK)
    judge(again, strike(again, tmp_path))


@pytest.mark.slow
def test_the_checkpoints_of_a_run(tmp_path, monkeypatch):
    """A save whose folder goes while it is written is an error of the disk; otherwise the next one makes it anew."""
    words = make_inputs(tmp_path).train_lm(tmp_path / "run", steps=6)[1:]
    removed = removes(tmp_path / "run" / "checkpoints", Checkpointer, "save", monkeypatch)
    outcome = strike(Attack(name="checkpoints", command="train_lm", words=words, code=OK), tmp_path)
    assert removed and not [never for never in NEVER if never in outcome.text], outcome.text[-3000:]
    saved = tmp_path / "run" / "checkpoints" / "run" / "step-6" / "metadata.json"
    assert saved.exists() if outcome.code == OK else (outcome.code == BAD and "checkpoints" in outcome.text)


@contextlib.contextmanager
def without_working_folder(tmp_path: Path):
    """The working folder of this process is one that has been removed."""
    here, gone = os.getcwd(), tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        yield
    finally:
        os.chdir(here)


@pytest.mark.parametrize(
    ("relative", "code", "says"),
    [
        pytest.param(False, OK, ("bits/byte",), marks=pytest.mark.slow),
        (True, BAD, ("the working folder of this process does not exist any more", "start in another folder")),
    ],
    ids=["absolute", "relative"],
)
def test_the_working_folder(tmp_path, relative, code, says):
    words = make_inputs(tmp_path).eval_lm(tmp_path / "run")[1:]
    words = [*words, "--output_path=out.json"] if relative else words
    with without_working_folder(tmp_path):
        attack = Attack(name="folder", command="eval_lm", words=words, code=code, says=says)
        judge(attack, strike(attack, tmp_path))


@pytest.mark.parametrize(
    ("streams", "shown"),
    [("2>&-", "stdout"), ("<&- >&- 2>&-", None), pytest.param("<&- >&-", "stderr", marks=pytest.mark.slow)],
)
def test_an_error_with_closed_streams(tmp_path, streams, shown):
    """Runs with closed streams are in `test_signals.py`; an error is shown where there is a stream."""
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" -m levanter.main.eval_lm --config_path nope.yaml {streams}', sys.executable],
        capture_output=True, text=True, cwd=tmp_path, timeout=240,
    )  # fmt: skip
    assert done.returncode == BAD
    texts = {"stdout": done.stdout, "stderr": done.stderr}
    assert {name for name, text in texts.items() if "no such file: nope.yaml" in text} == ({shown} if shown else set())
    assert not any(never in text for never in NEVER for text in texts.values())
