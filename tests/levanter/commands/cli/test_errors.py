"""What every entry point does where what it prints is not read, and how it says its own name."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import pytest
from helpers.legacy_documents import FOLDER

from levanter.commands.cli.errors import shell
from levanter.config import HelpRequested
from levanter.upstream.unsupported.entry_points import ABSENT
from levanter.upstream.unsupported.refusal import run_absent

OLD = str(FOLDER / "14_llama2_7b.yaml")
PROGRAMS = {
    "help": ("levanter.main.train_lm", "--help"),
    "a usage page": ("levanter.main.plan", "--help"),
    "argparse": ("levanter.main.migrate", "--help"),
    "what is not here": ("levanter.main.train_asr", "--help"),
    "a document": ("levanter.main.migrate", OLD),
    "a launcher": ("levanter.infra.launch", "--help"),
}


def without_reader(*words: str) -> tuple[int, str]:
    """Runs a module with its standard output into a pipe that nobody reads; its exit code and standard error."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            stdout=writes,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=240,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
    finally:
        os.close(writes)
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_output_that_nobody_reads_is_no_traceback(name: str):
    code, said = without_reader(*PROGRAMS[name])
    assert said == ""
    assert code == (0 if "--help" in PROGRAMS[name] and name != "a launcher" else 1)


@contextmanager
def no_reader() -> Iterator[None]:
    """Standard output is a pipe that nobody reads."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as nowhere, redirect_stdout(nowhere):
        yield
        nowhere.flush()  # Python's own, at the end, fails no more


def printing(text: str) -> int:
    sys.stdout.write(text)
    return 0


@pytest.mark.parametrize("size", [10, 10**6])
def test_the_shell_ends_quietly(size: int, capsys):
    def help_of_many_keys() -> int:
        raise HelpRequested("x" * size)

    with no_reader():
        assert shell(help_of_many_keys) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("size", [10, 10**6])
def test_a_result_that_nobody_reads_is_no_success(size: int, capsys):
    with no_reader():
        assert shell(lambda: printing("x" * size)) == 1
    assert capsys.readouterr().err == ""


def test_another_pipe_that_breaks_is_an_error():
    def talk_to_a_process_that_is_gone() -> int:
        reads, writes = os.pipe()
        os.close(reads)
        with os.fdopen(writes, "wb", buffering=0) as pipe:
            return pipe.write(b"hello")

    with pytest.raises(BrokenPipeError):
        shell(talk_to_a_process_that_is_gone)


@pytest.mark.slow
def test_help_of_a_script(tmp_path):
    """`@levanter.config.main` in a user's own file, of which the help says how to run it."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import dataclasses, levanter, levanter.config\n"
        "from levanter.trainer import TrainerConfig\n"
        "@dataclasses.dataclass(frozen=True, kw_only=True)\n"
        "class Mine:\n"
        "    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)\n"
        "def run(config: Mine):\n"
        "    pass\n"
        "levanter.config.main(run)()\n"
    )
    shown = subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith(f"usage: python {path} --config_path FILE")
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as nowhere:
        done = subprocess.run(
            [sys.executable, str(path), "--help"], stdout=nowhere, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_help_names_the_program(name: str, capsys):
    assert run_absent(name, ["--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m levanter.main.{name} --config_path FILE")
