"""`generate` under attack: killed anywhere, run twice at once, on files that are none, on full disks."""

import contextlib
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.attacks import Attack, judge, strike, strike_apart, table
from helpers.processes import QUICK, TESTS
from helpers.tiny_runs import make_inputs

from levanter.inference import output_writer
from levanter.io.lease import LEASE
from levanter.io.lease_holder import Holder

OK, BAD = 0, 2
LOADING = ("loading weights", "generating")
"""What is said once weights are read."""


def words(folder: Path, **changes: str) -> list[str]:
    given = make_inputs(folder).generate(folder / "run")[1:]
    return [*given, *(f"--{key}={value}" for key, value in changes.items())]


def with_output(make: Callable[[Path], object]) -> Callable[[Path], list[str]]:
    def prepared(folder: Path) -> list[str]:
        make(folder / "out")
        return words(folder, output_path=str(folder / "out"))

    return prepared


def with_input(make: Callable[[Path], object]) -> Callable[[Path], list[str]]:
    def prepared(folder: Path) -> list[str]:
        make(folder / "in")
        return words(folder, input_path=str(folder / "in"))

    return prepared


def below_a_file(folder: Path) -> list[str]:
    (folder / "file").write_text("precious")
    return words(folder, output_path=str(folder / "file" / "below"))


def onto_the_prompts(folder: Path) -> list[str]:
    made = words(folder)
    return [*made, f"--output_path={folder / 'run' / '..' / 'run' / 'prompts.jsonl'}"]


def held(folder: Path) -> list[str]:
    """Somebody else writes there who is alive: this process."""
    made = words(folder)
    place = folder / "run" / "answers.jsonl.parts" / LEASE
    place.mkdir(parents=True)
    other = {**vars(Holder.here("generation run")), "id": "0" * 16}
    (place / "000001.json").write_bytes(Holder(**other).content())
    return made


ATTACKS = [
    Attack(name="output-folder", command="generate", words=with_output(Path.mkdir), code=BAD,
           says=("output_path", "is a folder"), never=LOADING),
    Attack(name="output-pipe", command="generate", words=with_output(os.mkfifo), code=BAD,
           says=("output_path", "is a pipe", "name a file"), never=LOADING),
    Attack(name="output-below-a-file", command="generate", words=below_a_file, code=BAD,
           says=("output_path", "is a file, not a folder"), never=LOADING),
    Attack(name="output-is-there", command="generate", words=with_output(Path.touch), code=BAD,
           says=("exists already",), never=LOADING),
    Attack(name="output-is-the-input", command="generate", words=onto_the_prompts, code=BAD,
           says=("output_path", "is the file of the prompts"), never=LOADING),
    Attack(name="input-pipe", command="generate", words=with_input(os.mkfifo), code=BAD,
           says=("input_path", "is a pipe"), never=LOADING),
    Attack(name="input-folder", command="generate", words=with_input(Path.mkdir), code=BAD,
           says=("is a folder",), never=LOADING),
    Attack(name="somebody-else", command="generate", words=held, code=BAD,
           says=("another process is writing here", "generation run", "give another output_path"), never=LOADING),
    Attack(name="nothing-but-rubbish", command="generate",
           words=with_input(lambda path: path.write_bytes(bytes(range(256)) * 40)), code=BAD,
           says=("line 1 is no request",)),
    Attack(name="empty", command="generate", words=with_input(Path.touch), code=OK, says=("0 answers",)),
]  # fmt: skip


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=("output-pipe", "output-is-the-input", "somebody-else")))
def test_what_cannot_be_written_or_read_is_refused_and_stays_what_it_is(attack, tmp_path):
    outcome = strike(attack, tmp_path)
    judge(attack, outcome)
    for name in ("in", "out"):
        there = tmp_path / name
        if "pipe" in attack.name and there.exists():
            assert stat.S_ISFIFO(there.stat().st_mode)
    if attack.name == "output-below-a-file":
        assert (tmp_path / "file").read_text() == "precious"
    if attack.name == "output-is-the-input":
        assert len((tmp_path / "run" / "prompts.jsonl").read_text().splitlines()) == 7
    if attack.name == "empty":
        assert (tmp_path / "run" / "answers.jsonl").read_bytes() == b""
    if attack.name == "nothing-but-rubbish":
        found = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
        assert found and all("error" in line for line in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["part-000000000", "part-000000003", "answers.jsonl"])
