"""What JAX makes of an executable for a pod that is not there: it is serialized, and cannot be read back here.

So a plan's compilation does not fill the cache that a run on the pod reads, `plan` has no option to export executables,
and docs/preflight/limits.md says that it is not verified whether a chip would take one. Should this fail one day, that
can change.
"""

import importlib.util
import json
import subprocess
import sys

import pytest

from levanter.hardware import parse_accelerator
from levanter.plan.compile_pool import worker_environment

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]
POD = "v5e-8"
SCRIPT = f"""
import json
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.hardware import parse_accelerator
from levanter.plan.compile_worker import topology_devices

devices = topology_devices(parse_accelerator({POD!r}))
rows = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
given = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=rows)
written, *trees = serialize(jax.jit(lambda x: x @ x.T).lower(given).compile())
found = {{"bytes": len(written)}}
for name, where in {{"pod": devices[0].client, "here": "cpu"}}.items():
    try:
        deserialize_and_load(written, *trees, backend=where, execution_devices=devices if name == "pod" else None)
    except Exception as error:
        found[name] = f"{{type(error).__name__}}: {{error}}"
print(json.dumps(found))
"""


def test_it_is_written_and_not_read_back():
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=worker_environment(parse_accelerator(POD)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found.pop("bytes") > 1000
    # Neither by the client that stands for the pod, nor by that of this machine.
    assert sorted(found) == ["here", "pod"], found
