"""`python -m levanter.main.serve` as a process: ready when its port opens, and how it ends."""

import signal
import time

import httpx
import pytest
from helpers.server_process import server_process

# A real process on a machine that has other things to do.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def process(tmp_path):
    """A server, and its address; its output is kept."""
    rows = {"max_rows": 2, "max_seq_len": 16_384}
    with server_process(tmp_path, inference=rows, drain_seconds=300) as found:
        yield found.process, found.url, found.lines


def begun(url: str, **more: object):
    """A stream whose first event has come."""
    body = {"prompt": [5, 6, 7], "ignore_eos": True, "stream": True, **more}
    return httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None)


def test_told_to_end_it_finishes_and_exits_with_0(process):
    found, url, lines = process
    with begun(url, max_tokens=200) as answer:
        events = answer.iter_lines()
        assert next(events).startswith("data: ")
        found.send_signal(signal.SIGTERM)
        rest = list(events)
    assert rest[-2] == "data: [DONE]" or rest[-1] == "data: [DONE]"
    assert any('"finish_reason":"length"' in line for line in rest)
    assert found.wait(300) == 0, lines


@pytest.mark.slow
def test_told_twice_it_exits_with_130(process):
    found, url, lines = process
    with begun(url, max_tokens=16_000) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
        found.send_signal(signal.SIGTERM)
        while not any("shutting down: running requests have 300 s" in line for line in lines):
            assert found.poll() is None, lines
            time.sleep(0.02)
        found.send_signal(signal.SIGTERM)
        assert found.wait(300) == 130, lines
