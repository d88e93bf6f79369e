"""A run that saves after every step until somebody kills it; started by `test_killed.py`.

    python save_until_killed.py BASE FIRST

Its arrays after N steps are `state(N)`, which any process can compute again.
"""

import sys

import numpy as np

SIZE = 1 << 16


def state(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {
        "weight": random.normal(size=(8, SIZE // 8)).astype(np.float32),
        "moments.weight": random.integers(0, 2**32, (SIZE,), dtype=np.uint32).view(np.float32),
        "step": np.int32(step),
    }


def main() -> None:
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from levanter.checkpoint import Checkpointer

    base, step = sys.argv[1], int(sys.argv[2])
    mesh = Mesh(np.asarray(jax.devices()), ("data",))
    with Checkpointer(base, keep=[(5, None)], save_interval_seconds=1e-3, keep_last_temporary=2) as checkpointer:
        while True:
            step += 1
            arrays = {
                name: jax.device_put(value, NamedSharding(mesh, P("data") if value.ndim else P()))
                for name, value in state(step).items()
            }
            if checkpointer.due(step):
                checkpointer.save(step, arrays, {"after": step})


if __name__ == "__main__":
    main()
