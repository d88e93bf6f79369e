"""What the digests of a checkpoint's chunks cost a save: saves with and without them, in turns.

    python benchmarks/digests.py [--devices 1] [--pairs 20] [--folder /tmp/run]

The state of the Llama of `benchmarks/checkpoints.py` at several widths is saved by a run's `Checkpointer`. In the saves
without, chunks are only copied and their digests are a constant. Saves go in pairs, in changing order. Given, of a save
from the call until it is complete: seconds and processor seconds with and without, and of with over without the median
of the pairs and its 95 % interval by bootstrap. Copying is on its own line: the digest is made while chunks are copied,
so that is where it costs.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTHS = ((384, 6), (640, 7), (1024, 7))
"""Width and layers of the states."""


def main() -> None:
    """Saves, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="virtual CPU devices")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--folder", help="where checkpoints are written (default: a temporary folder)")
    asked = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={asked.devices}"
    print(f"{'state':9} {'of a save':18} {'with':>9} {'without':>9}  with / without (95 %)   load")
    for width, layers in WIDTHS:
        with tempfile.TemporaryDirectory() as temporary:
            measure(width, layers, asked, Path(asked.folder or temporary))


def measure(width: int, layers: int, asked: argparse.Namespace, folder: Path) -> None:
    """Pairs of saves of one state."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from levanter.checkpoint import Checkpointer, staging

    mesh = jax.make_mesh((asked.devices,), ("data",))
    shapes = [(258, width)] + layers * [(width, width), (width, width), (width, width), (width, width)]
    shapes += 3 * layers * [(width, 8 * width // 3 // 64 * 64)]
    rng = np.random.default_rng(0)
    arrays: dict[str, jax.Array] = {}
    for kind in ("model", "mu", "nu"):
        for n, shape in enumerate(shapes):
            how = NamedSharding(mesh, PartitionSpec(None, "data"))
            arrays[f"{kind}.{n}"] = jax.device_put(rng.standard_normal(shape, np.float32), how)
    size = sum(x.nbytes for x in arrays.values()) / 2**20
    counting, digested = staging.copy_with_digest, staging.StagingBuffers.digested
    copying: list[float] = []

    def only_copied(source: np.ndarray, target: np.ndarray) -> str:
        np.copyto(target, source)
        return "0" * 16

    def timed(self: Any, *args: Any) -> Any:
        began = time.perf_counter()
        result = digested(self, *args)
        copying.append(time.perf_counter() - began)
        return result

    staging.StagingBuffers.digested = timed
    found: dict[str, dict[bool, list[float]]] = {what: {True: [], False: []} for what in ("seconds", "CPU", "copying")}
    try:
        with Checkpointer(f"{folder}/run", keep=[], save_interval_seconds=1e9) as checkpointer:

            def save(number: int, *, digests: bool) -> tuple[float, float, float]:
                staging.copy_with_digest = counting if digests else only_copied
                began, cpu = time.perf_counter(), time.process_time()
                checkpointer.save(number, arrays, {})
                checkpointer.wait()
                return time.perf_counter() - began, time.process_time() - cpu, copying[-1]

            number = 0
            for _ in range(3):
                number += 1
                save(number, digests=True)
            for n in range(asked.pairs):
                for digests in (True, False) if n % 2 else (False, True):
                    number += 1
                    for what, value in zip(found, save(number, digests=digests), strict=True):
                        found[what][digests].append(value)
    finally:
        staging.copy_with_digest, staging.StagingBuffers.digested = counting, digested
    for what, both in found.items():
        ratios = [a / b for a, b in zip(both[True], both[False], strict=True)]
        middles = " ".join(f"{statistics.median(both[each]):7.3f} s" for each in (True, False))
        told(size, what, middles, ratios)
    usual = statistics.median(found["seconds"][False])
    shares = [(a - b) / usual for a, b in zip(found["copying"][True], found["copying"][False], strict=True)]
    told(size, "digests, of a save", " " * 19, shares)


def told(size: float, what: str, middles: str, found: list[float]) -> None:
    """Prints a line: the median and its interval."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(found, k=len(found))) for _ in range(10_000))
    range_ = f"({medians[250]:.3f} to {medians[9749]:.3f})"
    middle = f"{statistics.median(found):.3f}"
    print(f"{f'{size:,.0f} MiB':9} {what:18} {middles}  {middle} {range_}   {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
