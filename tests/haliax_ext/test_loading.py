"""Loading into shards: values, bytes, adopted memory, budget, progress, errors."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.memory_source import MemorySource
from helpers.tiny_llama import assembled, leaf, tiny_leaves, tiny_rules, tiny_tensors

from haliax_ext import loading
from haliax_ext.host_reader import HostReader, aligned_empty
from haliax_ext.loading import LoadedArrays, default_memory_bytes, load, plan_loading
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.rules import WeightMismatchError, WeightRule, WeightRules

MESH = MeshSpec.of(data=4, model=2)
MAPPINGS = {
    "replicated": {},
    "rows and columns": {"embed": "data", "mlp": "model", "kv_head": "model", "vocab": "model"},
    "groups and heads inside": {"head_size": "data", "q_heads_per_group": "model"},
    "two mesh axes on one": {"embed": ["model", "data"]},
    "other order": {"embed": ["data", "model"], "kv_head": None},
}


def planned(mapping, source, *, mesh=MESH, dtype=None, leaves=None, rules=None):
    sharding = plan_sharding(leaves or tiny_leaves(), Mappings(params=AxisMapping(mapping)), mesh).check()
    return sharding, plan_loading(sharding, rules or tiny_rules(), source, dtype=dtype)


@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.parametrize(
    ("stored", "wanted"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_values_and_shardings(name, stored, wanted, devices):
    stored, wanted = (np.dtype(getattr(ml_dtypes, t, None) or t) for t in (stored, wanted))
    tensors = tiny_tensors(stored)
    source = MemorySource(tensors)
    mesh = MESH.build(devices)
    sharding, plan = planned(MAPPINGS[name], source, dtype=wanted)
    found = load(plan, sharding, source, mesh)
    for path, values in assembled(tensors).items():
        assert found[path].dtype == wanted
        np.testing.assert_array_equal(np.asarray(found[path]), values.astype(wanted))
        assert found[path].sharding.is_equivalent_to(sharding.sharding(path, mesh), values.ndim)
        for shard in found[path].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values.astype(wanted)[shard.index])
    assert source.bytes_read == source.nbytes == plan.source_bytes == found.report.bytes_read
    assert list(found) == [each.leaf.path for each in sharding.leaves]


@pytest.mark.parametrize("read_bytes", [1, 100, 1000])
def test_reads_of_any_length(read_bytes, devices):
    tensors = tiny_tensors()
    source = MemorySource(tensors)
    sharding, plan = planned(MAPPINGS["groups and heads inside"], source)
    found = load(plan, sharding, source, MESH.build(devices), read_bytes=read_bytes)
    for path, values in assembled(tensors).items():
        np.testing.assert_array_equal(np.asarray(found[path]), values)
    assert source.bytes_read == source.nbytes


def test_padded_vocabulary_is_filled_with_zeros(devices):
    values = np.random.default_rng(0).normal(size=(37, 16)).astype(np.float32)
    source = MemorySource({"w": values})
    rules = WeightRules(rules=(WeightRule(target="w", source="w", axes=(("vocab",), ("embed",)), padded=("vocab",)),))
    sharding, plan = planned({"vocab": ["data", "model"]}, source, leaves=[leaf("w", "vocab", "embed")], rules=rules)
    found = np.asarray(load(plan, sharding, source, MESH.build(devices))["w"])
    np.testing.assert_array_equal(found[:37], values)
    assert not found[37:].any()


def test_optional_leaves_may_be_absent(devices):
    source = MemorySource({"w": np.ones(16, np.float32)})
    rules = WeightRules(
        rules=(
            WeightRule(target="w", source="w", axes=(("embed",),)),
            WeightRule(target="b", source="b", axes=(("embed",),), optional=True),
        )
    )
    sharding, plan = planned({}, source, leaves=[leaf("w", "embed"), leaf("b", "embed")], rules=rules)
    assert plan.skipped == ("b",)
    assert list(load(plan, sharding, source, MESH.build(devices))) == ["w"]


def test_cpu_devices_adopt_the_memory_that_was_read_into(devices):
    """One copy in memory: reads land in it, devices keep it, devices with equal shards share it."""
    source = MemorySource(tiny_tensors())
    sharding, plan = planned({"vocab": "data"}, source)
    found = load(plan, sharding, source, MESH.build(devices))
    shards = found["embeddings.token_embeddings.weight"].addressable_shards
    pointers = {shard.data.unsafe_buffer_pointer() for shard in shards}
    assert len(pointers) == 4, "8 devices, 4 distinct shards"
    block = aligned_empty((3, 5), np.dtype(np.float32))
    assert jax.device_put(block, devices[0]).unsafe_buffer_pointer() == block.ctypes.data


def test_reading_is_in_a_deterministic_order(devices):
    def order():
        source = MemorySource(tiny_tensors())
        sharding, plan = planned({"embed": "data", "mlp": "model"}, source)
        load(plan, sharding, source, MESH.build(devices), threads=1)
        return source.reads

    first = order()
    assert order() == first
    names = [name for name, _ in first if "q_proj" in name]
    assert names == sorted(names)


@pytest.mark.parametrize(("budget", "most"), [(1, 1), (1 << 30, 8)])
def test_the_budget_bounds_what_is_in_flight(budget, most, devices, monkeypatch):
    """With room for one byte, one plan at a time; with room enough, all leaves are begun before one is finished."""
    source = MemorySource(tiny_tensors())
    sharding, plan = planned({"embed": "data"}, source)
    in_flight, seen = [0], []
    start, finish = HostReader.start, loading._Job._finish

    def counted_start(self, plan):
        in_flight[0] += 1
        seen.append(in_flight[0])
        start(self, plan)

    def counted_finish(self, batch):
        in_flight[0] -= len(batch.plans)
        return finish(self, batch)

    monkeypatch.setattr(HostReader, "start", counted_start)
    monkeypatch.setattr(loading._Job, "_finish", counted_finish)
    load(plan, sharding, source, MESH.build(devices), memory_bytes=budget)
    assert in_flight == [0]
    assert max(seen) == 1 if most == 1 else max(seen) >= most


def test_default_budget():
    gib = 1 << 30
    assert [default_memory_bytes(n) for n in (gib, 10 * gib, 200 * gib)] == [256 << 20, gib, 4 * gib]


def test_progress_counts_the_whole_job_and_ends_with_a_report(devices):
    source = MemorySource(tiny_tensors())
    sharding, plan = planned({"embed": "data"}, source)
    seen = []
    found = load(plan, sharding, source, MESH.build(devices), progress=seen.append)
    last = seen[-1]
    assert last.bytes_done == last.bytes_total == last.job_bytes == source.nbytes
    assert (last.fraction, last.eta_seconds) == (1.0, 0.0)
    assert all(a.bytes_done <= b.bytes_done for a, b in itertools.pairwise(seen))
    # Leaves are read by several threads: which of them arrives last is not said beforehand, only that it has a name.
    assert "(100%)" in str(last) and last.path in str(last)
    assert {one.path for one in seen} <= {each.leaf.path for each in sharding.leaves}
    report = found.report
    assert isinstance(found, LoadedArrays) and report.slowest_host == 0
    assert report.bytes_per_device == sharding.bytes_per_device
    assert report.peak_rss_bytes is not None and report.seconds > 0
    assert "on each device" in str(report)


def test_a_failing_read_ends_the_load_with_its_own_error(devices):
    class Broken(MemorySource):
        def read(self, name, index, out=None):
            if name == "model.layers.1.mlp.down_proj.weight":
                raise OSError("the disk is gone")
            return super().read(name, index, out)

    source = Broken(tiny_tensors())
    sharding, plan = planned({"embed": "data"}, source)
    with pytest.raises(OSError, match="the disk is gone"):
        load(plan, sharding, source, MESH.build(devices))


def test_a_mismatch_is_found_before_a_byte_is_read():
    tensors = tiny_tensors()
    del tensors["model.norm.weight"]
    source = MemorySource(tensors)
    with pytest.raises(WeightMismatchError, match=r"model\.norm\.weight"):
        planned({}, source)
    assert source.bytes_read == 0


def test_a_plan_for_other_hosts_or_another_mesh_is_refused(devices):
    source = MemorySource(tiny_tensors())
    sharding = plan_sharding(tiny_leaves(), Mappings(), MESH)
    hosts = np.arange(8).reshape(4, 2) // 4
    plan = plan_loading(sharding, tiny_rules(), source, hosts=hosts)
    with pytest.raises(ValueError, match="hosts=device_hosts"):
        load(plan, sharding, source, MESH.build(devices))
    _, plan = planned({}, source)
    with pytest.raises(ValueError, match="not for"):
        load(plan, sharding, source, MeshSpec.of(data=8).build(devices))


def test_infinities_and_nans_pass_through_a_cast(devices):
    values = np.array([np.nan, np.inf, -np.inf, 1e30] * 4, np.float32)
    source = MemorySource({"w": values})
    rules = WeightRules(rules=(WeightRule(target="w", source="w", axes=(("embed",),)),))
    sharding, plan = planned({}, source, leaves=[leaf("w", "embed")], rules=rules, dtype=np.dtype(np.float16))
    found = np.asarray(load(plan, sharding, source, MESH.build(devices))["w"])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, values.astype(np.float16))
