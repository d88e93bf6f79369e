"""What cutting positions over devices costs on this machine: CPU seconds, bytes, blocks, and the time of a plan.

    python benchmarks/long_context.py [--rounds 5] [--positions 4096]

Eight virtual CPU devices take the same eight rows by the `train_step` Program that `train_lm` describes: a row a device
(`data: 8`), and every row over all devices (`context: 8`) by gathered keys, exchanged heads and a ring, in zigzag order
where heads are not exchanged. Steps of all four in turn, the order reversed in every other round; CPU seconds count,
since all devices share the cores. Beside them: the temporary bytes of a device for one row over eight devices and on
one, the blocks that the busiest of eight devices visits in zigzag and in natural order, and what a description takes
with positions cut. The bounds are the specification's.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

CONFIG = """
data: {tokenizer: passthrough, vocab_size: 256}
model: {type: llama, max_seq_len: %d, hidden_dim: 64, intermediate_dim: 128, num_layers: 1, num_heads: 8,
        num_kv_heads: 8, gradient_checkpointing: %s}
optimizer: {learning_rate: 0.001}
trainer: {tracker: {type: noop}, num_train_steps: 1000, train_batch_size: 8}
"""
CUT = ["--trainer.mesh.axes.context=8", "--trainer.mesh.axes.data=1", "--trainer.mesh.compute_mapping.position=context"]
LAYOUTS = {
    "data": ["--trainer.mesh.axes.data=8"],
    "gather": [*CUT, "--trainer.mesh.attention_mapping=gather"],
    "heads": [*CUT, "--trainer.mesh.attention_mapping=heads"],
    "ring": [*CUT, "--trainer.mesh.attention_mapping=ring"],
}
BOUNDS = {"gather": 1.10, "heads": 1.10, "ring": 1.25, "temporaries": 0.2, "blocks": 0.6, "describing": 0.2}


class Run:
    """A run's compiled step with a state and a batch of its own."""

    def __init__(self, file: Path, *overrides: str, devices: int = 8):
        import jax
        import numpy as np

        from haliax_ext.abstract import map_arrays
        from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
        from levanter.config import load
        from levanter.runplan import Target

        config = load(TrainLmConfig, ["--config_path", str(file), *overrides])
        target = Target(name="local", platform="cpu", kind="cpu", devices=devices)
        began = time.process_time()
        plan = describe(config, target)
        self.describing = time.process_time() - began
        self.mesh = plan.mesh.build(jax.devices()[:devices])
        self.program, self.plan = plan.program("train_step"), plan
        rng = np.random.default_rng(0)

        def filled(leaf, _):
            values = rng.integers(0, 256, leaf.shape) if leaf.dtype.kind == "i" else np.ones(leaf.shape)
            return np.asarray(values * ("segment" not in leaf.path), leaf.dtype)

        self.batch = map_arrays(filled, self.program.input("batch").value)

    def ready(self) -> "Run":
        """With its state, and compiled."""
        import jax

        self.state = self.plan.program("init_state").jit(self.mesh)(jax.random.PRNGKey(0))
        self.step = self.program.jit(self.mesh)
        self.losses = [self.take()[1] for _ in range(2)]
        return self

    def take(self) -> tuple[float, float]:
        """CPU seconds of a step, and its loss."""
        import jax

        began = time.process_time()
        self.state, metrics = self.step(self.state, None, self.batch)
        jax.block_until_ready((self.state, metrics.loss))
        return time.process_time() - began, float(metrics.loss)

    def temporaries(self) -> int:
        """Bytes of a device, as compiled."""
        analysis = self.program.lower(self.mesh).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes


def main() -> None:
    """Measures, and prints a line for each bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--positions", type=int, default=4096)
    asked = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    from levanter.plan.attention_blocks import SequenceLayout

    with tempfile.TemporaryDirectory() as folder:
        file, again = Path(folder) / "run.yaml", Path(folder) / "recomputed.yaml"
        file.write_text(CONFIG % (asked.positions, "false"))
        again.write_text(CONFIG % (asked.positions, "true"))
        seconds, losses = stepped(file, asked.rounds)
        one = ["--trainer.train_batch_size=1"]
        cut = {name: Run(again, *LAYOUTS[name], *one).temporaries() for name in ("gather", "heads", "ring")}
        whole = Run(again, *one, devices=1).temporaries()
        described = {name: [Run(file, *LAYOUTS[name]).describing for _ in range(3)] for name in ("data", "ring")}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        sys.exit(f"the layouts do not compute the same: losses {losses}")
    base = statistics.median(seconds["data"])
    print(f"data 8: {base:.2f} CPU s a step of 8 × {asked.positions} tokens")
    for name in ("gather", "heads", "ring"):
        ratios = [mine / theirs for mine, theirs in zip(seconds[name], seconds["data"], strict=True)]
        said(f"{name}, context 8, over data 8, CPU seconds", statistics.median(ratios), BOUNDS[name])
    for name, found in cut.items():
        said(
            f"{name}, temporary bytes over one device's ({whole / 2**20:.1f} MiB)", found / whole, BOUNDS["temporaries"]
        )
    blocks = [
        SequenceLayout(positions=1 << 16, shards=8, zigzag=z, travels=True, block=1024).share(None)
        for z in (True, False)
    ]
    said("blocks of the busiest device, 64K, zigzag over natural order", blocks[0] / blocks[1], BOUNDS["blocks"])
    more = min(described["ring"]) - min(described["data"])
    said("describing with positions cut takes more, CPU seconds", more, BOUNDS["describing"])
    print(f"load {', '.join(f'{each:.1f}' for each in os.getloadavg())} on {os.cpu_count()} cores")


def stepped(file: Path, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """CPU seconds of each round, and the second losses, by layout."""
    runs = {}
    for name, overrides in LAYOUTS.items():
        began = time.process_time()
        runs[name] = Run(file, *overrides).ready()
        print(f"{name}: two steps, {time.process_time() - began:.0f} CPU s", file=sys.stderr, flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(rounds):
        for name in list(runs)[:: 1 if n % 2 == 0 else -1]:
            seconds[name].append(runs[name].take()[0])
            print(f"round {n + 1} of {rounds}: {name} {seconds[name][-1]:.1f} CPU s", file=sys.stderr, flush=True)
    return seconds, {name: run.losses[1] for name, run in runs.items()}


def said(what: str, found: float, bound: float) -> None:
    """A line of what was found beside its bound."""
    print(f"{what}: {found:.2f}, at most {bound:.2f}: {'met' if found <= bound else 'NOT met'}", flush=True)


if __name__ == "__main__":
    main()
