"""Runs of `python -m levanter.main.train_lm` in processes of their own: tiny, and compiled once for all of them.

What became of one that was killed: the losses of all its attempts, and what calls itself a checkpoint.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from helpers.processes import QUICK

from levanter.checkpoint import CheckpointSource, find_checkpoints

RUN = """
data:
  tokenizer: passthrough
  vocab_size: {vocab}
  cache_dir: null
  shuffle: true
  components:
    numbers: {{type: direct, datasets: {{train: ["{text}"]}}}}
model: {{type: llama, max_seq_len: 16, hidden_dim: 16, intermediate_dim: 32, num_layers: 2, num_heads: 4,
        num_kv_heads: 4}}
optimizer: {{learning_rate: 0.01, warmup: 2}}
trainer:
  id: run
  tracker: {{type: json_file, output_path: "{folder}/logged"}}
  log_dir: "{folder}/logs"
  num_train_steps: {steps}
  train_batch_size: 8
  checkpointer: {{base_path: "{folder}/checkpoints", keep: []}}
  mesh: {{axes: {{data: -1, model: 1}}, shared_mapping: {{vocab: model}}}}
"""


def write_run(folder: Path, *, steps: int, vocab: int = 61) -> Path:
    """The configuration of a run that keeps everything in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = " ".join(str(n * n % vocab) for n in range(1200))
    path = folder / "run.yaml"
    path.write_text(RUN.format(text=text, folder=folder, steps=steps, vocab=vocab))
    return path


def environment(devices: int, cache: Path) -> dict[str, str]:
    """What a child process sees: so many virtual devices, and compiled programs of the ones before it."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK}",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def start(run: Path, *overrides: str, devices: int = 2, cache: Path, module: str = "train_lm") -> subprocess.Popen[str]:
    """Starts the entry point; what it prints is read with `communicate`."""
    return subprocess.Popen(
        [sys.executable, "-m", f"levanter.main.{module}", "--config_path", str(run), *overrides],
        env=environment(devices, cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(run: Path, *overrides: str, devices: int = 2, cache: Path, expect: int = 0, module: str = "train_lm") -> str:
    """Runs it to its end, and returns what it printed."""
    process = start(run, *overrides, devices=devices, cache=cache, module=module)
    try:
        said, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == expect, f"exit code {process.returncode}, not {expect}\n{said[-6000:]}"
    return said


def logged(folder: Path, metric: str = "train/loss") -> dict[int, list[float]]:
    """All values of a metric by step, over all attempts: a step that was taken twice has two."""
    found: dict[int, list[float]] = {}
    for file in sorted((folder / "logged").rglob("metrics.jsonl")):
        for line in file.read_text().splitlines(keepends=True):
            # The last line of a process that was killed may be half there.
            record = json.loads(line) if line.endswith("\n") else {}
            if metric in record.get("metrics", {}):
                found.setdefault(record["step"], []).append(record["metrics"][metric])
    return found


def count(folder: Path) -> int:
    """Lines logged so far, over all attempts."""
    return sum(file.read_bytes().count(b"\n") for file in (folder / "logged").rglob("metrics.jsonl"))


def wait_for_steps(process: subprocess.Popen, folder: Path, before: int, *, seconds: float = 250) -> None:
    """Waits until the process has logged a step."""
    deadline = time.monotonic() + seconds
    while count(folder) < before + 3:  # the configuration, and two steps
        assert process.poll() is None, process.communicate()[0][-5000:]
        assert time.monotonic() < deadline, "it takes no step"
        time.sleep(0.01)


def check_checkpoints(folder: Path) -> int:
    """Reads everything that calls itself complete; returns the highest step."""
    refs = find_checkpoints(str(folder / "checkpoints/run"))
    for ref in refs[-3:]:
        source = CheckpointSource(ref)
        assert int(source.read("step", ())) == ref.step == int(source.read("optimizer.1.count", ()))
        for name, info in source.tensors.items():
            whole = source.read(name, tuple(slice(0, size) for size in info.shape))
            assert np.isfinite(whole).all(), f"{ref}: {name}"
    return refs[-1].step if refs else 0


def newest(folder: Path) -> int:
    """The highest step of a complete checkpoint; reads no array, so it may be asked while the run deletes others."""
    refs = find_checkpoints(str(folder / "checkpoints/run"))
    return refs[-1].step if refs else 0


def resumed_from(said: str) -> int:
    found = re.search(r"resuming from the checkpoint of step (\d+) ", said)
    return int(found.group(1)) if found else 0


def compare(folder: Path, expected: dict[int, float], *, complete: bool = True) -> None:
    """Every step that was ever logged has the loss of the run that was not stopped, bit for bit."""
    found = logged(folder)
    if complete:
        assert sorted(found) == list(range(len(expected)))
    wrong = {step: values for step, values in found.items() if any(value != expected[step] for value in values)}
    assert not wrong
