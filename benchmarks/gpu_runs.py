"""Plans three runs for the GPU of this machine and runs their Programs: memory and seconds, planned and measured.

    benchmarks/gpu.sh [--tiny] [--cases train score generate] [--steps 10] [--output gpu.json]

*train*: a step of Llama 3.2 1B. *score*: a batch of Llama 3.1 8B's log-probabilities. *generate*: one decode step of
Llama 3.1 8B with all its rows running. The plan is made as a user makes it, by `levanter.main.plan` in a process that
sees CPUs only. Each run has a process of its own, since a GPU's peak is that of its process: it describes the run on
the device, fills the Program's inputs with random numbers (no checkpoint is needed), compiles it, calls it, and reads
`memory_stats()`. Measured seconds are the median of `--steps` calls, the first two left out; each ends with a wait for
its results.

Where the device has no memory statistics (CPUs) the measured memory is a dash. On CPUs the target is `local`, and times
are compared with nothing.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

GIB = 1 << 30
TRAINER = {"mp": "bfloat16", "tracker": {"type": "noop"}}
LLAMA_1B = {
    "type": "llama", "hidden_dim": 2048, "intermediate_dim": 8192, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8,
    "head_dim": 64, "vocab_size": 128256, "max_seq_len": 4096, "tie_word_embeddings": True,
    "gradient_checkpointing": True,
}  # fmt: skip
LLAMA_8B = {
    "type": "llama", "hidden_dim": 4096, "intermediate_dim": 14336, "num_layers": 32, "num_heads": 32,
    "num_kv_heads": 8, "vocab_size": 128256, "max_seq_len": 4096,
}  # fmt: skip
TINY = {
    "hidden_dim": 128, "intermediate_dim": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
    "vocab_size": 512, "max_seq_len": 128,
}  # fmt: skip
TEXT = {"tokenizer": "passthrough", "components": {"text": {"source": {"train_urls": ["text.txt"]}}}}
HELD_OUT = {"tokenizer": "passthrough", "components": {"text": {"source": {"validation_urls": ["text.txt"]}}}}


def documents(*, tiny: bool) -> Mapping[str, tuple[str, str, dict[str, Any]]]:
    """By case: the entry point, the beginning of the Program's name, and the configuration."""
    small, large = ({**size, **TINY} if tiny else size for size in (LLAMA_1B, LLAMA_8B))
    rows = 2 if tiny else 8
    train = {**TRAINER, "mp": "p=f32,c=bfloat16", "train_batch_size": rows, "num_train_steps": 10}
    length = large["max_seq_len"]
    return {
        "train": ("train_lm", "train_step", {"model": small, "data": TEXT, "trainer": train}),
        "score": (
            "eval_lm",
            "score",
            {
                "model": large,
                "data": HELD_OUT,
                "max_eval_length": length,
                "trainer": {**TRAINER, "per_device_eval_parallelism": rows},
                "plan": {"assume_tokens": 1_000_000},
            },
        ),
        "generate": (
            "generate",
            "decode",
            {
                "model": large,
                "tokenizer": "passthrough",
                "inference": {"max_rows": 4 if tiny else 16, "max_seq_len": length, "penalties": False},
                "trainer": TRAINER,
            },
        ),
    }


def planned(entry_point: str, start: str, config: Path, target: str) -> dict[str, Any]:
    """What a plan says of the Program whose name begins so: bytes and seconds."""
    out = config.with_suffix(".json")
    words = ["-m", "levanter.main.plan", entry_point, "--config_path", str(config), "--target", target]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *words, "--timed_only", "--json", str(out)], env=environment, capture_output=True, text=True
    )
    if not out.is_file():
        raise SystemExit(f"the plan of {entry_point} failed:\n{done.stderr[-2000:]}")
    (verdict,) = json.loads(out.read_text())["verdicts"]
    program = next(p for p in verdict["programs"] if p["name"].startswith(start))
    return {"headline": verdict["headline"], **program}


