"""What saving costs a training run: how long its loop is held up, and how much slower steps are meanwhile.

    python benchmarks/checkpoints.py [--devices 1] [--rounds 8] [--step-cores 1]

A Llama of 10.7 million parameters with Adam's two averages, in float32 (123 MiB), trained by the `train_step` Program
of a run and saved by its `Checkpointer`. Rounds come in pairs of `--steps` steps, one with a save after its first step
and one without, in alternating order, so that other load on the machine affects both. Reported are

- *held up*: how long `save` keeps the loop (it copies the state off the devices and makes folders), in seconds and in
  steps;
- *under way*: from `save` until the checkpoint is complete;
- *while saving*: the time of the steps that overlap the save, against the same steps of the round without; the time of
  `save` itself is not included;
- *of it, computing*: the same for the CPU time of XLA's threads (Linux): what saving costs a step that has its cores to
  itself. Other work on the machine affects the line above, but hardly this one;
- *processor*: CPU time of the round with a save beyond that of the round without;
- *per save*: seconds by which the round with a save is longer. Divided by the time between two saves, that is what
  saving costs a run.

On virtual devices the step keeps all cores busy, and writing takes some of their time: *while saving* then reflects the
number of cores. On the host of an accelerator they are free. `--step-cores N` is closer to that: the threads that
compute the step are bound to N of the cores, those that save may use all.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

CONFIG = """
data: {tokenizer: passthrough, vocab_size: 258}
model: {type: llama, max_seq_len: 128, hidden_dim: 384, intermediate_dim: 1024, num_layers: 6, num_heads: 6,
        num_kv_heads: 6, tie_word_embeddings: true}
optimizer: {learning_rate: 0.001}
trainer: {tracker: {type: noop}, num_train_steps: 1000, train_batch_size: 4, mesh: {axes: {data: -1}}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="virtual CPU devices")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of rounds")
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    parser.add_argument("--step-cores", type=int, help="cores that compute the step (default: all)")
    parser.add_argument("--folder", help="where checkpoints are written (default: a temporary folder)")
    asked = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={asked.devices}"
    with tempfile.TemporaryDirectory() as temporary:
        measure(asked, asked.folder or temporary, Path(temporary))


def measure(asked: argparse.Namespace, folder: str, scratch: Path) -> None:
    everywhere = os.sched_getaffinity(0)
    if asked.step_cores is not None:
        # A thread runs where the one that started it did: XLA's here, those that save where `saving` says.
        os.sched_setaffinity(0, sorted(everywhere)[: asked.step_cores])
    here = os.sched_getaffinity(0)

    @contextmanager
    def saving() -> Iterator[None]:
        os.sched_setaffinity(0, everywhere)
        try:
            yield
        finally:
            os.sched_setaffinity(0, here)

    import jax
    import numpy as np

    from haliax_ext.abstract import with_arrays
    from levanter.checkpoint import Checkpointer
    from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
    from levanter.config import load
    from levanter.data import next_tokens
    from levanter.runplan import Target
    from levanter.trainer.hooks import state_arrays

    (scratch / "run.yaml").write_text(CONFIG)
    config = load(TrainLmConfig, ["--config_path", str(scratch / "run.yaml")])
    plan = describe(config, Target(name="local", platform="cpu", kind="cpu", devices=asked.devices))
    mesh = plan.mesh.build(jax.devices())
    state = plan.program("init_state").jit(mesh)(jax.random.PRNGKey(0))
    program = plan.program("train_step")
    step, batch = program.jit(mesh), program.input("batch").value
    shape = batch.tokens.array.shape
    tokens = np.random.default_rng(0).integers(0, 258, shape).astype(np.int32)
    values = {
        "tokens": tokens,
        "targets": next_tokens(tokens),
        "loss_weights": np.ones(shape, np.float32),
        "segment_ids": np.zeros(shape, np.int32),
    }
    rows = with_arrays(batch, values)
    size = sum(x.nbytes for x in state_arrays(state).values())
    print(f"{asked.devices} devices, {size / 2**20:,.0f} MiB of state, {asked.rounds} pairs of {asked.steps} steps")
    print(f"{len(here)} of {len(everywhere)} cores for the step")
    with ExitStack() as stack:
        with saving():
            made = Checkpointer(f"{folder}/run", keep=[], save_interval_seconds=1e9)
        checkpointer = stack.enter_context(made)
        number, held, under, increases, extra, plain, processor, computing = 0, [], [], [], [], [], [], []

        def round_of(*, saves: bool) -> tuple[list[float], list[float], float, float]:
            """When each step of a round ended and what it had computed, when its save was complete, processor time."""
            nonlocal state, number
            ends, computed, complete, began, cpu = [], [], 0.0, time.perf_counter(), time.process_time()
            for n in range(asked.steps):
                state, metrics = step(state, None, rows)
                jax.block_until_ready(metrics)
                ends.append(time.perf_counter() - began)
                computed.append(computing_seconds())
                if saves and n == 0:
                    number += 1
                    before = time.perf_counter()
                    with saving():
                        checkpointer.save(number, state_arrays(state), {})
                    held.append(time.perf_counter() - before)
                    _, future = checkpointer._running or (None, None)
                    assert future is not None
                    done: list[float] = []
                    future.add_done_callback(lambda _, done=done: done.append(time.perf_counter() - began))
            if saves:
                checkpointer.wait()
                while not done:
                    time.sleep(1e-3)
                complete = done[0]
            return ends, computed, complete, time.process_time() - cpu

        round_of(saves=True)  # warms everything up
        held.clear()
        for n in range(asked.rounds):
            if n % 2:
                without, usual, _, least = round_of(saves=False)
                ends, computed, complete, most = round_of(saves=True)
            else:
                ends, computed, complete, most = round_of(saves=True)
                without, usual, _, least = round_of(saves=False)
            processor.append(most - least)
            # Steps behind the save that began before it was complete.
            inside = max(1, sum(end < complete for end in ends[:-1]))
            with_save = ends[inside] - ends[0] - held[-1]
            increases.append(with_save / (without[inside] - without[0]) - 1)
            if usual[0]:
                computing.append((computed[inside] - computed[0]) / (usual[inside] - usual[0]) - 1)
            extra.append(ends[-1] - without[-1])
            under.append(complete - ends[0])
            plain.append((without[-1] - without[0]) / (asked.steps - 1))

    def told(name: str, found: list[float], unit: str, scale: float = 1.0) -> None:
        low, middle, high = (scale * x for x in statistics.quantiles(found, n=4, method="inclusive"))
        print(f"{name:<19}{middle:8.2f} {unit}   ({low:.2f} to {high:.2f})")

    print("medians and quartiles:")

    told("step", plain, "s")
    told("held up", held, "s")
    told("", [x / statistics.median(plain) for x in held], "steps")
    told("under way", under, "s")
    told("while saving", increases, "%", 100.0)
    if computing:
        told("of it, computing", computing, "%", 100.0)
    told("processor", processor, "s")
    told("per save", extra, "s")
    interval = 15 * 60
    print(f"saved every 15 minutes: {100 * statistics.median(extra) / interval:.3f} % of the run's time")


def computing_seconds() -> float:
    """Processor time of XLA's threads so far; 0 where the system does not say."""
    total = 0
    for task in Path("/proc/self/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().startswith("tf_XLA"):
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


if __name__ == "__main__":
    sys.exit(main())
