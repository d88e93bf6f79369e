"""Outputs that cannot be written: refused before weights are read, under their keys; at the end nothing is lost."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from helpers.attacks import Attack, judge, strike, table
from helpers.tiny_runs import make_inputs

BAD = 2
LOADING = ("loading weights", "scoring", "training:")
"""What is logged once weights are read."""


def blocked(folder: Path) -> str:
    """A place below a file."""
    (folder / "file").write_text("precious")
    return str(folder / "file" / "below")


def too_long(folder: Path) -> str:
    return str(folder / ("x" * 300) / "y")


def refusing(folder: Path) -> str:
    del folder
    return "fullstore://bucket/x"


def of(command: str, key: str, place: Callable[[Path], str], **more: object) -> Callable[[Path], list[str]]:
    def words(folder: Path) -> list[str]:
        made = make_inputs(folder)
        build = getattr(made, command)
        given = build(folder / "run", **more)[1:]
        return [*given, f"--{key}={place(folder)}"]

    return words


def planned(flag: str, place: Callable[[Path], str]) -> Callable[[Path], list[str]]:
    return lambda folder: [
        "eval_lm", *make_inputs(folder).eval_lm(folder / "run")[1:], "--target", "v4-16", "--no-compile",
        flag, place(folder),
    ]  # fmt: skip


def tracker(kind: str, key: str, place: Callable[[Path], str]) -> Callable[[Path], list[str]]:
    def words(folder: Path) -> list[str]:
        given = make_inputs(folder).eval_lm(folder / "run")[1:]
        return [*given, f"--trainer.tracker={{type: {kind}, {key}: {place(folder)}}}"]

    return words


TRAINING = {"steps": 2}
ROWS: list[tuple[str, str, Callable[[Path], list[str]], str]] = [
    ("eval", "eval_lm", of("eval_lm", "output_path", blocked), "output_path: "),
    ("eval-long", "eval_lm", of("eval_lm", "output_path", too_long), "has 300 bytes"),
    ("eval-store", "eval_lm", of("eval_lm", "output_path", refusing), "output_path: fullstore://bucket/x"),
    ("json-tracker", "eval_lm", tracker("json_file", "output_path", blocked), "tracker.output_path: "),
    ("event-files", "eval_lm", tracker("tensorboard", "logdir", blocked), "tracker.logdir: "),
    ("wandb-copy", "eval_lm", tracker("wandb", "replicate_path", blocked), "tracker.replicate_path: "),
    ("page", "viz_logprobs", of("viz_logprobs", "path", blocked), "path: "),
    ("memorization", "eval_careless_lm", of("eval_careless_lm", "output_base_path", blocked), "file, not a folder"),
    ("picture", "eval_careless_lm", of("eval_careless_lm", "plot_path", blocked), "plot_path: "),
    ("prepared", "eval_sliding_lm", of("eval_sliding_lm", "output_base_path", blocked), "file, not a folder"),
    ("logs", "train_lm", of("train_lm", "trainer.log_dir", blocked, **TRAINING), "trainer.log_dir: "),
    ("checkpoints", "train_lm", of("train_lm", "trainer.checkpointer.base_path", blocked, **TRAINING),
     "trainer.checkpointer.base_path: "),
    ("temporary", "train_lm", of("train_lm", "trainer.checkpointer.temporary_base_path", blocked, **TRAINING),
     "trainer.checkpointer.temporary_base_path: "),
    ("exports", "train_lm", of("train_lm", "hf_save_path", blocked, **TRAINING), "hf_save_path: "),
    ("exports-store", "train_lm", of("train_lm", "hf_save_path", refusing, **TRAINING), "fullstore://bucket/x"),
    ("plan-json", "plan", planned("--json", blocked), "--json: "),
    ("plan-html", "plan", planned("--html", blocked), "--html: "),
    ("plan-text", "plan", planned("--keep_hlo", blocked), "--keep_hlo: "),
]  # fmt: skip
EARLY = [
    Attack(name=name, command=command, words=words, code=BAD, says=(says,), never=LOADING)
    for name, command, words, says in ROWS
]
QUICK = ("eval", "eval-store", "json-tracker", "picture", "checkpoints", "plan-html")


class FullStore(fsspec.get_filesystem_class("memory")):
    """A store whose quota is used up: it takes names, and no bytes."""

    protocol = "fullstore"

    def pipe_file(self, path: str, value: bytes, **more: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


fsspec.register_implementation("fullstore", FullStore, clobber=True)


@pytest.mark.parametrize("attack", table(EARLY, in_make_test=QUICK))
def test_refused_before_weights_are_read(attack, tmp_path):
    judge(attack, strike(attack, tmp_path))
    if (tmp_path / "file").exists():
        assert (tmp_path / "file").read_text() == "precious"


def breaks_behind_the_probe(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The disk of one output is full from the moment that its probe has been taken away."""
    real = os.fsync

    def full(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if name in path and path.startswith(str(folder)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)


LATE = {
    "out.json": ("eval_lm", ("bits/byte", '"overall": {', "out.json: cannot be written (No space left on device)")),
    "page.html": ("viz_logprobs", ("page.html: cannot be written", "it was kept in")),
    "report.md": ("perplexity_gap", ("bits per byte", "report.md: cannot be written", "it was kept in")),
    "samples.jsonl": ("eval_needles", ("values found", "samples.jsonl: cannot be written", "it was kept in")),
    "part-000000": ("eval_needles", ("part-000000.json: cannot be written (No space left on device)",)),
    "summary.json": ("eval_careless_lm", ("summary.json: cannot be written (No space left on device)", "free space")),
    "part-0": ("eval_careless_lm", ("part-0", "cannot be written (No space left on device)")),
}


@pytest.mark.parametrize(
    "name", [name if name == "out.json" else pytest.param(name, marks=pytest.mark.slow) for name in LATE]
)
def test_what_fails_at_the_end_has_been_shown(name, tmp_path, monkeypatch):
    command, says = LATE[name]
    words = getattr(make_inputs(tmp_path), command)(tmp_path / "run")[1:]
    with monkeypatch.context() as patched:
        breaks_behind_the_probe(tmp_path / "run", patched, name)
        attack = Attack(name=name, command=command, words=words, code=BAD, says=says)
        outcome = strike(attack, tmp_path)
    judge(attack, outcome)
    if command == "eval_lm":
        shown = outcome.text[outcome.text.index("{\n") : outcome.text.rindex("}\n") + 1]
        assert json.loads(shown)["overall"]["micro"]["tokens"] > 0
    assert not [path for path in tmp_path.rglob("*.tmp")]
    # With room again, the same command does the rest.
    again = Attack(name=name, command=command, words=words, code=0)
    judge(again, strike(again, tmp_path))
