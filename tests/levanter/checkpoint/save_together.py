"""One of two processes that save one run; started by `test_two_processes.py`.

    python save_together.py NUMBER PORT BASE MODE

MODE "run": both save 12 steps under `due`, each with a clock of its own, and read the last checkpoint back onto
another mesh. MODE "absent": process 1 asks whether a save is due, process 0 never does.
"""

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np


def weight(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)


def main() -> None:
    number, port, base, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, number, initialization_timeout=60)
    report = run(number, base) if mode == "run" else wait_in_vain(number, base)
    sys.stdout.write("\n" + json.dumps(report))


def run(number: int, base: str) -> dict:
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from levanter.checkpoint import Checkpointer, RestoreTarget, latest, restore

    devices = np.asarray(sorted(jax.devices(), key=lambda d: (d.process_index, d.id)))
    line, grid = Mesh(devices, ("data",)), Mesh(devices.reshape(4, 2).T, ("data", "model"))
    seconds = 0.0

    def put(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    saved = []
    # Process 1's clock runs a hundred times as fast: if it had a say, it would save after every step.
    with Checkpointer(
        base, keep=[(5, None)], save_interval_seconds=3.0, clock=lambda: seconds * (1 if number == 0 else 100)
    ) as checkpointer:
        for step in range(1, 13):
            seconds += 1.0
            time.sleep(0.05 * (number == step % 2))
            if checkpointer.due(step):
                arrays = {
                    "weight": put(weight(step), NamedSharding(line, P("data"))),
                    "copies": put(weight(-step % 100), NamedSharding(line, P())),
                    "step": put(np.asarray(step, np.int32), NamedSharding(line, P())),
                }
                checkpointer.save(step, arrays, {"after": step})
                saved.append(step)
        checkpointer.wait()
        ref = latest(base)
        assert ref is not None
        targets = {
            "weight": RestoreTarget(
                shape=(16, 8), dtype=np.dtype(np.float32), sharding=NamedSharding(grid, P("data", "model"))
            ),
            "copies": RestoreTarget(
                shape=(16, 8), dtype=np.dtype(np.float32), sharding=NamedSharding(grid, P("model"))
            ),
            "step": RestoreTarget(shape=(), dtype=np.dtype(np.int32), sharding=NamedSharding(grid, P())),
        }
        found = restore(ref, targets)
        wanted = {"weight": weight(ref.step), "copies": weight(-ref.step % 100), "step": np.int32(ref.step)}
        for name, value in wanted.items():
            for shard in found[name].addressable_shards:
                assert np.asarray(shard.data).tobytes() == np.asarray(value[shard.index]).tobytes(), name
    return {"saved": saved, "latest": ref.step}


def wait_in_vain(number: int, base: str) -> dict:
    from levanter.checkpoint import Checkpointer, CheckpointPeerError

    checkpointer = Checkpointer(base, keep=[], save_interval_seconds=3.0, timeout_seconds=2.0)
    said, waited = "", Path(base) / "waited"
    if number == 1:
        try:
            checkpointer.due(1)
        except CheckpointPeerError as error:
            said = str(error)
        waited.touch()
    else:
        # JAX's service is in this process: it has to be there until the other one has heard.
        deadline = time.monotonic() + 200
        while not waited.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    checkpointer.close()
    return {"said": said}


if __name__ == "__main__":
    main()
