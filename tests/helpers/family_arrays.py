"""Tiny models of every family with arrays of any bits, on devices and on the host, and how their export is planned."""

from collections.abc import Mapping
from typing import Any

import haliax as hax
import jax
import numpy as np
from helpers.family_models import transformers_config
from jax.sharding import Mesh, NamedSharding

from haliax_ext.abstract import Leaf, abstract, leaves
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import ShardingPlan, plan_sharding
from levanter.compat.hf.config_bridge import read_config
from levanter.compat.hf.export import ExportPlan, plan_export

SPEC = MeshSpec.of(data=4, model=2)
PARAMS = AxisMapping({"embed": "data", "mlp": "model", "expert": "model", "kv_head": "model", "vocab": "model"})
NO_EXPERTS = AxisMapping({"embed": "data", "mlp": "model", "kv_head": "model", "vocab": "model"})
ROWS = 272
"""Of the embedding: more than there are ids."""


def own_leaves(family: str) -> tuple[tuple[Leaf, ...], Any]:
    """The leaves of a tiny model, and its configuration."""
    config = read_config(transformers_config(family).to_dict()).config
    Vocab = hax.Axis("vocab", ROWS)
    return tuple(leaves(abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0))))), config


def planned(family: str) -> tuple[ExportPlan, ShardingPlan, Mapping[str, np.ndarray]]:
    """An export of a tiny model of a family: its tensors, where the leaves lie, and their values."""
    own, config = own_leaves(family)
    experts = any("expert" in leaf.names for leaf in own)
    params = AxisMapping({k: v for k, v in PARAMS.items() if not (experts and k == "mlp")}) if experts else NO_EXPERTS
    heads = dict(leaf_axis for leaf in own for leaf_axis in leaf.axes).get("kv_head", 2)
    if heads % 2:
        params = AxisMapping({k: v for k, v in params.items() if k != "kv_head"})
    sharding = plan_sharding(own, Mappings(params=params), SPEC).check()
    random = np.random.default_rng(7)
    values = {leaf.path: random.integers(0, 256, (leaf.nbytes,), np.uint8).view(leaf.dtype) for leaf in own}
    shaped = {leaf.path: values[leaf.path].reshape(leaf.shape) for leaf in own}
    return plan_export(own, config, hax.Axis("vocab", ROWS)), sharding, shaped


def on_devices(sharding: ShardingPlan, values: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """The values in their shards."""
    return {
        path: jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, sharding.spec(path)), lambda index, x=x: x[index]
        )
        for path, x in values.items()
    }
