"""What loading takes: small plans walked device by device and host by host, and a 405B plan without weights."""

import dataclasses
import math
from collections import deque
from functools import cache

import numpy as np
import pytest
from helpers.llama_shapes import SHAPES, shape_leaves
from helpers.memory_source import MemorySource
from helpers.tiny_llama import tiny_leaves, tiny_rules, tiny_tensors

from haliax_ext.leaf_layout import distinct_boxes
from haliax_ext.load_plan import LoadPlan
from haliax_ext.loading import default_memory_bytes, plan_loading
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import shard_boxes
from haliax_ext.planner import plan_sharding
from haliax_ext.read_plan import Block, plan_reads
from haliax_ext.read_scheduler import byte_ranges
from haliax_ext.sources import RemoteReads, TensorInfo
from levanter.models.llama import weights
from levanter.models.llama.config import LlamaConfig
from levanter.plan.load_budget import READERS, beyond_shards, load_budget, shard_bytes

MESH = MeshSpec.of(data=4, model=2)
MIB, GIB = 1 << 20, 1 << 30
MAPPINGS = {
    "whole": {},
    "rows and columns": {"embed": "data", "mlp": "model", "kv_head": "model", "vocab": "model"},
    "columns": {"embed": "model", "head_size": "data"},
    "both on one": {"mlp": ["data", "model"], "q_heads_per_group": "model", "vocab": "data"},
}
HOSTS = {
    "one": np.zeros((4, 2), int),
    "rows": np.arange(8).reshape(4, 2) // 4,
    "columns": np.tile(np.arange(2), (4, 1)),
    "each": np.arange(8).reshape(4, 2),
}
LIMIT = 1200
"""Bytes on a device for one reshard, so that tiny leaves come in pieces."""


def tiny_plan(mapping, hosts, **options) -> LoadPlan:
    sharding = plan_sharding(tiny_leaves(), Mappings(params=AxisMapping(mapping)), MESH).check()
    source = MemorySource(tiny_tensors())
    return plan_loading(sharding, tiny_rules(), source, hosts=hosts, transient_limit=LIMIT, **options)


def volume(box) -> int:
    return math.prod(stop - start for start, stop in box)


def final_bytes(load, device: int) -> int:
    return volume(shard_boxes(load.leaf.shape, load.spec, MESH)[device]) * load.leaf.dtype.itemsize


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_devices_one_by_one(mapping, hosts):
    """Slab and result of every reshard are held at a time; what moves between can only be more."""
    plan = tiny_plan(MAPPINGS[mapping], HOSTS[hosts])
    budget = load_budget(plan)
    most_beyond = peak = 0
    for device in range(8):
        there = 0
        for step in plan.steps:
            slabs = results = shards = 0
            for load in step.loads:
                item = load.leaf.dtype.itemsize
                shards += final_bytes(load, device)
                if load.reshard is not None:
                    slabs += volume(load.device_boxes(MESH, step.piece or (0, 0))[device]) * item
                    share = (
                        1.0
                        if step.piece is None
                        else (step.piece[1] - step.piece[0]) / load.leaf.shape[load.reshard.cut]
                    )
                    results += round(final_bytes(load, device) * share)
            # The result of a piece is beside the leaf; that of a whole reshard is the leaf.
            beyond = slabs + (results if step.piece is not None else 0)
            assert beyond_shards(plan, step) >= beyond if step.loads[0].reshard else beyond_shards(plan, step) == 0
            most_beyond = max(most_beyond, beyond)
            if step.piece is None or step.piece[0] == 0:
                there += shards
            peak = max(peak, there + beyond)
        assert there == plan.bytes_per_device
    assert budget.device_transient[1] >= most_beyond
    assert budget.device_peak >= peak
    # A move takes and gives a slab's worth or the result's, never more than both sums.
    assert budget.device_peak <= plan.bytes_per_device + budget.device_transient[1]
    if most_beyond == 0:
        assert budget.device_transient == ("", 0)
        assert budget.device_peak == plan.bytes_per_device
    else:
        path, _, others = budget.device_transient[0].partition(" and ")
        assert path in plan.by_path and plan.by_path[path].strategy == "exchange"
        assert others == "" or others.endswith(" more")


