"""Times a train step: ours, a plain JAX program of the same Llama, upstream Levanter and torch.

    python benchmarks/training.py [--devices 1] [--rounds 12] [--upstream …/python] [--torch] [vocab=49152 embed=256 …]

The model has 10.2 million parameters unless sizes are given (fields of `training_contenders.Shape`), in float32, on
virtual CPU devices: with one, everything is on it; with eight, parameters and optimizer state are sharded along `embed`
(FSDP) and the batch over the devices. All contenders begin with the same weights, use the same batches (random ids,
one segment), rematerialize every layer (`remat=false`: none), clip the gradient at norm 1 and apply AdamW with the same
decay mask; the losses of their first steps must agree to 1e-4, or nothing is timed.

- *ours*: the `train_step` Program of a run, as `levanter.main.train_lm` describes it, placed and compiled.
- *plain*: one jitted function without named axes, in the layout that JAX programs usually have ([in, out] matrices,
  `jax.lax.scan` over stacked layers with `jax.checkpoint`, logits of the full batch, optax).
- *upstream*: its `Trainer`'s compiled step, of `pip install marin-levanter gitpython` in a separate environment,
  with its default attention on CPUs (a blockwise one) and, as *upstream_vanilla*, with the plain formula.
- *torch*: transformers' Llama with torch's AdamW, as it comes and, as *torch_compiled*, through `torch.compile`. It
  keeps what its backward pass needs and rematerializes nothing.

Every contender runs in its own process for the entire measurement and waits for its turn; turns of `--steps` steps
alternate, in a different order each round. Ratios are taken turn by turn and their median is reported, for time and for
CPU seconds, which are more reliable if other work shares the cores. Compilation is not counted.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from training_contenders import CONTENDERS, Run, Shape, make_weights

AGREE = 1e-4
WARM_STEPS = 4


def work(contender: Callable[..., Run], shape: Shape, file: str, devices: int) -> None:
    """What a contender's process does: prepares, then takes so many steps whenever it is told to."""
    import numpy as np

    run = contender(shape, dict(np.load(file)), devices)
    began = time.perf_counter()
    losses = run(WARM_STEPS)
    _say({"losses": losses, "first": time.perf_counter() - began})
    for line in sys.stdin:
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        run(int(line))
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        _say({"wall": wall, "cpu": cpu, "peak": after.ru_maxrss / 2**20})


def _say(found: dict[str, Any]) -> None:
    print("@" + json.dumps(found), flush=True)


class Contender:
    """A process that takes steps when asked."""

    def __init__(
        self,
        name: str,
        python: str,
        file: str,
        devices: int,
        sizes: list[str],
        tree: str | None = None,
        script: str = __file__,
    ):
        worker = "ours" if tree else name
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        if tree is not None:
            env["PYTHONPATH"] = f"{tree}/src:{tree}"
        elif python != sys.executable:
            env.pop("PYTHONPATH", None)
        flags = f"--xla_force_host_platform_device_count={devices}"
        self.name = name
        self.turns: list[dict[str, float]] = []
        self.process = subprocess.Popen(
            [python, script, "--worker", worker, "--file", file, "--devices", str(devices), *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**env, "XLA_FLAGS": flags},
            text=True,
        )
        self.ready = self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise SystemExit(f"{self.name} ended; see above")

    def turn(self, steps: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        self.turns.append(self._hear())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(contenders: list[Contender], *, tokens: int, steps: int, rounds: int) -> None:
    """Turns go round; prints rates, and what ours is to each of the others."""
    order = random.Random(0)
    for n in range(rounds):
        for each in order.sample(contenders, len(contenders)):
            each.turn(steps)
        print(f"round {n + 1}: " + ", ".join(f"{c.name} {c.turns[-1]['wall'] / steps:.3f} s" for c in contenders))
    first = contenders[0]
    print("| | tokens/s | CPU seconds a step | peak GiB | its time over ours | its CPU time over ours |")
    print("|---|---|---|---|---|---|")
    for each in contenders:
        walls, cpus = ([turn[key] for turn in each.turns] for key in ("wall", "cpu"))
        rate = steps * tokens / statistics.median(walls)
        print(
            f"| {each.name} | {rate:,.0f} | {statistics.median(cpus) / steps:.3f} | "
            f"{each.turns[-1]['peak']:.2f} | {_over(first, each, 'wall')} | {_over(first, each, 'cpu')} |"
        )


def _over(first: Contender, other: Contender, key: str) -> str:
    """Median and quartiles of what the other took over what the first took, turn by turn."""
    ratios = sorted(b[key] / a[key] for a, b in zip(first.turns, other.turns, strict=True))
    quarter = len(ratios) // 4
    return f"{statistics.median(ratios):.3f} ({ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--upstream", help="the Python of an environment that has marin-levanter")
    parser.add_argument("--torch", action="store_true", help="torch too, as it comes and compiled")
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out, where memory is short")
    parser.add_argument("--before", help="the root of another tree of ours, which takes part as `before`")
    parser.add_argument("sizes", nargs="*", help="vocab=49152 and the like")
    parser.add_argument("--worker", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    shape = Shape(**{name: json.loads(value) for name, value in (size.split("=") for size in asked.sizes)})
    if asked.worker:
        work(CONTENDERS[asked.worker], shape, asked.file, asked.devices)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/weights.npz"
        make_weights(shape, file)
        pythons = {"ours": sys.executable, "plain": sys.executable}
        if asked.upstream:
            pythons |= {"upstream": asked.upstream, "upstream_vanilla": asked.upstream}
        if asked.torch:
            pythons |= {"torch": sys.executable, "torch_compiled": sys.executable}
        contenders = [
            Contender(name, python, file, asked.devices, asked.sizes)
            for name, python in pythons.items()
            if name not in asked.without
        ]
        if asked.before:
            contenders.append(
                Contender("before", sys.executable, file, asked.devices, asked.sizes, os.path.abspath(asked.before))
            )
        for each in contenders:
            losses = " ".join(f"{loss:.6f}" for loss in each.ready["losses"])
            print(f"{each.name}: first losses {losses}", flush=True)
        worst = max(
            abs(a - b)
            for each in contenders
            for a, b in zip(each.ready["losses"], contenders[0].ready["losses"], strict=True)
        )
        if worst > AGREE:
            print(f"error: losses differ by up to {worst:.2g}: not the same training", file=sys.stderr)
            return 1
        compare(contenders, tokens=shape.batch * shape.length, steps=asked.steps, rounds=asked.rounds)
        for each in contenders:
            each.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
