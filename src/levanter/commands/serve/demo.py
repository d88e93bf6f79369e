"""Demo of the server: a small model over HTTP, queried with curl and OpenAI's client, then shut down.

    make demo-serve

The server is `levanter.main.serve` in a separate process, on a free port. The demo prints each request as a user would
type it, and the response.
"""

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from levanter.base.exit_codes import INTERNAL_ERROR, OK

READY = re.compile(r"ready: (http://\S+)")
SECONDS = 600.0
"""Timeout of every wait, in seconds."""
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}
CLIENT = """\
import sys
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Name three colours."}],
    max_tokens=32, seed=1, temperature=0.5, stream=True,
)
for chunk in answer:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
"""
COUNTED = ("levanter_requests_total", "levanter_tokens_total", "levanter_compiles_after_ready_total")
"""The metrics that the demo prints."""


def main(words: Sequence[str]) -> int:
    """Runs the demo.

    Args:
        words: the server's command line.

    Returns:
        The exit code: 0 if every request was answered and the server shut down cleanly.
    """
    with _server(words) as (process, url):
        succeeded = [_curl(url), _client(url)]
        with urllib.request.urlopen(f"{url}/metrics", timeout=SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        print("\n=== of its metrics")
        print("\n".join(line for line in lines if line.startswith(COUNTED)))
        print("\n=== SIGTERM")
        process.send_signal(signal.SIGTERM)
        code = process.wait(SECONDS)
    print(f"the server ended with exit code {code}")
    return OK if code == OK and all(succeeded) else INTERNAL_ERROR


@contextmanager
def _server(words: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts a server and yields it with its address once it is ready; stops it after the block."""
    command = [sys.executable, "-m", "levanter.main.serve", *words, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    # A thread, so that a server that prints nothing runs into the timeout of the queue.
    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.put(line)
        # None marks the end of the output: the server has exited.
        lines.put(None)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    try:
        while (line := lines.get(timeout=SECONDS)) is not None:
            if (match := READY.search(line)) is not None:
                yield process, match[1]
                break
        else:
            raise RuntimeError(f"the server ended with exit code {process.wait(SECONDS)} before it was ready")
    # Also after an error or a timeout, so that no server outlives the demo.
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reading.join()


def _curl(url: str) -> bool:
    """Sends a request with curl; returns whether it was answered."""
    body = json.dumps(QUESTION)
    print(f"\n=== curl {url}/v1/chat/completions -d '{body}'", flush=True)
    curl = shutil.which("curl")
    if curl is None:
        print("curl is not installed")
        return True
    command = [curl, "-sS", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    print(done.stdout or done.stderr)
    try:
        return bool(json.loads(done.stdout)["choices"][0]["message"]["content"].strip())
    except (ValueError, LookupError, TypeError):
        return False


def _client(url: str) -> bool:
    """Sends a request with the openai package; returns whether it was answered."""
    print(f"\n=== the openai package\n{CLIENT}\n---", flush=True)
    # A proxy of the environment would receive the request otherwise.
    environment = {**os.environ, "NO_PROXY": "127.0.0.1,localhost"}
    command = [sys.executable, "-c", CLIENT, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    print(done.stdout or done.stderr, end="")
    return done.returncode == 0 and bool(done.stdout.strip())
