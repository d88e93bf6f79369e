"""Bytes on a chip: against the compiler's own count, against JAX's shards device by device, and by hand."""

import json
from collections import Counter

import haliax as hax
import jax
import numpy as np
import pytest
from helpers.hf_folder import TEXTS, write_folder
from jax.sharding import NamedSharding

from haliax_ext.abstract import array_leaf, leaves
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Input, Program, partition_spec
from levanter.commands.evaluate import eval_lm
from levanter.commands.train.lm import train_lm
from levanter.config import parse
from levanter.plan.hbm_budget import gradient_bytes, hbm_budget, program_residents
from levanter.plan.target_from_name import pod_target
from levanter.runplan import Target

CPU8 = Target(name="local", platform="cpu", kind="cpu", devices=8)
MODEL = {"type": "llama", "max_seq_len": 16, "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 2,
         "num_heads": 4, "num_kv_heads": 2, "cross_entropy_block_size": 8}  # fmt: skip


def training_plan(tmp_path, mesh, target=CPU8, **keys):
    document = {
        "data": {"tokenizer": "passthrough", "vocab_size": 128},
        "model": MODEL,
        "trainer": {
            "num_train_steps": 10,
            "train_batch_size": 16,
            "per_device_parallelism": 1,
            "mesh": mesh,
            **keys.pop("trainer", {}),
        },
        **keys,
    }
    path = tmp_path / "train.yaml"
    path.write_text(json.dumps(document))
    return train_lm.describe(parse(train_lm.TrainLmConfig, paths=[str(path)]), target)


def evaluation_plan(tmp_path, mesh, **trainer):
    folder = tmp_path / "model"
    folder.mkdir()
    write_folder(folder)
    (tmp_path / "docs.jsonl").write_text(json.dumps({"text": "\n".join(TEXTS) * 20}) + "\n")
    document = {
        "hf_checkpoint": str(folder),
        "max_eval_length": 32,
        "data": {"components": {"docs": {"source": {"validation_urls": [str(tmp_path / "docs.jsonl")]}}}},
        "trainer": {"mp": "f32", "per_device_eval_parallelism": 2, "mesh": mesh, **trainer},
    }
    path = tmp_path / "eval.yaml"
    path.write_text(json.dumps(document))
    return eval_lm.describe(parse(eval_lm.EvalLmConfig, paths=[str(path)]), CPU8)


TRAINING = {
    "tensor and data": ({"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model"}}, {}),
    "replicas": ({"axes": {"data": 1, "replica": 4, "model": 2}}, {}),
    "data, adafactor": ({"axes": {"data": 8}}, {"optimizer": {"type": "adafactor"}}),
    "16 bits": ({"axes": {"data": 4, "model": 2}}, {"trainer": {"mp": "p=bf16,c=bf16"}}),
    "an axis over two": (
        {
            "axes": {"data": 4, "model": 2},
            "shared_mapping": {"heads": None},
            "param_mapping": {"mlp": ["data", "model"], "embed": None},
        },
        {},
    ),
}
COMPILED = ("replicas", "an axis over two")


def assert_as_compiled(plan, devices, *names):
    budget, mesh = hbm_budget(plan), plan.mesh.build(devices)
    for program in (plan.program(name) for name in names):
        analysis = program.lower(mesh).compile({"xla_backend_optimization_level": 0}).memory_analysis()
        assert budget.arguments[program.name] == analysis.argument_size_in_bytes, program.name
    assert sum(r.nbytes for r in budget.residents) == sum(budget.groups.values()) == max(budget.arguments.values())
    return budget


@pytest.mark.parametrize("case", COMPILED)
def test_a_train_step_takes_what_the_compiler_counts(case, tmp_path, devices):
    mesh, keys = TRAINING[case]
    budget = assert_as_compiled(training_plan(tmp_path, mesh, **keys).check(), devices, "train_step")
    assert budget.largest == "train_step"


@pytest.mark.parametrize(
    ("mesh", "trainer"),
    [
        ({"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model"}}, {}),
        ({"axes": {"data": 8}}, {"mp": "bf16"}),
        ({"axes": {"model": 2, "replica": 4}, "param_mapping": {"embed": None, "vocab": "model"}}, {}),
    ],
)
def test_scoring_takes_what_the_compiler_counts(mesh, trainer, tmp_path, devices):
    assert_as_compiled(evaluation_plan(tmp_path, mesh, **trainer).check(), devices, "score")


