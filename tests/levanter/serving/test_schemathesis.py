"""schemathesis over `/openapi.json` of a server in a process of its own: whatever it sends, answers are as declared.

It brings packages of its own, so it has an extra: `pip install -e ".[clients]"`. The minutes are LEVANTER_SCHEMATHESIS.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from helpers.server_process import server_process

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
MINUTES = float(os.environ.get("LEVANTER_SCHEMATHESIS", "5"))
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance"),
    *("response_schema_conformance", "negative_data_rejection", "unsupported_method"),
)
"""All but those about what a schema cannot say: how many tokens a context has, which ids a model has (400)."""


def asked(url: str, *words: str, folder: Path) -> None:
    """Has schemathesis send its requests; every answer has to pass."""
    command = [
        *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", words[0]),
        *(f"{url}/openapi.json", "--checks", ",".join(CHECKS), "--request-timeout", "120", *words[1:]),
        *("--continue-on-failure", "--suppress-health-check", "all"),
    ]
    # A client behind a proxy would ask that one.
    environment = {**os.environ, "NO_PROXY": "127.0.0.1,localhost"}
    limit = 60 * MINUTES + 900
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=limit)
    sys.stdout.write(done.stdout[-6000:])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_answers_are_as_declared(tmp_path):
    with server_process(tmp_path, inference={"prompt_logprobs": True}) as server:
        # First what is at the edges of each schema and just beyond them, then anything, for a while.
        asked(server.url, "run", "--phases", "examples,coverage", folder=tmp_path)
        asked(server.url, "fuzz", "--max-time", f"{60 * MINUTES:.0f}", folder=tmp_path)
        status = httpx.get(f"{server.url}/status", trust_env=False).json()
        assert status["state"] == "ready" and status["tokens"] > 0, json.dumps(status)
        counted = httpx.get(f"{server.url}/metrics", trust_env=False).text
        assert "levanter_compiles_after_ready_total 0\n" in counted
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(300) == 0, "".join(server.lines[-50:])
        assert not any("Traceback" in line for line in server.lines), "".join(server.lines[-50:])
