"""`python -m levanter.main.serve` as a process: ready when its port opens, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from helpers.processes import QUICK, TESTS
from helpers.served import TRAINER, model_folder

# A real process on a machine that has other things to do.
pytestmark = pytest.mark.timeout(900)


PATHS = [str(TESTS.parent / "src"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {QUICK}",
    "PYTHONPATH": os.pathsep.join(PATHS),
}


@pytest.fixture
def process(tmp_path):
    """A server, and its address; its output is kept."""
    config = {
        "hf_checkpoint": str(model_folder(tmp_path / "tiny")),
        "trainer": TRAINER,
        "inference": {"max_rows": 2, "max_seq_len": 16_384, "prefill_chunk": 8},
        "port": 0,
        "drain_seconds": 300,
    }
    (tmp_path / "serve.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "levanter.main.serve", "--config_path", str(tmp_path / "serve.yaml")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    ) as found:
        try:
            lines = []
            for line in found.stdout or ():
                lines.append(line)
                if (match := re.match(r"ready: (http://\S+)", line)) is not None:
                    break
            else:
                pytest.fail("".join(lines))
            # Whatever it says from here on is read, so that it can go on saying it.
            threading.Thread(target=lambda: lines.extend(found.stdout or ()), daemon=True).start()
            yield found, match[1], lines
        finally:
            found.kill()


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
        while not any("ending: requests that are there have 300 s" in line for line in lines):
            assert found.poll() is None, lines
            time.sleep(0.02)
        found.send_signal(signal.SIGTERM)
        assert found.wait(300) == 130, lines
