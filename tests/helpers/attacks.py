"""Attacks on the entry points: a command line, and what a user must see of it.

Each table in `tests/attacks` has rows of `Attack`: the words of a command line (or a function that prepares a folder
and returns them), the exit code that is promised, and texts that must appear. What must never appear is the same for
all: a traceback, an assertion, a bare errno.
"""

import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

NEVER = ("Traceback (most recent call last)", "AssertionError", "[Errno ")
SECONDS = 20.0
"""No attack may take longer, on a quiet machine; a slow machine that runs other tests too has twelve times this."""
PATIENCE = 12.0


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One row of a table.

    Attributes:
        name: of the case, unique in its table.
        command: an entry point of `levanter.main`, e.g. `eval_lm`, `plan`.
        words: the command line, or what prepares a folder and returns the command line.
        code: the exit code that must come of it.
        says: texts that must appear in what is printed.
        never: texts that must not appear, beside `NEVER`.
        seconds: how long it may take.
    """

    name: str
    command: str
    words: Sequence[str] | Callable[[Path], Sequence[str]]
    code: int
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    seconds: float = SECONDS


@dataclass(frozen=True)
class Outcome:
    """What a user saw: the exit code, everything that was printed, how long it took.

    `code` is the negative number of a signal for a process that died of it.
    """

    code: int
    text: str
    seconds: float


class Hang(BaseException):
    """The attack took longer than it may. Not an `Exception`: nothing under test may catch it."""


def table(attacks: Sequence[Attack], *, in_make_test: int | Sequence[str] = 5) -> Sequence[object]:
    """The parameters of a test over a table: a sample of the rows in `make test`, the others slow.

    Args:
        attacks: the rows.
        in_make_test: how many rows, evenly spread over the table, or the names of those, `make test` runs.
    """
    names = [attack.name for attack in attacks]
    assert len(set(names)) == len(names), "two rows of one name"
    if isinstance(in_make_test, int):
        every = max(1, len(names) // max(1, in_make_test))
        quick = set(names[::every][:in_make_test])
    else:
        quick = set(in_make_test)
        assert quick <= set(names), f"no such rows: {sorted(quick - set(names))}"
    return [
        pytest.param(attack, id=attack.name, marks=() if attack.name in quick else (pytest.mark.slow,))
        for attack in attacks
    ]


def strike(attack: Attack, folder: Path) -> Outcome:
    """Runs an attack in this process, through the door that `python -m levanter.main.X` takes."""
    words = list(attack.words(folder)) if callable(attack.words) else list(attack.words)
    module = importlib.import_module(f"levanter.main.{attack.command}")
    printed = io.StringIO()
    begun = time.monotonic()
    with _within(attack.seconds * PATIENCE), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = _enter(module, attack.command, words)
    return Outcome(code, printed.getvalue(), time.monotonic() - begun)


def strike_apart(
    attack: Attack,
    folder: Path,
    *,
    environment: dict[str, str] | None = None,
    memory_bytes: int | None = None,
    during: Callable[[subprocess.Popen[str]], None] | None = None,
) -> Outcome:
    """Runs an attack as a process of its own: for signals, closed streams, limits of memory.

    Args:
        attack: the attack.
        folder: where it may write; the working directory.
        environment: variables over this process's.
        memory_bytes: the limit of the process's address space.
        during: is called with the running process, e.g. to send it a signal.
    """
    words = list(attack.words(folder)) if callable(attack.words) else list(attack.words)

    def limited() -> None:
        if memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", f"levanter.main.{attack.command}", *words],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=limited,
    )
    try:
        if during is not None:
            during(process)
        text, _ = process.communicate(timeout=attack.seconds * PATIENCE)
    except subprocess.TimeoutExpired as late:
        raise Hang(f"{attack.name}: still running after {attack.seconds * PATIENCE:.0f} s") from late
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return Outcome(process.returncode, text, time.monotonic() - begun)


def judge(attack: Attack, outcome: Outcome) -> None:
    """Asserts that a user saw what the table promises, all differences at once."""
    wrong = []
    if outcome.code != attack.code:
        wrong.append(f"exit code {outcome.code}, promised {attack.code}")
    wrong += [f"is not said: {text!r}" for text in attack.says if text not in outcome.text]
    wrong += [f"must not be said: {text!r}" for text in (*NEVER, *attack.never) if text in outcome.text]
    assert not wrong, f"{attack.name}: {'; '.join(wrong)}. What was printed:\n{outcome.text[-6000:]}"


def _enter(module: object, command: str, words: list[str]) -> int:
    """As the process would: whatever leaves the door is a traceback and exit code 1."""
    from levanter.commands.catalog import ENTRY_POINTS
    from levanter.commands.cli.errors import run_entry_point
    from levanter.commands.cli.main import run_command

    try:
        if command in ENTRY_POINTS:
            return run_command(command, words)
        # A door may be handed its configuration instead of words: `cache_dataset`, the demos.
        config = next(iter(inspect.signature(module.main).parameters.values())).annotation
        if dataclasses.is_dataclass(config):
            return run_entry_point(config, module.main, words)
        return module.main(words) or 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception:  # noqa: BLE001 - shown as the process would show it
        traceback.print_exc()
        return 1


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    def late(signum: int, frame: object) -> None:
        raise Hang(f"still running after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