def test_gathering_takes_slab_and_what_is_received_and_result():
    """Everything whole: where one gather does it, there is a slab of an eighth, and twice the result."""
    plan = tiny_plan(MAPPINGS["whole"], HOSTS["each"])
    gathered = 0
    for step in plan.steps:
        reshard = step.loads[0].reshard
        # The last piece may be shorter; room is for the longest.
        if step.piece is not None and step.piece[0] == 0 and [move.kind for move in reshard.moves] == ["all_gather"]:
            share = (step.piece[1] - step.piece[0]) / step.loads[0].leaf.shape[reshard.cut]
            assert beyond_shards(plan, step) == step.loads[0].leaf.nbytes * share * (2 + 1 / 8)
            gathered += 1
    assert gathered > 3
    assert load_budget(plan).device_peak > plan.bytes_per_device


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_hosts_one_by_one(mapping, hosts):
    source = MemorySource(tiny_tensors())
    plan = tiny_plan(MAPPINGS[mapping], HOSTS[hosts])
    budget = load_budget(plan, gigabytes_per_second=2.0)
    listed = [sum(r.nbytes for r in byte_ranges(plan, source, host)) for host in range(plan.num_hosts)]
    assert list(budget.bytes_by_host) == listed
    assert budget.source_bytes == source.nbytes
    assert budget.amplification == pytest.approx(sum(listed) / source.nbytes)
    assert budget.seconds == pytest.approx(max(listed) / 2e9)


@pytest.mark.parametrize("memory", [0, 3000, 1 << 40])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_host_memory_is_what_the_queue_of_blocks_comes_to(mapping, memory):
    """Admits blocks as `load` does: as many as the budget allows, and one at least."""
    plan = tiny_plan(MAPPINGS[mapping], HOSTS["rows"], memory_bytes=memory or None)
    most = 0
    for host in range(plan.num_hosts):
        waiting, held = deque(), 0
        for size in batch_bytes(plan, host):
            while waiting and held + size > memory:
                held -= waiting.popleft()
            waiting.append(size)
            held += size
            most = max(most, held)
    buffers = READERS * 2 * MIB
    found = load_budget(plan, memory_bytes=memory).host_peak - buffers
    if memory == 0:
        assert found == most
    else:
        # Blocks that several devices of a host share are read once, and counted for each here.
        assert most <= found <= min(1.5 * most, max(most, memory))


def test_buffers_of_those_who_read_from_another_machine_are_a_part_of_the_budget():
    """Many readers: 32 buffers of 1 MiB, 64 KiB for each of 128 threads, 16 MiB for second requests."""
    plan = dataclasses.replace(
        tiny_plan(MAPPINGS["whole"], HOSTS["rows"]),
        remote=RemoteReads(reads_at_once=128, read_bytes=4 * MIB, hedge_bytes=16 * MIB),
    )
    everything = load_budget(plan, memory_bytes=1 << 40).host_peak
    assert load_budget(plan, memory_bytes=256 * MIB).host_peak - (32 + 8 + 16) * MIB < MIB < everything


def batch_bytes(plan, host):
    """Bytes of each batch: of one read plan of a leaf that is read directly, of all slabs of a reshard."""
    for step in plan.steps:
        sizes = []
        for load in step.loads:
            boxes, _ = distinct_boxes(load.device_boxes(MESH, step.piece or (0, 0))[plan.host_devices(host)])
            sizes += [reads.nbytes for reads in plan_reads(load, [Block(box=box) for box in boxes])]
        yield from [sum(sizes)] if step.loads[0].reshard is not None else sizes


class NoWeights:
    """The index of a checkpoint, and nothing that could be read."""

    def __init__(self, tensors):
        self.tensors = tensors

    def read(self, name, index, out=None):
        raise AssertionError(f"planning read {name}")

    byte_ranges = read


