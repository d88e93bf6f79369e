"""Outputs that are devices, pipes, sockets, links, folders: written into, followed or refused, and never replaced."""

import json
import os
import socket
import stat
import threading
from pathlib import Path

import pytest
from helpers.attacks import Attack, Outcome, judge, strike, table
from helpers.tiny_runs import make_inputs

OK, BAD = 0, 2


def node(path: Path, kind: int, of: str) -> str:
    """A device of our own: what is attacked here used to destroy it."""
    try:
        os.mknod(path, 0o666 | kind, os.stat(of).st_rdev)
    except PermissionError:
        pytest.skip("this user may not make devices")
    return str(path)


def null(folder: Path) -> str:
    return node(folder / "null", stat.S_IFCHR, "/dev/null")


def full(folder: Path) -> str:
    return node(folder / "full", stat.S_IFCHR, "/dev/full")


def disk(folder: Path) -> str:
    """A disk that is not there: no driver has this number."""
    try:
        os.mknod(folder / "disk", 0o666 | stat.S_IFBLK, os.makedev(240, 255))
    except PermissionError:
        pytest.skip("this user may not make devices")
    return str(folder / "disk")


def pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


def listening(folder: Path) -> str:
    here = os.getcwd()
    os.chdir(folder)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    os.chdir(here)
    return str(folder / "socket")


def link(folder: Path) -> str:
    (folder / "target").write_text("old")
    (folder / "link").symlink_to("target")
    return str(folder / "link")


def link_to_nothing(folder: Path) -> str:
    (folder / "link").symlink_to("elsewhere/new")
    return str(folder / "link")


def circle(folder: Path) -> str:
    (folder / "circle").symlink_to("circle")
    return str(folder / "circle")


def a_folder(folder: Path) -> str:
    (folder / "there").mkdir()
    return str(folder / "there")


def evaluated(place):
    def words(folder: Path) -> list[str]:
        return [*make_inputs(folder).eval_lm(folder / "run")[1:], f"--output_path={place(folder)}"]

    return words


def shown(place):
    def words(folder: Path) -> list[str]:
        return [*make_inputs(folder).viz_logprobs(folder / "run")[1:], f"--path={place(folder)}"]

    return words


def planned(place, flag="--json"):
    def words(folder: Path) -> list[str]:
        command = make_inputs(folder).eval_lm(folder / "run")[1:]
        return ["eval_lm", *command, "--target", "v4-16", "--no-compile", flag, place(folder)]

    return words


def tracked(place):
    def words(folder: Path) -> list[str]:
        tracker = f"{{type: json_file, output_path: {place(folder)}}}"
        return [*make_inputs(folder).eval_lm(folder / "run")[1:], f"--trainer.tracker={tracker}"]

    return words


def memorized(place):
    def words(folder: Path) -> list[str]:
        return make_inputs(folder).eval_careless_lm(folder / "run", output_base_path=place(folder))[1:]

    return words


def saved(place):
    def words(folder: Path) -> list[str]:
        made = make_inputs(folder)
        return made.train_lm(folder / "run", steps=2, trainer={"checkpointer": {"base_path": place(folder)}})[1:]

    return words


def read(key: str, place):
    """A special file where a run reads: nothing may wait for a writer, or propose the name that is there."""

    def words(folder: Path) -> list[str]:
        made = make_inputs(folder)
        name = place(folder)
        if key == "txt_path":
            return [*made.eval_careless_lm(folder / "run")[1:], f"--txt_path={name}"]
        if key == "input_path":
            return [*made.generate(folder / "run")[1:], f"--input_path={name}"]
        return [*made.eval_lm(folder / "run")[1:], f"--{key}={[name] if key.endswith('urls') else name}"]

    return words


