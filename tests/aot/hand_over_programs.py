"""The Program that hands weights of training to generation, for the compile worker: Llama 3.1 8B."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from helpers.hand_overs import EIGHT, plan_of

from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Program
from levanter.models import LlamaConfig
from levanter.runplan import Target


@dataclass(frozen=True)
class Described:
    mesh: MeshSpec
    programs: tuple[Program, ...]


def hand_over(payload: dict[str, Any], target: Target) -> Described:
    """The Program.

    Args:
        payload: `model` (LlamaConfig's fields over `EIGHT`), `axes` (of the mesh), `dtype` and `int8` (of generation).
        target: what it is compiled for.
    """
    spec = MeshSpec(axes=tuple(payload["axes"].items()))
    config = LlamaConfig(**EIGHT | payload.get("model", {}))
    plan, _ = plan_of(config, spec, dtype=np.dtype(payload["dtype"]), int8=payload["int8"], platform=target.platform)
    assert plan.program is not None
    return Described(spec, (plan.program,))