@cache
def index_405b() -> NoWeights:
    embed, mlp, vocab, heads, kv = 16384, 53248, 128256, 128 * 128, 8 * 128
    shapes = {
        "model.embed_tokens.weight": (vocab, embed),
        "model.norm.weight": (embed,),
        "lm_head.weight": (vocab, embed),
    }
    for n in range(126):
        layer = f"model.layers.{n}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (embed,),
            f"{layer}.post_attention_layernorm.weight": (embed,),
            f"{layer}.mlp.down_proj.weight": (embed, mlp),
            f"{layer}.mlp.gate_proj.weight": (mlp, embed),
            f"{layer}.mlp.up_proj.weight": (mlp, embed),
            f"{layer}.self_attn.k_proj.weight": (kv, embed),
            f"{layer}.self_attn.v_proj.weight": (kv, embed),
            f"{layer}.self_attn.q_proj.weight": (heads, embed),
            f"{layer}.self_attn.o_proj.weight": (embed, heads),
        }
    dtype = np.dtype("bfloat16")
    return NoWeights({n: TensorInfo(n, shape, dtype, 2 * math.prod(shape)) for n, shape in shapes.items()})


PODS = {
    "FSDP × TP": (
        MeshSpec.of(data=16, model=8),
        {"embed": "data", "mlp": "model", "kv_head": "model", "vocab": "model"},
    ),
    "TP": (
        MeshSpec.of(model=8, group=16),
        {"mlp": ["model", "group"], "vocab": ["model", "group"], "kv_head": "model", "q_heads_per_group": "group"},
    ),
    "FSDP": (MeshSpec.of(data=128), {"embed": "data"}),
}


def plan_405b(mesh: MeshSpec, mapping, dtype: str) -> LoadPlan:
    shape = {key: value for key, value in SHAPES["llama3.1_405b"].items() if key != "vocab"}
    sharding = plan_sharding(shape_leaves("llama3.1_405b", dtype), Mappings(params=AxisMapping(mapping)), mesh).check()
    rules = weights.rules(LlamaConfig(vocab_size=128256, **shape))
    return plan_loading(sharding, rules, index_405b(), hosts=np.arange(128) // 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("pod", PODS)
def test_no_leaf_of_405b_needs_more_than_its_shard_and_a_buffer(pod, dtype):
    plan = plan_405b(*PODS[pod], dtype)
    sharding = plan.sharding
    for step in plan.steps:
        for load in step.loads:
            # Slab, result, and what is sent and received, in 512 MiB together.
            assert load.transient_device_bytes <= 512 * MIB
            assert shard_bytes(plan, load) == sharding.by_path[load.path].bytes_per_device
        assert beyond_shards(plan, step) <= 512 * MIB
    budget = load_budget(plan)
    assert budget.device_transient[1] <= 512 * MIB
    assert budget.device_peak <= sharding.bytes_per_device + 512 * MIB
    # 811.7 GB in storage, read once and evenly by 32 hosts: 25.4 s at 1 GB/s.
    assert budget.source_bytes == 811_706_777_600
    assert budget.amplification < 1.02
    assert len(budget.bytes_by_host) == 32
    assert budget.seconds == pytest.approx(811.7 / 32, rel=0.02)
    # A host has four chips' blocks at a time at most within its budget, far from the checkpoint.
    assert budget.host_peak <= max(default_memory_bytes(plan.local_bytes(0)), 4 * 512 * MIB) + GIB // 16


def test_a_layer_that_is_whole_on_every_chip_is_a_buffer_of_its_own_size():
    """As published, but in f32: 1 GiB of q_proj for each layer, received and put in order. That it is more is said."""
    plan = plan_405b(MeshSpec.of(model=8, group=16), {"mlp": ["model", "group"]}, "float32")
    path, nbytes = load_budget(plan).device_transient
    assert path.endswith(("q_proj.weight", "o_proj.weight"))
    assert nbytes == pytest.approx(2 * 16384**2 * 4, rel=0.02)
    assert load_budget(plan_405b(MeshSpec.of(data=128), {"embed": "data"}, "float32")).device_transient[1] < 512 * MIB
