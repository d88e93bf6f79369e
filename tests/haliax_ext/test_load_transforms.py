"""Integers and their scales from one tensor: the numbers of NumPy on every mesh, each byte read once."""

import math

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.integer_llama import LEAVES, RULES, by_numpy, expected, inputs_of, integers, split
from helpers.memory_source import MemorySource
from helpers.tiny_llama import SIZES, tiny_leaves, tiny_rules, tiny_tensors

from haliax_ext import load_strategy
from haliax_ext.abstract import Leaf
from haliax_ext.abstract_source import ExpectedSource
from haliax_ext.loading import load, plan_loading
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.read_scheduler import byte_ranges
from haliax_ext.rules import WeightRule, WeightRuleError, WeightRules

MESHES = {
    "1": MeshSpec.of(data=1, model=1),
    "4": MeshSpec.of(data=2, model=2),
    "8": MeshSpec.of(data=4, model=2),
}
MAPPINGS = {
    "replicated": {},
    "contracted axes cut": {"embed": "data", "mlp": "model", "head_size": "model"},
    "channels cut": {"mlp": "data", "kv_head": "model", "vocab": "data"},
    "contracted over both": {"embed": ["model", "data"], "q_heads_per_group": None},
}


def planned(mapping, source, mesh, **options):
    sharding = plan_sharding(LEAVES, Mappings(params=AxisMapping(mapping)), mesh).check()
    return sharding, plan_loading(sharding, RULES, source, **options)


def assert_loaded(found, sharding, mesh, tensors):
    wanted = expected(tensors)
    assert list(found) == [leaf.path for leaf in LEAVES]
    for path, values in wanted.items():
        array = found[path]
        assert array.dtype == values.dtype
        np.testing.assert_array_equal(np.asarray(array), values, err_msg=path)
        assert array.sharding.is_equivalent_to(sharding.sharding(path, mesh), array.ndim), path
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index], err_msg=path)


@pytest.mark.parametrize("way", ["direct", "exchange"])
@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.parametrize("size", MESHES)
def test_values_and_scales_are_numpys_on_every_mesh(size, name, way, devices, monkeypatch):
    """Bit for bit, so they are the same on every mesh; in slabs that are exchanged too."""
    if way == "exchange":
        monkeypatch.setattr(load_strategy, "DIRECT_AMPLIFICATION", 0.5)
    spec, tensors = MESHES[size], tiny_tensors()
    source, mesh = MemorySource(tensors), spec.build(devices[: spec.size])
    sharding, plan = planned(MAPPINGS[name], source, spec)
    assert {each.strategy for each in plan.loads} == {way}
    found = load(plan, sharding, source, mesh)
    assert_loaded(found, sharding, mesh, tensors)
    assert source.bytes_read == source.nbytes == plan.source_bytes == found.report.bytes_read
    assert plan.amplification == 1.0
    assert plan.bytes_per_device == sharding.bytes_per_device == found.report.bytes_per_device


@pytest.mark.parametrize(("way", "limit"), [("direct", 1100), ("exchange", 2200)])
def test_a_layer_at_a_time_from_half_precision(way, limit, devices, monkeypatch):
    if way == "exchange":
        monkeypatch.setattr(load_strategy, "DIRECT_AMPLIFICATION", 0.5)
    spec, tensors = MESHES["8"], tiny_tensors(ml_dtypes.bfloat16)
    source, mesh = MemorySource(tensors), spec.build(devices)
    mapping = MAPPINGS["contracted axes cut"]
    sharding, plan = planned(mapping, source, spec, transient_limit=limit, dtype=np.dtype(np.float32))
    q = plan.by_path["transformer.layers.stacked.self_attn.q_proj.weight"]
    assert q.pieces == ((0, 1), (1, 2), (2, 3)) and q.leaf.dtype == ml_dtypes.bfloat16
    assert q.strategy == way and q.transient_device_bytes <= limit
    found = load(plan, sharding, source, mesh, memory_bytes=1)
    for path, values in expected(tensors).items():
        np.testing.assert_array_equal(np.asarray(found[path]), values.astype(found[path].dtype), err_msg=path)
    assert source.bytes_read == source.nbytes == plan.source_bytes


