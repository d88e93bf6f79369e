"""Runs of adapters that are killed, told to stop, or whose disk is full: nothing is lost, and nothing half is read."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers.adapted_models import write_adapter
from helpers.adapter_runs import tiny_llama
from helpers.train_processes import environment, logged, resumed_from, start, train, write_run
from safetensors.numpy import load_file, save_file

from levanter.checkpoint import find_checkpoints

pytestmark = pytest.mark.timeout(1800)
ADAPTER = (
    "{type: lora, r: 4, zero_init_b: true, a_init_mode: peft, dropout: 0.1, modules_to_save: [embed_tokens, norm]}"
)
SAVES = ("--trainer.checkpointer.save_interval", "0.2s", "--hf_save_steps", "5")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    pytest.importorskip("torch")
    return tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def words(folder: Path, base: Path) -> tuple[str, ...]:
    begun = ("--initialize_from_hf", str(base), "--use_hf_model_config", "true", "--adapter", ADAPTER)
    saved = ("--peft_save_path", str(folder / "adapters"), "--merged_hf_save_path", str(folder / "merged"))
    return (*begun, *saved, *SAVES)


def lines(folder: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in (folder / "logged").rglob("metrics.jsonl"))


def until(what, process: subprocess.Popen, seconds: float = 250) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()[0][-5000:]
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.002)


def whole_exports(folder: Path, straight: Path) -> int:
    """Whatever calls itself an export is one, the same bytes as those of the run that nothing happened to."""
    found = 0
    for kind, file in (("adapters", "adapter_model.safetensors"), ("merged", "model.safetensors")):
        for path in (folder / kind / "run").glob("step-*"):
            if path.suffix == "":
                other = straight / kind / "run" / path.name
                assert (path / file).read_bytes() == (other / file).read_bytes(), path
                assert (path / ("adapter_config.json" if kind == "adapters" else "config.json")).exists()
                found += 1
    return found


def half(folder: Path, kind: str) -> bool:
    """Whether an export is being written."""
    return any((folder / kind / "run").glob("*.incomplete*"))


def half_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint is being written: there is one that is not complete."""
    there = [path for path in (folder / "checkpoints/run").glob("*") if path.is_dir()]
    return len(there) > len(find_checkpoints(str(folder / "checkpoints/run")))


KILLED = """
import os, signal, sys
from levanter.checkpoint.checkpointer import Checkpointer
from levanter.commands.cli.main import run_command

complete, saved = Checkpointer._complete, []

def then_killed(self, ref):
    saved.append(ref)
    if len(saved) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return complete(self, ref)

Checkpointer._complete = then_killed
sys.exit(run_command("train_lm"))
"""


# Of killed training, `test_train_lm_kill.py` is in `make test`.
@pytest.mark.slow
def test_killed_while_it_saves(cache, tmp_path):
    """Between the arrays of its second checkpoint and what makes it one; the steps taken twice are the same."""
    run, steps = write_run(tmp_path, steps=15), 15
    saved = ("--peft_save_path", str(tmp_path / "adapters"), "--trainer.checkpointer.keep", "[{every: 6}]")
    command = [sys.executable, "-c", KILLED, "--config_path", str(run), "--adapter", ADAPTER, *saved]
    done = subprocess.run(command, env=environment(2, cache), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-4000:]
    first = set(logged(tmp_path))
    assert resumed_from(train(run, "--adapter", ADAPTER, *saved, cache=cache)) == 6
    found = logged(tmp_path)
    assert sorted(found) == list(range(steps)) and all(len(set(values)) == 1 for values in found.values())
    twice = [step for step, values in found.items() if len(values) == 2]
    assert twice and twice == [step for step in sorted(first) if step >= 6]
    (adapter,) = (tmp_path / "adapters/run").iterdir()
    assert adapter.name == "step-15" and (adapter / "adapter_config.json").exists()