def measure(entry_point: str, start: str, config: Path, steps: int) -> dict[str, Any]:
    """Runs the Program on the first device: its seconds, and the peak of the device's memory."""
    import jax

    from levanter.commands.catalog import ENTRY_POINTS
    from levanter.config import load_written
    from levanter.plan.target_from_name import device_target

    reference = ENTRY_POINTS[entry_point]
    loaded = load_written(reference.config_class(), ["--config_path", str(config)])
    device = jax.devices()[0]
    plan = reference.load().describe(loaded.config, device_target([device]), written=loaded.written)
    mesh = plan.mesh.build([device])
    program = next(p for p in plan.programs if p.name.startswith(start))
    values = {argument.name: filled(argument.value) for argument in program.inputs}
    began = time.perf_counter()
    program.prepare(mesh, *values.values())
    compiled, call, seconds = time.perf_counter() - began, program.jit(mesh), []
    for _ in range(steps + 2):
        # A donated input is gone after the call.
        values |= {a.name: filled(a.value) for a in program.inputs if a.name in program.donate and a.name not in values}
        taken = tuple(values[argument.name] for argument in program.inputs)
        for name in program.donate:
            del values[name]
        jax.block_until_ready(jax.tree.leaves(taken))
        began = time.perf_counter()
        results = call(*taken)
        jax.block_until_ready(jax.tree.leaves(results))
        seconds.append(time.perf_counter() - began)
        del taken, results
    stats = device.memory_stats() or {}
    return {
        "device": device.device_kind,
        "program": program.name,
        "seconds": statistics.median(seconds[2:]),
        "spread_seconds": [min(seconds[2:]), max(seconds[2:])],
        "compile_seconds": compiled,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "limit_bytes": stats.get("bytes_limit"),
    }


def filled(value: Any) -> Any:
    """An input with random weights, and zeros where a number may be an index."""
    import jax
    import numpy as np

    from haliax_ext.abstract import map_arrays

    rng = np.random.default_rng(0)

    def fill(leaf: Any, _: Any) -> Any:
        if leaf.dtype == np.int8:
            block = rng.integers(-100, 100, 1 << 20, dtype=np.int8)
        elif leaf.dtype.kind in "iub":
            return jax.device_put(np.zeros(leaf.shape, leaf.dtype))
        else:
            block = (0.02 * rng.standard_normal(1 << 20, dtype=np.float32)).astype(leaf.dtype)
        # Repeated on the host: generators on the device would need memory of their own, which counts in its peak.
        return jax.device_put(np.resize(block, math.prod(leaf.shape)).reshape(leaf.shape))

    return map_arrays(fill, value)


def table(results: Mapping[str, dict[str, Any]]) -> str:
    """The result as Markdown."""
    rows = [
        "| run | Program | planned GiB | measured GiB | | planned | measured | | tokens/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        plan, run = result["planned"], result["measured"]
        memory = ratio(plan["peak_bytes"], run["peak_bytes"])
        time_ = plan["time"]
        expected = None if time_ is None else time_["expected_seconds"]
        tokens = (plan["workload"] or {}).get("tokens")
        rate = "–" if not tokens else f"{tokens / run['seconds']:,.0f}"
        rows.append(
            f"| {name} | {run['program']} | {gib(plan['peak_bytes'])} | {gib(run['peak_bytes'])} | {memory} | "
            f"{seconds(expected)} | {seconds(run['seconds'])} | {ratio(expected, run['seconds'])} | {rate} |"
        )
    return "\n".join(rows)


def ratio(planned_: float | None, measured: float | None) -> str:
    return f"{planned_ / measured - 1:+.1%}" if planned_ and measured else "–"


def gib(nbytes: int | None) -> str:
    return "–" if nbytes is None else f"{nbytes / GIB:.2f}"


def seconds(value: float | None) -> str:
    return "–" if value is None else f"{1e3 * value:.1f} ms"


def target_here() -> str:
    """The name of one of this machine's GPUs as a target; `local` on CPUs. In a process of its own, which ends."""
    code = (
        "import jax; from levanter.hardware import find_generation; d = jax.devices()[0]; "
        "g = find_generation(d.device_kind) if d.platform == 'gpu' else None; print(g.name if g else d.platform)"
    )
    name = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()[-1]
    if name == "gpu":
        raise SystemExit("this GPU is none of levanter.hardware's generations; see src/levanter/hardware")
    return "local" if name == "cpu" else f"{name}x1"


def main() -> None:
    """Plans and measures every case, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cases", nargs="+", default=["train", "score", "generate"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    cases = documents(tiny=asked.tiny)
    if asked.measure:
        entry_point, start, _ = cases[asked.measure]
        print(json.dumps(measure(entry_point, start, asked.config, asked.steps)))
        return
    target, results = target_here(), {}
    print(f"target {target}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.cases:
            entry_point, start, document = cases[name]
            config = Path(folder) / f"{name}.yaml"
            config.write_text(yaml.safe_dump(document))
            plan = planned(entry_point, start, config, target)
            print(f"{name}: planned: {plan['headline']}", flush=True)
            words = [__file__, "--measure", name, "--config", str(config), "--steps", str(asked.steps)]
            done = subprocess.run([sys.executable, *words, *["--tiny"] * asked.tiny], stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise SystemExit(f"{name}: the run failed, see above")
            run = json.loads(done.stdout.strip().splitlines()[-1])
            print(
                f"{name}: measured: {seconds(run['seconds'])}, compiled in {run['compile_seconds']:.1f} s", flush=True
            )
            results[name] = {"planned": plan, "measured": run}
    print(table(results))
    if asked.output:
        asked.output.write_text(json.dumps({"target": target, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
