"""Processes whose terminal goes, whose streams are closed, that are interrupted: nothing is lost, nothing hangs.

Each row is a process of its own, started by a shell that does something to its streams or its terminal.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.attacks import NEVER
from helpers.tiny_runs import make_inputs

OK, PREEMPTED, INTERRUPTED = 0, 75, 130
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
SECONDS = 250.0


def run(
    words: list[str],
    folder: Path,
    *,
    shell: str = "",
    before: str = "exec",
    during: Callable[[subprocess.Popen[bytes]], None] = lambda _: None,
    **environment: str,
) -> tuple[int, str, str]:
    """Exit code and what was printed; `shell` is what is done to the streams, `before` how the program is started."""
    process = subprocess.Popen(
        ["bash", "-c", f'{before} "$0" -m "$@" {shell}', sys.executable, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT, **environment},
    )
    try:
        during(process)
        out, err = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    texts = out.decode(errors="replace"), err.decode(errors="replace")
    for text in texts:
        assert not [never for never in NEVER if never in text], text[-4000:]
    return process.returncode, *texts


def evaluation(folder: Path) -> list[str]:
    return make_inputs(folder).eval_lm(folder / "run")


def training(folder: Path, *, steps: int) -> list[str]:
    return make_inputs(folder).train_lm(folder / "run", steps=steps)


def losses(folder: Path) -> int:
    """Steps that have been logged."""
    path = folder / "run" / "tracker" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum('"train/loss"' in line and '"metrics"' in line for line in lines)


def until_steps(folder: Path, number: int, then: Callable[[subprocess.Popen[bytes]], None]):
    def during(process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + SECONDS
        while losses(folder) < number and process.poll() is None:
            assert time.monotonic() < deadline, "no step was logged"
            time.sleep(0.05)
        then(process)

    return during


def saved_steps(folder: Path) -> list[int]:
    found = (folder / "run" / "checkpoints" / "run").glob("step-*/metadata.json")
    return sorted(int(re.findall(r"step-(\d+)", str(path))[-1]) for path in found)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGHUP, PREEMPTED),
        pytest.param(signal.SIGTERM, PREEMPTED, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, INTERRUPTED, marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_training(tmp_path, number, code):
    during = until_steps(tmp_path, 2, lambda process: process.send_signal(number))
    found, out, err = run(training(tmp_path, steps=100_000), tmp_path, during=during)
    assert found == code, err[-3000:]
    steps = saved_steps(tmp_path)
    # Told to end, a run is saved as it is; interrupted, it says what is there.
    if code == INTERRUPTED:
        assert ("the last checkpoint is of step" if steps else "no checkpoint was saved in") in err
    else:
        assert steps
    if code == PREEMPTED:
        assert steps[-1] >= losses(tmp_path) and f"step-{steps[-1]}" in out


@pytest.mark.slow
def test_nohup_keeps_its_meaning(tmp_path):
    during = until_steps(tmp_path, 2, lambda process: process.send_signal(signal.SIGHUP))
    found, out, err = run(training(tmp_path, steps=40), tmp_path, during=during, before="trap '' HUP; exec")
    assert found == OK and "done after 40 of 40 steps" in out, err[-3000:]


@pytest.mark.slow
def test_a_terminal_that_is_closed(tmp_path):
    """SIGHUP, and from then on every write to the terminal fails: the run is saved all the same."""
    controlling, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", *training(tmp_path, steps=100_000)],
        cwd=tmp_path,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,
    )
    os.close(terminal)
    os.set_blocking(controlling, False)
    deadline = time.monotonic() + SECONDS
    while losses(tmp_path) < 4 and process.poll() is None and time.monotonic() < deadline:
        try:
            os.read(controlling, 1 << 16)
        except BlockingIOError:
            time.sleep(0.05)
    os.close(controlling)
    process.send_signal(signal.SIGHUP)
    assert process.wait(SECONDS) == PREEMPTED
    assert saved_steps(tmp_path)[-1] >= losses(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "environment"),
    [
        ("2>&-", {}),
        (">&-", {}),
        ("<&- >&- 2>&-", {}),
        (">/dev/full", {}),
        ("2>/dev/full", {}),
        ("| true; exit ${PIPESTATUS[0]}", {}),
        ("", {"PYTHONIOENCODING": "ascii"}),
        ("", {"PYTHONIOENCODING": "latin-1"}),
        ("", {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
    ],
    ids=["no stderr", "no stdout", "no streams", "stdout full", "stderr full", "no reader", "ascii", "latin-1", "C"],
)
def test_streams_that_take_nothing_end_no_run(tmp_path, shell, environment):
    before = "" if shell.startswith("|") else "exec"
    code, out, _ = run(evaluation(tmp_path), tmp_path, shell=shell, before=before, **environment)
    # Whoever pipes a plan into `head` may have seen enough before the run has begun; what has begun ends.
    if not (tmp_path / "run" / "out.json").exists():
        assert (shell[:1], code) in [("|", 1), (">", 2)]
        return
    assert code == OK
    assert "overall" in json.loads((tmp_path / "run" / "out.json").read_text())
    if environment:
        assert "docs" in out and "replica 1" in out


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.2, 0.6, 1.0, 1.5, 2.0, 3.0])
def test_an_interrupt_while_things_are_imported(tmp_path, delay):
    def press(process: subprocess.Popen[bytes]) -> None:
        time.sleep(delay)
        process.send_signal(signal.SIGINT)

    process = subprocess.Popen(
        [sys.executable, "-m", *training(tmp_path, steps=100_000)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT},
    )
    try:
        press(process)
        process.communicate(timeout=60)
    finally:
        process.kill()
    # Before the shell has begun, Python itself dies of the signal.
    assert process.returncode in (INTERRUPTED, -signal.SIGINT)
