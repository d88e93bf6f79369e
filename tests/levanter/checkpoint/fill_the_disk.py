"""A run whose disk takes no more after its second save; started by `test_full_disk.py`.

    python fill_the_disk.py BASE LIMIT

The kernel refuses files of more than LIMIT bytes from then on (`RLIMIT_FSIZE`), as it refuses all on a full disk.
Prints the errors of the saves that fail, one JSON list.
"""

import json
import resource
import signal
import sys

import numpy as np


def weight(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=1 << 18).astype(np.float32)


def main() -> None:
    import jax

    from levanter.checkpoint import Checkpointer, CheckpointSaveError

    base, limit = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    errors = []
    with Checkpointer(base, keep=[(2, None)], save_interval_seconds=60.0) as checkpointer:
        for step in range(1, 7):
            if step == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            if step == 5:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            try:
                checkpointer.save(step, {"weight": jax.device_put(weight(step))}, {})
                checkpointer.wait()
            except CheckpointSaveError as error:
                errors.append(str(error))
    sys.stdout.write(json.dumps(errors))


if __name__ == "__main__":
    main()
