"""Weights of a Llama from the mapping of training to one of generation, and what a device receives of them."""

import functools
from typing import Any

import numpy as np
from helpers.llama_on_mesh import abstract_model, mappings_for

from haliax_ext.abstract import leaves
from haliax_ext.hlo import CompiledFigures
from haliax_ext.mapping import Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from levanter.inference.hand_over import HandOver, generation_module, plan_hand_over
from levanter.models import LlamaConfig

EIGHT: dict[str, Any] = dict(
    hidden_dim=4096,
    intermediate_dim=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=128256,
    max_seq_len=8192,
)
"""Llama 3.1 8B."""


def plan_of(
    config: LlamaConfig, spec: MeshSpec, *, dtype, int8: bool = False, whole: bool = True, platform: str = "cpu"
) -> tuple[HandOver, Mappings]:
    """The plan, and the mappings of training: FSDP over `data` and tensor parallelism over `model`.

    Args:
        config: of the model.
        spec: the mesh of both.
        dtype: of generation; training keeps float32.
        int8: whether generation has integers.
        whole: whether a device of generation holds its slices for all of `data`; else they stay as in training.
        platform: of the devices.
    """
    model = abstract_model(config)
    training = mappings_for(config, spec)
    generating = mappings_for(config, spec, params={"embed": None}) if whole else training
    module = generation_module(
        functools.partial(abstract_model, config),
        model,
        None,
        dtype=np.dtype(dtype),
        int8=int8,
        platform=platform,
        devices=spec.size,
    )
    plan = plan_hand_over(
        model,
        plan_sharding(leaves(model), training, spec),
        module,
        plan_sharding(leaves(module), generating, spec),
        mappings=generating,
        compiler_options={},
    )
    return plan, training


def received_bytes(figures: CompiledFigures) -> tuple[int, int]:
    """Bytes that a device gets of gathered and permuted arrays, and of reduced ones."""
    gathered = reduced = 0
    for one in figures.collectives:
        if one.kind == "all-reduce":
            reduced += one.total_bytes
        else:
            # Of a gathered array a device holds one part already.
            part = one.total_bytes // one.members if one.kind in ("all-gather", "all-to-all") else 0
            gathered += one.total_bytes - part
    return gathered, reduced
