"""One of several processes that load a checkpoint together; run by `tests/multihost/test_loading.py`.

    python load_in_two_processes.py NUMBER COUNT PORT FOLDER MAPPING

Reads `FOLDER/tensors.npz`, loads the tiny Llama in it over 8 devices with the parameter mapping MAPPING (JSON), checks
every local shard against NumPy, and writes what it read to `FOLDER/found.NUMBER.json`.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np


def main() -> None:
    number, count, port, folder, options = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, number, initialization_timeout=60)

    from helpers.memory_source import MemorySource
    from helpers.tiny_llama import assembled, tiny_leaves, tiny_rules

    from haliax_ext.loading import hosts_of, load, plan_loading
    from haliax_ext.mapping import AxisMapping, Mappings
    from haliax_ext.meshspec import MeshSpec
    from haliax_ext.planner import plan_sharding

    given = json.loads(options)
    tensors = dict(np.load(Path(folder) / "tensors.npz"))
    source = MemorySource(tensors)
    spec = MeshSpec(axes=tuple(given["mesh"].items()))
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = jax.sharding.Mesh(np.asarray(devices)[given["order"]].reshape(list(given["mesh"].values())), spec.names)
    sharding = plan_sharding(
        tiny_leaves(np.dtype(given["dtype"])), Mappings(params=AxisMapping(given["mapping"])), spec
    )
    plan = plan_loading(sharding, tiny_rules(), source, hosts=hosts_of(mesh), transient_limit=given["limit"])
    seen = []
    found = load(plan, sharding, source, mesh, progress=seen.append)
    wanted = assembled(tensors)
    for path, array in found.items():
        assert array.sharding.is_equivalent_to(sharding.sharding(path, mesh), array.ndim), path
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(
                np.asarray(shard.data), wanted[path].astype(given["dtype"])[shard.index], err_msg=path
            )
    report = {
        "bytes_read": source.bytes_read,
        "planned": plan.bytes_by_host[number],
        "total": source.nbytes,
        "strategies": {each.path: each.strategy for each in plan.loads},
        "pieces": {each.path: len(each.pieces) for each in plan.loads},
        "seconds_by_host": found.report.seconds_by_host,
        "progress": [seen[-1].bytes_done, seen[-1].bytes_total, seen[-1].job_bytes],
    }
    (Path(folder) / f"found.{number}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
