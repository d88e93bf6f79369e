"""Interrupts end the program wherever they come: in callbacks that may not raise, and in libraries that do not ask."""

import signal
import subprocess
import sys

import pytest

from levanter.commands.cli.errors import shell
from levanter.commands.cli.main import run_command
from levanter.commands.cli.signals import interrupts_retained, raise_if_interrupted
from levanter.commands.evaluate.config import EvalLmConfig

IN_A_COLLECTION = """
import gc, signal, time
from levanter.commands.cli.signals import interrupts_retained

def interrupted(phase, _):
    if phase == "start":
        gc.callbacks.remove(interrupted)
        signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()
gc.callbacks.append(interrupted)
try:
    with interrupts_retained():
        gc.collect()
        time.sleep(60)
except KeyboardInterrupt:
    print("raised again")
"""


def test_an_interrupt_inside_of_garbage_collection_is_raised_again():
    """In a process of its own: what is collected in this one is what hundreds of tests before have left."""
    command = [sys.executable, "-c", IN_A_COLLECTION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, "raised again\n"), done.stderr


def test_other_exceptions_are_told_of_as_before(monkeypatch):
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)

    class Bad:
        def __del__(self):
            raise ValueError("in a destructor")

    with interrupts_retained():
        Bad()
    assert [found.exc_type for found in heard] == [ValueError]
    assert sys.unraisablehook == heard.append


BUSY = """
import hashlib, threading
from levanter.commands.cli.signals import interrupts_retained
with interrupts_retained(message_seconds=0.2):
    # Said by another thread when this one has been inside of the library for a while.
    threading.Timer(0.5, print, ["busy"], {"flush": True}).start()
    # As a compiler does: the interpreter is free for other threads, and nobody looks for signals before this returns.
    hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 500_000_000)
"""


def test_the_second_interrupt_ends_what_does_not_look_for_the_first():
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "busy\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "\n"
        assert process.stderr.readline().startswith("interrupted: ending as soon as the current operation returns")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130


def test_one_interrupt_of_a_program_that_looks_for_them_ends_it_without_a_word(capsys):
    ended = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), interrupts_retained(message_seconds=5.0, end=ended.append):
            signal.raise_signal(signal.SIGINT)
    # Each program has a first interrupt of its own.
    assert not ended and capsys.readouterr().err == ""


def swallowing():
    """As libraries do around imports that may fail."""
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:  # noqa: BLE001 — that is what they do
        return
    raise AssertionError("it was not raised")


def test_an_interrupt_that_a_library_swallowed_is_raised_between_two_parts():
    def main():
        swallowing()
        raise_if_interrupted()

    with pytest.raises(KeyboardInterrupt), interrupts_retained():
        main()
    with interrupts_retained():
        raise_if_interrupted()  # that of the program before does not count


def test_what_a_swallowed_interrupt_leads_to_is_an_interrupt(capsys):
    def main():
        swallowing()
        raise AttributeError("partially initialized module has no attribute")

    assert shell(main) == 130
    assert "interrupted" in capsys.readouterr().err


def test_the_door_does_not_go_on_behind_imports_that_swallow(monkeypatch, capsys):
    class Importing:
        name = "eval_lm"

        def config_class(self):
            return EvalLmConfig

        def load(self):
            # As a C++ module would find it: an exception here would abort the process.
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("levanter.commands.cli.main.ENTRY_POINTS", {"eval_lm": Importing()})
    assert run_command("eval_lm", ["--hf_checkpoint", "not/there"]) == 130
    assert "interrupted" in capsys.readouterr().err
