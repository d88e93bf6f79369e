"""Leaves that no file has: the same numbers on every mesh, made shard by shard, named in the plan."""

import haliax as hax
import jax
import numpy as np
import pytest
from helpers.memory_source import MemorySource
from helpers.tiny_llama import assembled, leaf, tiny_leaves, tiny_rules, tiny_tensors

from haliax_ext.abstract import Leaf
from haliax_ext.abstract_source import ExpectedSource
from haliax_ext.initializers import Constant, InitialRule, Normal
from haliax_ext.loading import load, plan_loading
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.rules import WeightMismatchError, WeightRuleError, WeightRules

F32 = np.dtype(np.float32)
UP = Leaf("q.up", (("layers", 3), ("kv_head", 4), ("low_rank", 2)), F32)
DOWN = Leaf("q.down", (("layers", 3), ("low_rank", 2), ("embed", 1024)), F32)
OTHER = Leaf("k.down", DOWN.axes, F32)
COUNTS = Leaf("counts", (("embed", 1024),), np.dtype(np.int32))
HEAD = "transformer.norm.weight"


class Ascending:
    """A third party's initializer."""

    def __call__(self, leaf, key):
        del key
        return hax.arange(hax.Axis("embed", leaf.axis_size("embed"))).astype(leaf.dtype)

    def __str__(self):
        return "0, 1, 2, …"


RULES = WeightRules(
    rules=tiny_rules().rules,
    initial=(
        InitialRule(target="q.up", values=Constant(0.5)),
        InitialRule(target="q.down", values=Normal(0.25), seed=3),
        InitialRule(target="k.down", values=Normal(0.25), seed=3),
        InitialRule(target="counts", values=Ascending()),
    ),
)
LEAVES = [UP, *tiny_leaves(), DOWN, OTHER, COUNTS]
MESHES = {
    "1": (MeshSpec.of(data=1, model=1), {}),
    "4": (MeshSpec.of(data=2, model=2), {"embed": "data", "kv_head": "model"}),
    "8": (MeshSpec.of(data=4, model=2), {"embed": ["model", "data"]}),
    "8, whole": (MeshSpec.of(data=8, model=1), {}),
}


def loaded(size, devices, rules=RULES, leaves=LEAVES, tensors=None, **options):
    spec, mapping = MESHES[size]
    source, mesh = MemorySource(tiny_tensors() if tensors is None else tensors), spec.build(devices[: spec.size])
    sharding = plan_sharding(leaves, Mappings(params=AxisMapping(mapping)), spec).check()
    plan = plan_loading(sharding, rules, source, **options)
    return source, sharding, plan, load(plan, sharding, source, mesh), mesh


@pytest.mark.parametrize("size", MESHES)
def test_the_same_numbers_on_every_mesh(size, devices):
    source, sharding, plan, found, mesh = loaded(size, devices)
    *_, alone, _ = loaded("1", devices)
    assert list(found) == [each.path for each in LEAVES]
    for each in LEAVES:
        np.testing.assert_array_equal(np.asarray(found[each.path]), np.asarray(alone[each.path]), err_msg=each.path)
        assert found[each.path].sharding.is_equivalent_to(sharding.sharding(each.path, mesh), len(each.axes))
        assert found[each.path].dtype == each.dtype
    for path, values in assembled(source.arrays).items():
        np.testing.assert_array_equal(np.asarray(found[path]), values)
    assert source.bytes_read == source.nbytes == plan.source_bytes and plan.amplification == 1.0
    assert plan.bytes_per_device == sharding.bytes_per_device


def test_the_numbers_are_what_the_rules_say(devices):
    *_, found, _ = loaded("4", devices)
    assert (np.asarray(found["q.up"]) == 0.5).all()
    np.testing.assert_array_equal(np.asarray(found["counts"]), np.arange(1024))
    q, k = np.asarray(found["q.down"]), np.asarray(found["k.down"])
    assert abs(q.std() - 0.25) < 0.01 and abs(q.mean()) < 0.01
    assert abs(np.corrcoef(q.ravel(), k.ravel())[0, 1]) < 0.05, "two paths have numbers of their own"
    other = (
        WeightRules(rules=RULES.rules, initial=(*RULES.initial[:1], *RULES.initial[2:])),
        InitialRule(target="q.down", values=Normal(0.25), seed=4),
    )
    reseeded = WeightRules(rules=other[0].rules, initial=(*other[0].initial, other[1]))
    *_, again, _ = loaded("4", devices, rules=reseeded)
    assert abs(np.corrcoef(q.ravel(), np.asarray(again["q.down"]).ravel())[0, 1]) < 0.05
    np.testing.assert_array_equal(np.asarray(again["k.down"]), k)