@pytest.mark.parametrize("case", TRAINING)
def test_every_array_against_jax_device_by_device(case, tmp_path, devices):
    mesh, keys = TRAINING[case]
    plan = training_plan(tmp_path, mesh, **keys)
    jax_mesh, program = plan.mesh.build(devices), plan.program("train_step")
    found = {resident.path: resident for resident in program_residents(program, plan.mesh)}
    count = 0
    for argument in program.inputs:
        for leaf in leaves(argument.value):
            sharding = NamedSharding(jax_mesh, partition_spec(leaf, argument.placement))
            boxes = sharding.devices_indices_map(leaf.shape)
            sizes = set()
            for box in boxes.values():
                lengths = [len(range(*piece.indices(size))) for piece, size in zip(box, leaf.shape, strict=True)]
                sizes.add(int(np.prod(lengths, dtype=int)) * leaf.dtype.itemsize)
            resident = found[f"{argument.name}.{leaf.path}"]
            assert sizes == {resident.nbytes}
            # Whole on every chip: all devices hold the same box.
            assert resident.replicated == (len({str(box) for box in boxes.values()}) == 1)
            holders = Counter(str(box) for box in boxes.values())
            assert set(holders.values()) == {plan.mesh.ways(resident.replicated_over)}
            count += 1
    assert count == len(found)


def test_groups_by_hand(tmp_path):
    plan = training_plan(tmp_path, {"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model"}})
    budget = hbm_budget(plan)
    embed, mlp, layers, vocab, head = 32, 48, 2, 128, 8
    cut = {
        "embedding": vocab * embed * 4 // 8,
        "attention": layers * embed * head * (4 + 2 + 2 + 4) * 4 // 8,
        "mlp": layers * 3 * embed * mlp * 4 // 8,
        "head": vocab * embed * 4 // 8,
        "norm": (2 * layers + 1) * embed * 4 // 4,
    }
    parameters = sum(cut.values())
    assert budget.groups == {
        **cut,
        "other weights": 4 + 8,  # the step's number and the random key
        "optimizer": 2 * parameters + 2 * 4,  # and two counters
        "batch": 16 * 16 * (4 + 4 + 4 + 4) // 4,  # tokens, targets, weights, segments over `data`
    }
    # Beside the inputs, not among them.
    assert budget.gradients == parameters
    assert sum(plan.resident_bytes.values()) == sum(cut.values()) + budget.groups["optimizer"] + budget.gradients
    assert budget.replicated_bytes == 4 + 8 + 2 * 4
    assert budget.residents[0].nbytes == max(r.nbytes for r in budget.residents)
    assert {r.spec for r in budget.residents if r.path.endswith(".mlp.up_proj.weight")} == {"mlp → model, embed → data"}
    assert {r.spec for r in budget.residents if r.path.endswith("transformer.norm.weight")} == {"embed → data"}


def test_adafactors_rows_and_columns_are_the_optimizers(tmp_path):
    plan = training_plan(tmp_path, {"axes": {"data": 8}}, optimizer={"type": "adafactor"})
    found = {r.path: r.group for r in hbm_budget(plan).residents}
    statistics = {path for path in found if ".rows." in path or ".columns." in path}
    assert len(statistics) >= 2 * 9
    assert {found[path] for path in statistics} == {"optimizer"}


def test_gradients_of_narrow_parameters_are_wide_and_lie_where_they_lie(tmp_path):
    plan = training_plan(tmp_path, {"axes": {"data": 4, "model": 2}}, trainer={"mp": "p=bf16,c=bf16"})
    step, init = plan.program("train_step"), plan.program("init_state")
    assert gradient_bytes(step, plan.mesh) == 2 * plan.work.state_plan.parameters.bytes_per_device
    # What makes a state, or is given nothing but one, trains nothing.
    assert gradient_bytes(init, plan.mesh) == 0


def test_mesh_axes_of_size_one_cut_nothing(tmp_path):
    plan = training_plan(tmp_path, {"axes": {"data": -1, "model": 1}}, target=pod_target("v6e:1x1"))
    budget = hbm_budget(plan)
    assert budget.hbm_bytes == plan.target.hbm_bytes
    assert {resident.spec for resident in budget.residents} == {"replicated"}
    # On one chip everything is whole, and nothing is there twice.
    assert budget.replicated_bytes == 0
    assert budget.arguments["train_step"] == sum(r.whole_bytes for r in budget.residents)


def test_what_the_function_never_reads_is_held_all_the_same(devices):
    """The compiler drops such an argument; its caller holds the array."""
    spec = MeshSpec.of(data=8)
    axes = (hax.Axis("batch", 16), hax.Axis("embed", 8))
    value = hax.NamedArray(jax.ShapeDtypeStruct((16, 8), np.float32), axes)  # pyright: ignore
    mapping = AxisMapping({"batch": "data"})
    program = Program(
        name="half",
        function=lambda used, unused, cache: used + cache,
        inputs=tuple(Input(name=name, value=value, placement=mapping) for name in ("used", "unused", "kv_cache")),
        mappings=Mappings(compute=mapping),
    )
    residents = program_residents(program, spec)
    assert [(r.path, r.group, r.nbytes) for r in residents] == [
        ("used", "batch", 64),
        ("unused", "batch", 64),
        ("kv_cache", "kv cache", 64),
    ]
    compiled = program.lower(spec.build(devices)).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * 64
    assert array_leaf("used", value).nbytes == residents[0].whole_bytes