def test_with_room_again_the_same_command_does_the_rest(name, tmp_path, monkeypatch):
    """The disk is full from a part on, or when the output is made of them."""
    monkeypatch.setattr(output_writer, "PART_LINES", 1)
    expected = strike(Attack(name="whole", command="generate", words=words(tmp_path / "whole"), code=OK), tmp_path)
    assert expected.code == OK, expected.text
    own = output_writer.atomic_write

    @contextlib.contextmanager
    def full(path: str) -> Iterator[object]:
        with own(path) as file:
            yield file
            if os.path.basename(path).startswith(name):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made = words(tmp_path / "late")
    with monkeypatch.context() as patched:
        patched.setattr(output_writer, "atomic_write", full)
        says = (name, "No space left on device")
        attack = Attack(name=name, command="generate", words=made, code=BAD, says=says)
        judge(attack, strike(attack, tmp_path))
    assert not (tmp_path / "late" / "run" / "answers.jsonl").exists()
    assert not [path for path in tmp_path.rglob("*.tmp")]
    again = Attack(name=name, command="generate", words=made, code=OK)
    judge(again, strike(again, tmp_path))
    written, whole = (tmp_path / run / "run" / "answers.jsonl" for run in ("late", "whole"))
    assert written.read_bytes() == whole.read_bytes()


LINES = [
    {"id": "greedy", "prompt": "the cat sat", "temperature": 0, "max_tokens": 12, "logprobs": 3},
    *({"prompt": "def f(x):"[: n + 2], "n": n % 3 + 1, "max_tokens": 6 + n, "logprobs": 1} for n in range(6)),
    {"prompt": [5, 6, 7, 8], "temperature": 0, "max_tokens": 20},
    {"prompt": "日本語", "max_tokens": 9, "ignore_eos": True, "frequency_penalty": 1.0, "seed": 4},
    {"prompt": "the", "temperature": 0.5, "top_p": 0.9, "max_tokens": 9, "stop": ["cat"]},
]
POINTS = (
    *("begun", "token 1", "before part-", "within part-", "behind part-", "token 3", "within part-", "behind part-"),
    *("within answers", "behind answers"),
)
"""Where a run is killed, one after another: each goes on where the one before it was."""


@pytest.fixture
def killed(tmp_path):
    """How a run is started that dies at a point; and one that does not."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {QUICK}",
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent, TESTS.parent / "src"))),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def started(point: str, given: list[str]) -> subprocess.Popen[str]:
        script = str(Path(__file__).parent / "killed_generation.py")
        return subprocess.Popen(
            [sys.executable, script, point, *given],
            env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    return started


def asked(folder: Path, **inference: object) -> list[str]:
    given = make_inputs(folder).generate(folder / "run", **inference)[1:]
    (folder / "run" / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return given


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate(timeout=1200)
    return process.returncode, text


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("inference", [{}, {"allocation": "paged", "page_size": 4, "pages": 64}], ids=str)
def test_a_run_that_is_killed_at_ten_points_writes_what_one_run_writes(inference, killed, tmp_path):
    whole = tmp_path / "whole"
    code, text = ended(killed("never -", asked(whole)))
    assert code == OK, text
    expected = (whole / "run" / "answers.jsonl").read_bytes()
    assert len(expected.splitlines()) == len(LINES)
    given, out = asked(tmp_path / "again", **inference), tmp_path / "again" / "run" / "answers.jsonl"
    for point in POINTS:
        code, text = ended(killed(point, given))
        assert code == -signal.SIGKILL, f"{point}: {text}"
        assert out.exists() == (point == "behind answers")
    code, text = ended(killed("never -", given))
    assert code == OK, text
    assert out.read_bytes() == expected
    assert sorted(os.listdir(out.parent)) == sorted(os.listdir(whole / "run"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_of_two_runs_at_once_one_is_refused_and_the_other_writes_everything(killed, tmp_path):
    given, out = asked(tmp_path), tmp_path / "run" / "answers.jsonl"
    first = killed(f"wait {tmp_path}", given)
    try:
        while not (tmp_path / "holding").exists():
            assert first.poll() is None, first.communicate()[0]
            time.sleep(0.1)
        attack = Attack(
            name="second",
            command="generate",
            words=given,
            code=BAD,
            says=("generation run",),
            never=LOADING,
            seconds=300,
        )
        judge(attack, strike_apart(attack, tmp_path))
        assert not out.exists()
        (tmp_path / "go").touch()
        code, text = ended(first)
    finally:
        first.kill()
        first.wait()
    assert code == OK, text
    assert len(out.read_bytes().splitlines()) == len(LINES)
