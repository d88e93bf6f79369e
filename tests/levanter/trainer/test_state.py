"""Where a training run's state lies: statistics beside the parameters they belong to."""

from dataclasses import replace

import haliax as hax
import jax
import numpy as np
import pytest
from helpers.llama_on_mesh import VOCAB, llama_2d, mappings_for, tiny_config

from haliax_ext.abstract import leaves
from haliax_ext.errors import IndivisibleError
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from levanter.models.precision import Precision
from levanter.optim import AdafactorConfig, AdamConfig, SgdConfig
from levanter.trainer.state import abstract_state, plan_state

pytestmark = pytest.mark.quick

CONFIG = tiny_config()
MESH = MeshSpec.of(data=4, model=2)
Q = "transformer.layers.stacked.self_attn.q_proj.weight"
O_PROJ = "transformer.layers.stacked.self_attn.o_proj.weight"


def state_of(optimizer, config=CONFIG, precision="f32", vocab=VOCAB):
    def build():
        return config.build(hax.Axis("vocab", vocab), key=jax.random.PRNGKey(0))

    return abstract_state(build, optimizer.build(10), Precision.parse(precision))


def test_every_statistic_of_adam_lies_where_its_parameter_lies():
    plan = plan_state(state_of(AdamConfig()), llama_2d(CONFIG), MESH)
    by_path = plan.whole.by_path
    moments = [p for p in by_path if ".mu." in p or ".nu." in p]
    assert len(moments) == 2 * len(plan.parameters.leaves)
    for path in moments:
        parameter = path.split(".mu.")[-1].split(".nu.")[-1]
        assert by_path[path].spec == plan.parameters.spec(parameter) == by_path[f"model.{parameter}"].spec
        assert by_path[path].leaf.names == plan.parameters.by_path[parameter].leaf.names


def test_overrides_are_written_for_parameters_and_reach_their_statistics():
    """A pattern without a leading ** matches paths in the model, and nothing else."""
    mappings = replace(mappings_for(CONFIG, MESH), overrides=(("lm_head", AxisMapping({"embed": None})),))
    plan = plan_state(state_of(AdamConfig()), mappings, MESH)
    specs = {path: p.spec for path, p in plan.whole.by_path.items() if path.endswith("lm_head.weight")}
    assert len(specs) == 3
    assert {str(spec) for spec in specs.values()} == {str(plan.parameters.spec("lm_head.weight"))}
    assert "data" not in str(plan.parameters.spec("lm_head.weight"))
    assert not any(f.kind == "override" for f in plan.whole.findings)


def test_adafactors_statistics_keep_the_places_of_the_axes_they_have():
    plan = plan_state(state_of(AdafactorConfig()), mappings_for(CONFIG, MESH), MESH)
    (rows,) = [p for path, p in plan.whole.by_path.items() if path.endswith(f".rows.{Q}")]
    (columns,) = [p for path, p in plan.whole.by_path.items() if path.endswith(f".columns.{Q}")]
    assert rows.leaf.names == ("layers", "kv_head", "q_heads_per_group", "head_size")
    assert rows.mesh_axes == ((), ("model",), (), ())
    assert columns.leaf.names == ("layers", "embed")
    assert columns.mesh_axes == ((), ("data",))
    (o_rows,) = [p for path, p in plan.whole.by_path.items() if path.endswith(f".rows.{O_PROJ}")]
    assert o_rows.leaf.names == ("layers", "embed")


def test_a_fault_is_reported_once_under_the_parameters_own_path():
    mappings = mappings_for(CONFIG, MESH)
    plan = plan_state(state_of(AdamConfig(), vocab=VOCAB + 1), mappings, MESH)
    assert {f.path for f in plan.whole.findings if f.error is not None} == {
        "embeddings.token_embeddings.weight",
        "lm_head.weight",
    }
    assert len(plan.whole.errors) == len(plan.parameters.errors)
    with pytest.raises(Exception, match="vocab") as caught:
        plan.whole.check()
    assert isinstance(plan.whole.errors[0], IndivisibleError)
    assert "optimizer" not in str(caught.value)


def test_statistics_that_are_large_where_their_parameter_is_not_are_faults_of_their_own():
    state = state_of(AdamConfig(), precision="bf16")
    state = replace(state, optimizer=state_of(AdamConfig()).optimizer)
    table = VOCAB * CONFIG.hidden_dim
    mappings = replace(
        mappings_for(CONFIG, MESH), overrides=(("lm_head", AxisMapping({"vocab": None, "embed": None})),)
    )
    plan = plan_state(state, mappings, MESH, hbm_bytes=20 * 3 * table)
    faults = [f for f in plan.whole.findings if f.error is not None]
    assert sorted(f.path.partition(".")[0] for f in faults) == ["optimizer", "optimizer"]
    assert all(f.path.endswith("lm_head.weight") for f in faults)


def test_bytes_by_group_add_up():
    state = state_of(AdamConfig())
    plan = plan_state(state, mappings_for(CONFIG, MESH), MESH)
    groups = plan.bytes_by_group
    parameters = sum(leaf.nbytes for leaf in leaves(state.model))
    # Embedding and head: over data and model; everything here divides, norms are over data only.
    assert groups["embedding"] == groups["head"] == VOCAB * CONFIG.hidden_dim * 4 // 8
    assert groups["norm"] == (2 * CONFIG.num_layers + 1) * CONFIG.hidden_dim * 4 // 4
    assert groups["mlp"] == CONFIG.num_layers * 3 * CONFIG.hidden_dim * CONFIG.intermediate_dim * 4 // 8
    kinds = ("embedding", "attention", "mlp", "norm", "head")
    assert sum(groups[kind] for kind in kinds) == groups["gradients"] == plan.parameters.bytes_per_device
    counters = 2 * 4
    assert groups["optimizer"] == 2 * groups["gradients"] + counters
    assert plan.whole.bytes_per_device == 3 * groups["gradients"] + counters + 4 + 8
    assert plan.parameters.total_bytes == parameters


def test_sixteen_bit_parameters_have_float32_gradients_and_no_more_state_than_asked_for():
    plan = plan_state(state_of(SgdConfig(), precision="bf16"), mappings_for(CONFIG, MESH), MESH)
    groups = plan.bytes_by_group
    assert groups["gradients"] == 2 * plan.parameters.bytes_per_device
    assert groups["optimizer"] == 4  # the schedule's counter
    assert {p.leaf.dtype for p in plan.parameters.leaves} == {np.dtype(jax.numpy.bfloat16)}


def test_one_device_has_everything():
    plan = plan_state(state_of(AdamConfig()), Mappings(), MeshSpec.of(data=1))
    assert plan.whole.bytes_per_device == plan.whole.total_bytes
