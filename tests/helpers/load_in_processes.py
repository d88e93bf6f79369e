"""One of several processes that load a checkpoint together; run by `tests/multihost/test_loading.py`.

    python load_in_processes.py FOLDER OPTIONS

Loads the tiny Llama in `FOLDER/model.safetensors` over 8 devices as OPTIONS (JSON) say, checks every local shard
against NumPy, and writes what it read to `FOLDER/found.NUMBER.json`.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np


def main() -> None:
    folder, options = Path(sys.argv[1]), sys.argv[2]
    from levanter.commands.cli.lifecycle import end_together, join_processes
    from levanter.distributed.initialize import DistributedConfig

    join_processes(DistributedConfig())
    number = jax.process_index()

    from helpers import integer_llama
    from helpers.compilations import compilations
    from helpers.tiny_llama import assembled, tiny_leaves, tiny_rules
    from safetensors.numpy import load_file

    from haliax_ext.abstract import Leaf
    from haliax_ext.initializers import InitialRule, Normal
    from haliax_ext.loading import device_hosts, load, plan_loading
    from haliax_ext.mapping import AxisMapping, Mappings
    from haliax_ext.meshspec import MeshSpec
    from haliax_ext.planner import plan_sharding
    from levanter.compat.hf.safetensors import SafetensorsSource

    given = json.loads(options)
    path = folder / "model.safetensors"
    tensors, source = load_file(path), SafetensorsSource.from_files(path)
    spec = MeshSpec(axes=tuple(given["mesh"].items()))
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = jax.sharding.Mesh(np.asarray(devices)[given["order"]].reshape(list(given["mesh"].values())), spec.names)
    leaves, rules, wanted = tiny_leaves(np.dtype(given["dtype"])), tiny_rules(), assembled(tensors)
    if given["twin"]:
        gate, up = (f"transformer.layers.stacked.mlp.{name}_proj.weight" for name in ("gate", "up"))
        (leaf,) = [leaf for leaf in leaves if leaf.path == gate]
        (rule,) = [rule for rule in rules.rules if rule.target == gate]
        twin = replace(rule, target=up, source=rule.source.replace("gate", "up"))
        leaves, rules = [*leaves, replace(leaf, path=up)], replace(rules, rules=(*rules.rules, twin))
        wanted[up] = np.stack([tensors[f"model.layers.{n}.mlp.up_proj.weight"] for n in range(3)])
    if given["integers"]:
        made = Leaf("made", (("layers", 3), ("mlp", 32)), np.dtype(np.float32))
        rule = InitialRule(target="made", values=Normal(2.0), seed=5)
        leaves, rules = [*integer_llama.LEAVES, made], replace(integer_llama.RULES, initial=(rule,))
        wanted = {**integer_llama.expected(tensors), "made": np.asarray(jax.jit(lambda: rule.array(made).array)())}
    sharding = plan_sharding(leaves, Mappings(params=AxisMapping(given["mapping"])), spec)
    plan = plan_loading(sharding, rules, source, hosts=device_hosts(mesh), transient_limit=given["limit"])
    seen = []
    with compilations() as compiled:
        found = load(plan, sharding, source, mesh, progress=seen.append)
    assert set(found) == set(wanted)
    for path, array in found.items():
        assert array.sharding.is_equivalent_to(sharding.sharding(path, mesh), array.ndim), path
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(
                np.asarray(shard.data), wanted[path].astype(array.dtype)[shard.index], err_msg=path
            )
    report = {
        "bytes_read": source.bytes_read,
        "planned": plan.bytes_by_host[number],
        "total": sum(each.nbytes for each in tensors.values()),
        "strategies": {each.path: each.strategy for each in plan.loads},
        "programs": [program.name for program in plan.programs],
        "compiled": [each.name for each in compiled],
        "pieces": {each.path: len(each.pieces) for each in plan.loads},
        "seconds_by_host": found.report.seconds_by_host,
        "progress": [seen[-1].bytes_done, seen[-1].bytes_total, seen[-1].job_bytes],
    }
    (folder / f"found.{number}.json").write_text(json.dumps(report))
    end_together(0)


if __name__ == "__main__":
    main()
