"""What `test_saving_on_pods` compiles: the Programs that bring one array to the hosts."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from haliax_ext.device_to_host import HostGather, plan_host_gather
from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Program
from levanter.runplan import Target

# Shape, mesh axes of each axis, the box.
ARRAYS = {
    "gemma3_27b": ((262_208, 5_376), (("model",), ("data",)), ((0, 262_208), (0, 5_376))),
    "expert": ((16, 128, 2_048, 1_024), ((), ("model",), ("data",), ()), ((3, 4), (70, 71), (0, 2_048), (0, 1_024))),
    "llama3_405b": (
        (126, 8, 16, 128, 16_384),
        ((), ("model",), (), (), ("data",)),
        ((9, 10), (0, 8), (0, 16), (0, 128), (0, 16_384)),
    ),
}


@dataclass(frozen=True)
class Described:
    """A mesh and what is compiled for it."""

    mesh: MeshSpec
    programs: tuple[Program, ...]


def taking_of(payload: dict[str, Any]) -> HostGather:
    """How the array comes to the hosts of a pod, in float32."""
    shape, cuts, box = ARRAYS[payload["array"]]
    there = tuple(tuple(axis for axis in axes if axis in payload["mesh"]) for axes in cuts)
    sizes = tuple(payload["mesh"].items())
    return plan_host_gather(box, shape=shape, dtype=np.dtype(np.float32), cuts=there, sizes=sizes, gathered=True)[0]


def savings(payload: dict[str, Any], target: Target) -> Described:
    """What the compile worker asks for."""
    del target
    return Described(MeshSpec.of(**payload["mesh"]), taking_of(payload).programs)