def test_each_device_makes_its_own_shards(devices):
    _, sharding, plan, *_ = loaded("8", devices)
    program = plan.initialize_program
    assert plan.programs[0] is program and program.name == "load.initialize"
    compiled = program.lower(MESHES["8"][0].build(devices)).compile()
    made = [sharding.by_path[each.path] for each in plan.initial]
    nbytes = sum(int(np.prod(p.shard_shape)) * p.leaf.dtype.itemsize for p in made)
    memory = compiled.memory_analysis()
    assert nbytes == plan.initial_bytes and memory.output_size_in_bytes < nbytes + 256
    assert memory.temp_size_in_bytes <= plan.initial_transient_bytes + 1024
    assert plan.transient_device_bytes == plan.initial_transient_bytes == 2 * nbytes
    text = compiled.as_text()
    assert text is not None and not any(word in text for word in ("all-gather", "all-reduce", "all-to-all"))


def test_the_plan_says_what_is_made():
    spec, mapping = MESHES["4"]
    sharding = plan_sharding(LEAVES, Mappings(params=AxisMapping(mapping)), spec).check()
    for source in (MemorySource(tiny_tensors()), ExpectedSource.of(RULES, LEAVES, dtype=F32)):
        plan = plan_loading(sharding, RULES, source, dtype=np.dtype(np.float16))
        assert [each.path for each in plan.initial] == ["q.up", "q.down", "k.down", "counts"]
        assert plan.skipped == ()
        (line,) = (line for line in str(plan).splitlines() if "initialized, not read" in line)
        assert "q.up float16[layers 3, kv_head 4, low_rank 2]: 0.5 everywhere" in line
        assert "k.down float16[layers 3, low_rank 2, embed 1024]: normal, σ 0.25; counts int32" in line
        for program in plan.programs:
            assert program.lower(spec.abstract()).as_text()


def test_what_the_source_has_is_read(devices):
    """A rule and an initializer for one leaf: the initializer is for sources that lack it."""
    rules = WeightRules(rules=tiny_rules().rules, initial=(InitialRule(target=HEAD, values=Constant(1.0)),))
    tensors = tiny_tensors()
    _, _, plan, found, _ = loaded("4", devices, rules=rules, leaves=tiny_leaves())
    assert plan.initial == ()
    np.testing.assert_array_equal(np.asarray(found[HEAD]), tensors.pop("model.norm.weight"))
    _, _, plan, found, _ = loaded("4", devices, rules=rules, leaves=tiny_leaves(), tensors=tensors)
    assert [each.path for each in plan.initial] == [HEAD]
    assert (np.asarray(found[HEAD]) == 1).all()


def test_what_neither_has_is_refused():
    with pytest.raises(WeightRuleError, match=r"no rule for extra"):
        RULES.match([*LEAVES, leaf("extra", "embed")], MemorySource(tiny_tensors()).tensors)
    tensors = tiny_tensors()
    del tensors["model.layers.1.mlp.gate_proj.weight"]
    path = "transformer.layers.stacked.mlp.gate_proj.weight"
    partly = WeightRules(rules=RULES.rules, initial=(*RULES.initial, InitialRule(target=path, values=Constant())))
    with pytest.raises(WeightMismatchError, match=r"model\.layers\.1\.mlp\.gate_proj\.weight"):
        partly.match(LEAVES, MemorySource(tensors).tensors)
    with pytest.raises(WeightRuleError, match=r"no tensor of a checkpoint contains q\.up, q\.down, k\.down, counts"):
        RULES.sources(LEAVES)


def test_an_initializer_must_make_its_leaf():
    rules = WeightRules(rules=RULES.rules, initial=(InitialRule(target="q.up", values=Ascending()),))
    sharding = plan_sharding([UP, *tiny_leaves()], Mappings(), MESHES["4"][0]).check()
    plan = plan_loading(sharding, rules, MemorySource(tiny_tensors()))
    with pytest.raises((AssertionError, KeyError)):
        jax.eval_shape(lambda: plan.initial[0].rule.array(plan.initial[0].leaf))