@pytest.mark.parametrize("limit", [200, 1 << 30])
@pytest.mark.parametrize("mapping", [{}, {"mlp": "data", "embed": "model"}, {"embed": "data", "head_size": "model"}])
@pytest.mark.parametrize(
    "hosts",
    [np.arange(8).reshape(4, 2) // 4, np.tile(np.arange(2), (4, 1)), np.arange(8).reshape(4, 2)],
    ids=["rows", "columns", "one each"],
)
def test_all_hosts_together_read_each_byte_once(hosts, mapping, limit):
    source = MemorySource(tiny_tensors())
    _, plan = planned(mapping, source, MESHES["8"], hosts=hosts, transient_limit=limit)
    times = np.zeros(source.nbytes, np.int32)
    for host in range(plan.num_hosts):
        ranges = list(byte_ranges(plan, source, host))
        for piece in ranges:
            times[piece.start : piece.stop] += 1
        assert sum(piece.nbytes for piece in ranges) == plan.bytes_by_host[host]
    assert times.min() == times.max() == 1
    assert plan.amplification == 1.0


def test_every_program_is_planned_and_the_compiler_needs_no_more_than_planned(devices):
    sizes = SIZES | {"embed": 1024, "mlp": 2048}
    spec, mapping = MESHES["8"], MAPPINGS["contracted axes cut"]
    plain = [leaf for leaf in tiny_leaves(sizes=sizes) if "mlp" in leaf.path]
    leaves = [each for leaf in plain for each in split(leaf)]
    rules = WeightRules(
        rules=tuple(rule for rule in tiny_rules().rules if "mlp" in rule.target),
        derived=tuple(integers(leaf.path, inputs_of(leaf) or ()) for leaf in plain),
    )
    sharding = plan_sharding(leaves, Mappings(params=AxisMapping(mapping)), spec).check()
    source = ExpectedSource.of(rules, leaves, dtype=np.dtype(ml_dtypes.bfloat16))
    for limit, pieces in ((1 << 30, 1), (4 << 20, 3)):
        plan = plan_loading(sharding, rules, source, transient_limit=limit)
        by_name = {program.name: program for program in plan.programs}
        for each in plan.loads:
            assert len(each.pieces) == pieces
            (name,) = (name for name in by_name if name.startswith(f"load.derive.{each.path}"))
            memory = by_name[name].lower(spec.build(devices)).compile().memory_analysis()
            results = each.shard_bytes(spec)
            beyond = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
            beyond -= memory.alias_size_in_bytes + (results if pieces > 1 else 0)
            assert beyond <= each.transient_device_bytes + 4096, each.path
            slab = math.prod(size for _, size in each.leaf.axes) * 2 // 8 // pieces
            assert each.transient_device_bytes < 8 * slab


def test_the_plan_says_what_is_computed():
    _, plan = planned({}, MemorySource(tiny_tensors()), MESHES["4"])
    q = "transformer.layers.stacked.self_attn.q_proj.weight"
    assert f"computed from {q}, which is not kept: {q}.values, {q}.scale" in str(plan)
    assert plan.skipped == ()


def test_a_table_that_does_not_fit_is_refused():
    q = "transformer.layers.stacked.self_attn.q_proj.weight"
    tensors = MemorySource(tiny_tensors()).tensors
    with pytest.raises(WeightRuleError, match=rf"{q} produces {q}\.scale, which is not a leaf of this model"):
        RULES.match([leaf for leaf in LEAVES if leaf.path != f"{q}.scale"], tensors)
    wide = [Leaf(x.path, x.axes, np.dtype(np.int16)) if x.path == f"{q}.values" else x for x in LEAVES]
    with pytest.raises(WeightRuleError, match=r"produces .*int8\[.*, but the model has .*int16"):
        RULES.match(wide, tensors)
    with pytest.raises(WeightRuleError, match=rf"no tensor of a checkpoint contains {q}\.values"):
        RULES.sources(LEAVES)


@pytest.mark.parametrize(
    ("way", "limit", "pieces"),
    [("direct", 1 << 20, 1), ("direct", 250, 5), ("direct", 1, 10), ("exchange", 1 << 20, 1), ("exchange", 1, 5)],
)
def test_a_leaf_without_layers_arrives_in_parts_of_its_shards(way, limit, pieces, devices, monkeypatch):
    """As an output head does, whose channels are sharded and padded: also where a part is of padding alone."""
    if way == "exchange":
        monkeypatch.setattr(load_strategy, "DIRECT_AMPLIFICATION", 0.5)
    values = np.random.default_rng(0).normal(size=(37, 16)).astype(ml_dtypes.bfloat16)
    source, spec = MemorySource({"w": values}), MESHES["8"]
    leaf = Leaf("w", (("vocab", 40), ("embed", 16)), np.dtype(np.float32))
    sharding, plan = planned_head(leaf, source, spec, transient_limit=limit)
    (each,) = plan.loads
    assert len(each.pieces) == pieces and each.strategy == way
    assert each.transient_device_bytes <= limit or limit == 1
    found = load(plan, sharding, source, spec.build(devices))
    wanted = by_numpy(np.pad(values.astype(np.float32), ((0, 3), (0, 0))), leaf, ("embed",))
    for path, exact in (("w.values", wanted[0]), ("w.scale", wanted[1])):
        np.testing.assert_array_equal(np.asarray(found[path]), exact)
        assert found[path].sharding.is_equivalent_to(sharding.sharding(path, spec.build(devices)), exact.ndim)
    assert source.bytes_read == source.nbytes == plan.source_bytes == sum(plan.bytes_by_host)
    for program in plan.programs:
        text = program.lower(spec.build(devices)).compile().as_text() or ""
        # The scale is a maximum over the two parts of `embed`; nothing else is sent but what is exchanged.
        sent = ("all-gather", "permute") if way == "exchange" else ("all-gather", "all-to-all", "permute")
        assert not [word for word in sent if word in text], program.name


@pytest.mark.parametrize("hosts", [np.arange(8).reshape(4, 2) // 4, np.tile(np.arange(2), (4, 1))], ids=str)
def test_parts_of_shards_are_read_once_by_all_hosts_together(hosts):
    source = MemorySource({"w": np.zeros((37, 16), np.float32)})
    leaf = Leaf("w", (("vocab", 40), ("embed", 16)), np.dtype(np.float32))
    _, plan = planned_head(leaf, source, MESHES["8"], hosts=hosts, transient_limit=400)
    times = np.zeros(source.nbytes, np.int32)
    for host in range(plan.num_hosts):
        ranges = list(byte_ranges(plan, source, host))
        for piece in ranges:
            times[piece.start : piece.stop] += 1
        assert sum(piece.nbytes for piece in ranges) == plan.bytes_by_host[host]
    assert times.min() == times.max() == 1


def planned_head(leaf, source, spec, **options):
    rules = WeightRules(
        rules=(WeightRule(target="w", source="w", axes=(("vocab",), ("embed",)), padded=("vocab",)),),
        derived=(integers("w", ("embed",)),),
    )
    leaves = [
        Leaf("w.values", leaf.axes, np.dtype(np.int8)),
        Leaf("w.scale", leaf.axes[:1], np.dtype(np.float32)),
    ]
    sharding = plan_sharding(leaves, Mappings(params=AxisMapping({"vocab": "data", "embed": "model"})), spec).check()
    return sharding, plan_loading(sharding, rules, source, **options)


def test_padding_has_integers_and_scales_of_zero(devices):
    values = np.random.default_rng(0).normal(size=(37, 16)).astype(np.float32)
    source, spec = MemorySource({"w": values}), MESHES["8"]
    leaf = Leaf("w", (("vocab", 40), ("embed", 16)), np.dtype(np.float32))
    sharding, plan = planned_head(leaf, source, spec)
    found = load(plan, sharding, source, spec.build(devices))
    wanted = by_numpy(np.pad(values, ((0, 3), (0, 0))), leaf, ("embed",))
    np.testing.assert_array_equal(np.asarray(found["w.values"]), wanted[0])
    np.testing.assert_array_equal(np.asarray(found["w.scale"]), wanted[1])
    assert not np.asarray(jax.device_get(found["w.scale"]))[37:].any()
