"""Signs of life while something takes long: one line on a terminal, now and then a line in a log."""

import io
import time

import pytest

from levanter.commands.cli.heartbeat import heartbeat

pytestmark = pytest.mark.quick


class Stream(io.StringIO):
    def __init__(self, *, terminal: bool):
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def wait_for(self, text: str) -> str:
        deadline = time.monotonic() + 20
        while text not in self.getvalue() and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_what_takes_long_shows_that_it_lives(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = Stream(terminal=terminal)
    with heartbeat(stream, every=0.01) as say:
        say("compiling a program with quite a long name for v4-256")
        shown = stream.wait_for("… compiling")
    assert "s] compiling a program with quite a long name for v4-256\n" in shown
    ticks = [line for line in shown.replace("\r", "\n").split("\n") if "…" in line]
    assert ticks
    if terminal:
        # Written over itself, and never wider than the terminal.
        assert all(len(line.removeprefix("\x1b[2K")) < 40 for line in ticks)
        assert stream.getvalue().endswith("\x1b[2K")
    else:
        assert "\x1b" not in shown and "\r" not in shown


def test_the_ticker_ends_with_what_it_shows():
    stream = Stream(terminal=False)

    def interrupted() -> None:
        with heartbeat(stream, every=0.01) as say:
            say("working")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    shown = stream.getvalue()
    time.sleep(0.05)
    assert stream.getvalue() == shown
