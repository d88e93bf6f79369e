"""Serve a model over HTTP on this machine, send it one request in OpenAI's format, and stop it.

    python examples/serve.py [MODEL]

MODEL is a Hugging Face folder, a Hub id or a .gguf file; the default is the small model in `config/needles/tiny`. The
server needs the extra `serve`: pip install -e '.[serve]'.
"""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

MODEL = Path(__file__).parents[1] / "config" / "needles" / "tiny"
OPTIONS = {
    "--port": "0",  # any free port; the server prints its address when it is ready
    "--inference.max_rows": "8",
    "--inference.max_seq_len": "256",
    "--trainer.mp": "f32",
    "--trainer.tracker.type": "noop",
}
TEXT = "One of the special magic numbers for tall-pepper is: 5600228. The grass is green. Here we go."
QUESTION = "What is the special magic number for tall-pepper mentioned in the provided text?"
ANSWER = "The special magic number for tall-pepper mentioned in the provided text is"
REQUEST = {"prompt": f"{TEXT}\n{QUESTION} {ANSWER}", "max_tokens": 4, "temperature": 0}
READY = "ready: "


def complete(address: str) -> str:
    """Sends `REQUEST` and returns the completion, as a client of OpenAI's API does with `{address}/v1` as base URL."""
    body = json.dumps(REQUEST).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    # A proxy of the environment must not receive requests to this machine.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as response:
        return json.load(response)["choices"][0]["text"]


def main(model: str) -> None:
    """Starts the server as a process of its own, waits until it is ready, and prints one completion."""
    words = [word for option in OPTIONS.items() for word in option]
    command = [sys.executable, "-m", "levanter.main.serve", "--hf_checkpoint", model, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as server:
        try:
            assert server.stdout is not None
            address = next(line.removeprefix(READY).strip() for line in server.stdout if line.startswith(READY))
            print(f"{ANSWER} {complete(address)}")
        finally:
            # The server completes running requests, then exits with code 0.
            server.send_signal(signal.SIGTERM)
            server.communicate()
    print(f"exit code {server.returncode}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(MODEL))
