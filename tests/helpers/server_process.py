"""`python -m levanter.main.serve` with a tiny model, as a process of its own."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from helpers.processes import QUICK, TESTS
from helpers.served import TRAINER, model_folder

PATHS = [str(TESTS.parent / "src"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {QUICK}",
    "PYTHONPATH": os.pathsep.join(PATHS),
}


@dataclass(frozen=True, kw_only=True)
class ServerProcess:
    """A server that answers.

    Attributes:
        process: it.
        url: its address.
        lines: what it has said so far.
    """

    process: subprocess.Popen[str]
    url: str
    lines: list[str]


@contextmanager
def server_process(folder: Path, **keys: object) -> Iterator[ServerProcess]:
    """A server that is ready; it is gone behind the block.

    Args:
        folder: for its model and its config.
        keys: of the config.
    """
    rows = {"max_rows": 4, "max_seq_len": 192, "prefill_chunk": 8, **keys.pop("inference", {})}  # type: ignore
    config = {"trainer": TRAINER, "inference": rows, "port": 0, **keys}
    with served_document(folder, json.dumps(config)) as found:
        yield found


@contextmanager
def served_document(folder: Path, document: str, *words: str) -> Iterator[ServerProcess]:
    """A server of a document; the model is said on its command line.

    Args:
        folder: for its model and its config.
        document: YAML.
        words: of the command line.
    """
    path, model = folder / "serve.yaml", model_folder(folder / "tiny")
    path.write_text(document)
    command = [sys.executable, "-m", "levanter.main.serve", "--config_path", str(path), "--hf_checkpoint", str(model)]
    command += words
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    ) as process:
        try:
            lines: list[str] = []
            for line in process.stdout or ():
                lines.append(line)
                if (match := re.match(r"ready: (http://\S+)", line)) is not None:
                    break
            else:
                raise AssertionError("".join(lines))
            # Whatever it says from here on is read, so that it can go on saying it.
            threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True).start()
            yield ServerProcess(process=process, url=match[1], lines=lines)
        finally:
            process.kill()