URLS = "data.components.docs.source.validation_urls"
NOT_READ = ("no such file", "did you mean")
REFUSED = "a folder will be written"
ATTACKS = [
    Attack(name="null", command="eval_lm", words=evaluated(null), code=OK, says=("docs",)),
    Attack(name="full", command="eval_lm", words=evaluated(full), code=BAD,
           says=("full: cannot be written (No space left on device)", "bits/byte", '"overall": {')),
    Attack(name="disk", command="eval_lm", words=evaluated(disk), code=BAD, says=("output_path", "is a disk")),
    Attack(name="socket", command="eval_lm", words=evaluated(listening), code=BAD, says=("output_path", "is a socket")),
    Attack(name="folder", command="eval_lm", words=evaluated(a_folder), code=BAD, says=("output_path", "is a folder")),
    Attack(name="circle", command="eval_lm", words=evaluated(circle), code=BAD, says=("output_path", "leads back")),
    Attack(name="pipe-unread", command="eval_lm", words=evaluated(pipe), code=BAD,
           says=("is a pipe without a reader", '"overall": {')),
    Attack(name="link", command="eval_lm", words=evaluated(link), code=OK),
    Attack(name="link-to-nothing", command="eval_lm", words=evaluated(link_to_nothing), code=OK),
    Attack(name="page-null", command="viz_logprobs", words=shown(null), code=OK),
    Attack(name="page-full", command="viz_logprobs", words=shown(full), code=BAD, says=("it was kept in",)),
    Attack(name="plan-null", command="plan", words=planned(null), code=OK, says=("GiB",)),
    Attack(name="plan-full", command="plan", words=planned(full, "--html"), code=BAD,
           says=("GiB", "--html", "No space")),
    Attack(name="plan-disk", command="plan", words=planned(disk), code=BAD,
           says=("--json", "is a disk"), never=("GiB",)),
    Attack(name="documents-pipe", command="eval_lm", words=read(URLS, pipe), code=BAD,
           says=("pipe: is a pipe, not a regular file; files are read more than once",), never=NOT_READ),
    Attack(name="documents-socket", command="eval_lm", words=read(URLS, listening), code=BAD,
           says=("socket: is a socket, not a regular file",), never=NOT_READ),
    Attack(name="book-pipe", command="eval_careless_lm", words=read("txt_path", pipe), code=BAD,
           says=("pipe: is a pipe, not a regular file",), never=NOT_READ),
    Attack(name="checkpoint-pipe", command="eval_lm", words=read("hf_checkpoint", pipe), code=BAD,
           says=("pipe: it is a pipe, and a checkpoint is a folder",), never=NOT_READ),
    Attack(name="prompts-pipe", command="generate", words=read("input_path", pipe), code=BAD, says=("is a pipe",),
           never=NOT_READ),
    Attack(name="tracker", command="eval_lm", words=tracked(null), code=BAD, says=("tracker.output_path", REFUSED)),
    Attack(name="memorization", command="eval_careless_lm", words=memorized(null), code=BAD,
           says=("output_base_path", "is a")),
    Attack(name="checkpoints", command="train_lm", words=saved(null), code=BAD,
           says=("trainer.checkpointer.base_path",)),
]  # fmt: skip
QUICK = ("full", "disk", "link", "tracker", "documents-pipe", "book-pipe", "checkpoint-pipe")
KINDS = {"null": stat.S_ISCHR, "full": stat.S_ISCHR, "disk": stat.S_ISBLK, "socket": stat.S_ISSOCK,
         "pipe": stat.S_ISFIFO, "there": stat.S_ISDIR, "link": stat.S_ISLNK, "circle": stat.S_ISLNK}  # fmt: skip


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=QUICK))
def test_special_files_stay_what_they_are(attack, tmp_path):
    judge(attack, strike(attack, tmp_path))
    for path in tmp_path.iterdir():
        if path.name in KINDS:
            assert KINDS[path.name](path.lstat().st_mode), path
    for name in ("target", "elsewhere/new"):
        if attack.name.startswith("link") and (tmp_path / name).exists():
            assert "overall" in json.loads((tmp_path / name).read_text())
            return
    assert not attack.name.startswith("link")


@pytest.mark.slow
def test_a_pipe_that_is_read(tmp_path):
    """`--output_path >(program)`, and FIFOs."""
    command = [*make_inputs(tmp_path).eval_lm(tmp_path / "run")[1:], f"--output_path={pipe(tmp_path)}"]
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    outcome: Outcome = strike(Attack(name="pipe", command="eval_lm", words=command, code=OK), tmp_path)
    assert outcome.code == OK, outcome.text[-3000:]
    reader.join(20)
    assert "overall" in json.loads(found[0]) and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
