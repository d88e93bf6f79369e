"""Runs of `python -m levanter.main.train_lm` in processes of their own: tiny, and compiled once for all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from helpers.processes import QUICK

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


def train(run: Path, *overrides: str, devices: int = 2, cache: Path, expect: int = 0) -> str:
    """Runs it to its end, and returns what it printed."""
    process = start(run, *overrides, devices=devices, cache=cache)
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
