"""The presets of `config/mesh`: what they resolve to, and the plan of every Llama weight under each, as golden facts.

Two plans and a diff are golden in words too.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from helpers.golden import assert_golden, assert_golden_json
from helpers.llama_on_mesh import VOCAB, abstract_model, random_arrays, run_on, tiny_config
from helpers.llama_shapes import model_axes, shape_leaves
from helpers.losses import mean_loss
from helpers.plan_facts import array_facts, sharding_facts

from haliax_ext.abstract import leaves
from haliax_ext.activations import Activation, plan_activations
from haliax_ext.mapping import Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.plan_report import plan_diff, plan_report
from haliax_ext.planner import plan_sharding
from levanter.config.loader import parse
from levanter.mesh import MeshConfig, ModelAxes, resolve
from levanter.models.axes import KNOWN_AXES
from levanter.models.scoring import next_tokens
from levanter.trainer.config import TrainerConfig

PRESETS = Path(__file__).parents[3] / "config" / "mesh"
V4, V5P, V6E = (int(gib * 2**30) for gib in (30.75, 95.74, 31.25))
"""Usable memory of a chip, as the compiler states it."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """The part of an entry point's document that a preset may hold."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)


def preset(name, tmp_path, **axes) -> MeshConfig:
    """The preset as an entry point's document extends it."""
    document = tmp_path / f"{name}.yaml"
    sizes = ", ".join(f"{axis}: {size}" for axis, size in axes.items())
    document.write_text(f"extends: {PRESETS / name}.yaml\ntrainer: {{mesh: {{axes: {{{sizes}}}}}}}\n")
    return parse(Document, paths=[str(document)]).trainer.mesh


def planned(config, model, *, devices, hbm_bytes, dtype="float32"):
    found = resolve(config, model_axes(model), devices=devices)
    return plan_sharding(shape_leaves(model, dtype), found.mappings, found.spec, hbm_bytes=hbm_bytes), found


def test_the_default_is_the_built_in_one_with_vocab(tmp_path):
    assert preset("default", tmp_path, model=4) == MeshConfig(
        axes={"model": 4}, shared_mapping={"mlp": "model", "heads": "model", "vocab": "model"}
    )


