"""One of several processes that bring a model's tensors to the first of them, piece by piece.

    python save_in_processes.py FOLDER FAMILY LIMIT

Process 0 compares every tensor with the same bytes from the host; each writes what it ran to `FOLDER/ran.NUMBER.json`.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np


def main() -> None:
    folder, family, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    from levanter.commands.cli.lifecycle import end_together, join_processes
    from levanter.distributed.initialize import DistributedConfig

    join_processes(DistributedConfig())
    number = jax.process_index()

    from helpers.family_arrays import SPEC, on_devices, planned

    from haliax_ext.saving import contribute_tensors, gather_tensors, saving_programs
    from levanter.distributed.compile_barrier import jit_together

    plan, sharding, values = planned(family)
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = jax.sharding.Mesh(np.asarray(devices).reshape([n for _, n in SPEC.axes]), SPEC.names)
    arrays, ran = on_devices(sharding, values, mesh), []

    def jit(program, mesh):
        ran.append(program.name)
        return jit_together(program, mesh)

    compared = 0
    if number == 0:
        expected = {tensor.name: whole for tensor, whole in gather_tensors(plan.tensors, values)}
        for tensor, whole in gather_tensors(plan.tensors, arrays, jit=jit, limit=limit):
            assert whole.tobytes() == expected[tensor.name].tobytes(), tensor.name
            compared += 1
    else:
        for _ in contribute_tensors(plan.tensors, arrays, jit=jit, limit=limit):
            compared += 1
    named = sorted(program.name for program in saving_programs(plan.tensors, sharding, hosts=2, limit=limit))
    report = {"ran": ran, "planned": named, "tensors": compared, "expected": len(plan.tensors)}
    (folder / f"ran.{number}.json").write_text(json.dumps(report))
    end_together(0)


if __name__ == "__main__":
    main()
