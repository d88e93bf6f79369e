"""What a train step saves if a part of the model is frozen.

    python benchmarks/trainable.py [--trainable norm] [--pairs 12] [--steps 2] [--remat true]

A Llama of 26.7 million parameters with Adam, float32, trained by the `train_step` Programs that `train_lm` describes
with and without `trainer.trainable`. Runs come in pairs of `--steps` steps each, in alternating order, so that other
load on the machine affects both. Reported are the median ratio full / part of CPU seconds and of wall seconds over the
pairs, with the 95 % bootstrap interval of the median, and the load of the machine meanwhile.

For each weight a full step does three products (forward, gradient of the activations, gradient of the weights), a step
without gradients of matrices two: 3 / 2 without gradient checkpointing, 4 / 3 with it. Attention, which is the same in
both, lowers that; the optimizer, which is negligible in the latter, raises it.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

CONFIG = """
data: {tokenizer: passthrough, vocab_size: 1024}
model: {type: llama, max_seq_len: 256, hidden_dim: 512, intermediate_dim: 1408, num_layers: 8, num_heads: 8,
        num_kv_heads: 8, gradient_checkpointing: %s}
optimizer: {learning_rate: 0.001}
trainer: {tracker: {type: noop}, num_train_steps: 1000, train_batch_size: 4, mesh: {axes: {data: -1}}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainable", default="norm", help="trainer.trainable, separated by commas")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="steps of a run")
    parser.add_argument("--remat", default="false", help="model.gradient_checkpointing")
    asked = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    patterns = "[" + ", ".join(f"'{pattern}'" for pattern in asked.trainable.split(",")) + "]"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(CONFIG % asked.remat)
        full, part = Run(file), Run(file, "--trainer.trainable", patterns)
        pairs = [measured(full, part, asked.steps, first=n % 2) for n in range(asked.pairs)]
    trained, whole = part.parameters()
    print(f"trained: {asked.trainable}, {trained:,} of {whole:,} parameters; gradient checkpointing {asked.remat}")
    for n, what in enumerate(("processor", "wall")):
        seconds = [statistics.median(each[side][n] for each in pairs) for side in (0, 1)]
        ratios = [each[0][n] / each[1][n] for each in pairs]
        low, high = interval(ratios)
        print(
            f"{what} seconds a step: full {seconds[0]:.3f}, part {seconds[1]:.3f}; full / part "
            f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}), {len(pairs)} pairs"
        )
    print(f"load {', '.join(f'{each:.1f}' for each in os.getloadavg())} on {os.cpu_count()} cores")


class Run:
    """A run's compiled step with a state and a batch of its own."""

    def __init__(self, file: Path, *overrides: str):
        import jax
        import jax.numpy as jnp
        import numpy as np

        from haliax_ext.abstract import leaves, map_arrays
        from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
        from levanter.config import load
        from levanter.runplan import Target

        config = load(TrainLmConfig, ["--config_path", str(file), *overrides])
        plan = describe(config, Target(name="local", platform="cpu", kind="cpu", devices=1))
        mesh, key = plan.mesh.build(jax.devices()[:1]), jax.random.PRNGKey(0)
        program = plan.program("train_step")
        rng = np.random.default_rng(0)

        def filled(leaf, _):
            values = rng.integers(0, 1024, leaf.shape) if leaf.dtype.kind == "i" else np.ones(leaf.shape)
            return jnp.asarray(values * ("segment" not in leaf.path), leaf.dtype)

        self.batch = map_arrays(filled, program.input("batch").value)
        self.state = plan.program("init_state").jit(mesh)(key)
        self.frozen = None
        if plan.work.frozen is not None:
            self.frozen = plan.program("init_frozen").jit(mesh)(key)
        self.step = program.jit(mesh)
        self._sizes = [leaf.nbytes // 4 for tree in (self.state.model, self.frozen) for leaf in leaves(tree)]
        self._trained = len(leaves(self.state.model))
        self.take(2)

    def parameters(self) -> tuple[int, int]:
        """How many are trained, and all."""
        return sum(self._sizes[: self._trained]), sum(self._sizes)

    def take(self, steps: int) -> tuple[float, float]:
        """Processor and wall seconds a step."""
        import jax

        processor, wall = time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.state, metrics = self.step(self.state, self.frozen, self.batch)
        jax.block_until_ready(metrics.loss)
        jax.block_until_ready(self.state)
        return (time.process_time() - processor) / steps, (time.perf_counter() - wall) / steps


def measured(full: Run, part: Run, steps: int, *, first: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of both runs, which take turns to begin."""
    if first:
        later = part.take(steps)
        return full.take(steps), later
    return full.take(steps), part.take(steps)


def interval(values: list[float], *, draws: int = 2000) -> tuple[float, float]:
    """The 95 % interval of a bootstrap of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return medians[draws * 25 // 1000], medians[draws * 975 // 1000]


if __name__ == "__main__":
    main()