@pytest.mark.parametrize(("context", "exchange"), [(4, "heads"), (8, "heads"), (16, "gather")])
def test_the_one_for_long_sequences(context, exchange, tmp_path):
    found = resolve(preset("context", tmp_path, context=context), model_axes("llama3.1_8b"), devices=16)
    assert (found.method, found.position_ways, found.batch_ways) == (exchange, context, 16 // context)
    assert found.mappings.params.mesh_axes("embed") == ("data", "context")
    assert any(note.startswith(f"attention_mapping auto is {exchange}: 8 kv_head") for note in found.notes)


CASES = [
    ("llama3.1_8b", 4, 32, V6E),
    ("llama3.1_70b", 8, 128, V5P),
]


@pytest.mark.golden
@pytest.mark.parametrize("name", ["default", "llama_2d"])
@pytest.mark.parametrize(("model", "tensor_parallel", "devices", "hbm"), CASES)
def test_every_weight_of_the_published_shapes(name, model, tensor_parallel, devices, hbm, tmp_path):
    plan, _ = planned(preset(name, tmp_path, model=tensor_parallel), model, devices=devices, hbm_bytes=hbm)
    plan.check()
    assert_golden_json(f"sharding/{model}.{name}.json", sharding_facts(plan, arrays=True))


@pytest.mark.golden
@pytest.mark.parametrize(("model", "tensor_parallel", "devices", "hbm"), CASES)
def test_the_presets_compared(model, tensor_parallel, devices, hbm, tmp_path):
    plans = [
        planned(preset(name, tmp_path, model=tensor_parallel), model, devices=devices, hbm_bytes=hbm)[0]
        for name in ("default", "llama_2d")
    ]
    first, second = (array_facts(plan) for plan in plans)
    moved = {path: [first[path], second[path]] for path in first if first[path] != second[path]}
    assert_golden_json(f"sharding/{model}.diff.json", moved)
    text = plan_diff(*plans, names=("default", "llama_2d"))
    assert f"\n{len(moved)} of {len(first)} arrays are placed differently" in text
    if model == "llama3.1_70b":
        assert_golden(f"sharding/{model}.diff.txt", text)


@pytest.mark.golden
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_405b_on_factored_heads(dtype, tmp_path):
    """v4-256 is 128 chips; heads over model × group, K/V whole over group."""
    config = preset("default", tmp_path, model=8, group=16)
    pair = ["model", "group"]
    config = MeshConfig(axes=config.axes, shared_mapping=dict.fromkeys(config.shared_mapping, pair))
    plan, _ = planned(config, "llama3.1_405b", devices=128, hbm_bytes=V4, dtype=dtype)
    assert_golden_json(f"sharding/llama3.1_405b.model8_group16.{dtype}.json", sharding_facts(plan.check(), arrays=True))


@pytest.mark.golden
def test_405b_as_published_is_refused():
    """What upstream's 405B configuration came to on the chip: `heads` reached o_proj alone."""
    config = MeshConfig(
        axes={"model": 8, "group": 16},
        shared_mapping={"mlp": ["model", "group"], "heads": None},
        overrides={"**.o_proj": {"heads": ["model", "group"]}},
    )
    plan, _ = planned(config, "llama3.1_405b", devices=128, hbm_bytes=V4)
    assert f"{plan.bytes_per_device / 2**30:.1f} GiB" == "168.0 GiB"
    assert [e.path.split(".")[-2] for e in plan.errors] == ["token_embeddings", "q_proj", "k_proj", "v_proj", "lm_head"]
    assert_golden_json("sharding/llama3.1_405b.as_published.json", sharding_facts(plan, arrays=True))
    assert_golden("sharding/llama3.1_405b.as_published.txt", plan_report(plan))


@pytest.mark.golden
def test_smollm2_under_the_default_with_its_own_fragment(tmp_path):
    config = preset("default", tmp_path, data=4, model=2)
    config = MeshConfig(axes=config.axes, shared_mapping={"mlp": "model", "vocab": "model", "heads": None})
    plan, _ = planned(config, "smollm2_135m", devices=8, hbm_bytes=None)
    assert_golden_json("sharding/smollm2_135m.demo.json", sharding_facts(plan.check(), arrays=True))
    assert_golden("sharding/smollm2_135m.demo.txt", plan_report(plan))


def llama_activations(axes, *, batch, position):
    tokens = (("batch", batch), ("position", position))
    kv = (("kv_head", axes["kv_head"]),)
    group, size = (("q_heads_per_group", axes["q_heads_per_group"]),), (("head_size", axes["head_size"]),)
    return [
        Activation(name="residual", axes=(*tokens, ("embed", axes["embed"])), mapping="residual"),
        Activation(name="queries", axes=(*tokens, *kv, *group, *size)),
        Activation(name="keys", axes=(("batch", batch), ("key_position", position), *kv, *size)),
        Activation(name="mlp hidden", axes=(*tokens, ("mlp", axes["mlp"]))),
        Activation(name="logits", axes=(*tokens, ("vocab", axes["vocab"]))),
    ]


@pytest.mark.golden
@pytest.mark.parametrize("name", ["default", "llama_2d"])
def test_activations_of_70b(name, tmp_path):
    config = preset(name, tmp_path, model=8)
    found = resolve(config, model_axes("llama3.1_70b"), devices=128)
    listed = llama_activations(model_axes("llama3.1_70b").sizes, batch=16, position=4096)
    plan = plan_activations(listed, found.mappings, found.spec).check()
    assert_golden_json(f"sharding/llama3.1_70b.{name}.activations.json", sharding_facts(plan, arrays=True))


def loss(model, tokens):
    return mean_loss(model, tokens, next_tokens(tokens), chunk=12).array


@pytest.mark.parametrize("name", ["default", "llama_2d"])
def test_a_preset_computes_what_one_device_computes(name, tmp_path, devices):
    """From the file on disk to a loss on 8 devices."""
    config = tiny_config()
    parts = leaves(abstract_model(config))
    found = resolve(
        preset(name, tmp_path, data=4, model=2), ModelAxes.of(parts, known=KNOWN_AXES, position=32), devices=8
    )
    plan_sharding(parts, found.mappings, found.spec).check()
    arrays = random_arrays(config)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (8, 32)).astype(np.int32)
    alone = run_on(loss, config, arrays, tokens, MeshSpec.of(data=1), Mappings(), devices)
    together = run_on(loss, config, arrays, tokens, found.spec, found.mappings, devices)
    assert abs(float(together) - float(alone)) < 1e-5