@pytest.mark.slow
def test_killed_at_five_moments_and_told_to_stop(base, cache, tmp_path):
    """While it starts, between steps, during a save, while it writes an adapter, while it merges; then SIGTERM."""
    steps, moments = 60, random.Random(5)
    straight, folder = tmp_path / "straight", tmp_path / "killed"
    train(write_run(straight, steps=steps), *words(straight, base), cache=cache)
    expected = {step: value for step, (value,) in logged(straight).items()}
    run, seen = write_run(folder, steps=steps), []
    for moment in ("start", "between", "save", "adapters", "merged"):
        before = lines(folder)
        process = start(run, *words(folder, base), cache=cache)
        if moment == "start":
            time.sleep(moments.uniform(1.0, 4.0))
        else:
            until(lambda before=before: lines(folder) >= before + 3, process)
            if moment == "between":
                time.sleep(moments.uniform(0.0, 0.5))
            elif moment == "save":
                until(lambda: half_checkpoint(folder), process)
            else:
                until(lambda moment=moment: half(folder, moment), process)
        process.kill()
        said, _ = process.communicate(timeout=250)
        assert process.returncode in (-signal.SIGKILL, 0), said[-4000:]
        seen.append((moment, process.returncode))
        found = logged(folder)
        assert not {step for step, values in found.items() if any(value != expected[step] for value in values)}, moment
        whole_exports(folder, straight)
    assert [code for _, code in seen].count(-signal.SIGKILL) >= 4, seen
    if max(logged(folder), default=0) < steps - 20:
        before = lines(folder)
        process = start(run, *words(folder, base), cache=cache)
        until(lambda: lines(folder) >= before + 3, process)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=250)
        assert process.returncode == 75, said[-4000:]
        assert "stopped by a signal after " in said and "Traceback" not in said
    train(run, *words(folder, base), cache=cache)
    found = logged(folder)
    assert sorted(found) == list(range(steps))
    assert all(value == expected[step] for step, values in found.items() for value in values)
    assert whole_exports(folder, straight) == 2 * steps // 5


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[Path, Path]:
    """(a base of about 200 MB, an adapter of it): merging takes long enough to be killed in."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("large")
    size = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 8}
    tiny_llama(folder / "base", **size)
    file = folder / "base" / "config.json"
    file.write_text(file.read_text().replace('"float32"', '"bfloat16"'))
    narrow = {name: x.astype(ml_dtypes.bfloat16) for name, x in load_file(folder / "base/model.safetensors").items()}
    save_file(narrow, folder / "base/model.safetensors", metadata={"format": "pt"})
    rng, factors = np.random.default_rng(0), {}
    for layer in range(6):
        for name, (rows, columns) in {"up_proj": (4096, 1024), "down_proj": (1024, 4096)}.items():
            module = f"model.layers.{layer}.mlp.{name}"
            factors[f"{module}.lora_A"] = rng.standard_normal((8, columns)).astype(np.float32)
            factors[f"{module}.lora_B"] = rng.standard_normal((rows, 8)).astype(np.float32)
    return folder / "base", write_adapter(folder / "adapter", factors, r=8, lora_alpha=8)


def merging(large: tuple[Path, Path], out: Path, *more: str) -> list[str]:
    base, adapter = large
    named = ["--hf_checkpoint", str(base), "--adapter_path", str(adapter), "--output_dir", str(out)]
    return [sys.executable, "-m", "levanter.main.export_lm_to_hf", *named, "--save_tokenizer", "false", *more]


def weights(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))


@pytest.mark.slow
def test_merging_is_killed_and_the_disk_is_full(large, tmp_path):
    """Nothing that counts as a checkpoint is left, an earlier export stays; again, it gives the same bytes."""
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(merging(large, tmp_path / "straight"), env=env, **quiet)
    assert done.returncode == 0, done.stdout[-4000:]
    expected = weights(tmp_path / "straight")
    assert len(expected) > 100e6
    out = tmp_path / "out"
    process = subprocess.Popen(merging(large, out), env=env, **quiet)
    until(
        lambda: any(path.stat().st_size > 1e6 for path in tmp_path.rglob("*.safetensors") if "out" in str(path)),
        process,
    )
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (out / "config.json").exists()

    def full() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40 << 20, 40 << 20))

    failed = subprocess.run(merging(large, out), env=env, preexec_fn=full, **quiet)
    assert failed.returncode == 2, failed.stdout[-4000:]
    assert "Traceback" not in failed.stdout and "out" in failed.stdout.splitlines()[-1] + failed.stdout
    assert not (out / "config.json").exists()
    done = subprocess.run(merging(large, out), env=env, **quiet)
    assert done.returncode == 0, done.stdout[-4000:]
    assert weights(out) == expected
    # What is there stays when the next one fails.
    failed = subprocess.run(merging(large, out, "--overwrite", "true"), env=env, preexec_fn=full, **quiet)
    assert failed.returncode == 2 and "Traceback" not in failed.stdout
    assert weights(out) == expected and json.loads((out / "config.json").read_text())["model_type"] == "llama"
