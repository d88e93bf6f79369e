"""Load plans for many hosts: boxes as JAX has them, strategies, each host's reads carried out and compared."""

import numpy as np
import pytest
from helpers.memory_source import FarSource, MemorySource
from helpers.tiny_llama import assembled, tiny_leaves, tiny_rules, tiny_tensors
from jax.sharding import PartitionSpec as P

from haliax_ext.abstract import Leaf
from haliax_ext.leaf_layout import box_shape, distinct_boxes, to_slices
from haliax_ext.loading import plan_loading
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import shard_boxes
from haliax_ext.planner import plan_sharding
from haliax_ext.read_plan import Block, plan_reads
from haliax_ext.read_scheduler import byte_ranges, read_batches
from haliax_ext.rules import FusedPart, WeightRule, WeightRules
from haliax_ext.sources import TensorInfo

MESH = MeshSpec.of(data=4, model=2)
HOSTS = {
    "rows of the mesh": np.arange(8).reshape(4, 2) // 4,
    "columns of the mesh": np.tile(np.arange(2), (4, 1)),
    "one device each": np.arange(8).reshape(4, 2),
    "scattered": np.array([[0, 1], [1, 0], [1, 0], [0, 1]]),
}
MAPPINGS = [
    {},
    {"embed": "data", "mlp": "model", "kv_head": "model", "vocab": "model"},
    {"embed": "model", "head_size": "data"},
    {"mlp": ["data", "model"], "q_heads_per_group": "model", "vocab": "data"},
]


def planned(mapping, hosts, source, *, leaves=None, rules=None, mesh=MESH, **options):
    sharding = plan_sharding(leaves or tiny_leaves(), Mappings(params=AxisMapping(mapping)), mesh).check()
    return plan_loading(sharding, rules or tiny_rules(), source, hosts=hosts, **options)


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "model"), P(("model", "data")), P("model", ("data",))])
def test_boxes_are_those_of_jax(spec, devices):
    from jax.sharding import NamedSharding

    mesh = MESH.build(devices)
    boxes = shard_boxes((16, 8), spec, MESH)
    indices = NamedSharding(mesh, spec).devices_indices_map((16, 8))
    for box, device in zip(boxes.tolist(), mesh.devices.flat, strict=True):
        wanted = [piece.indices(n)[:2] for piece, n in zip(indices[device], (16, 8), strict=True)]
        assert [tuple(pair) for pair in box] == wanted


@pytest.mark.parametrize("arrangement", HOSTS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_all_hosts_together_read_each_byte_once(arrangement, mapping):
    """Carries out every host's reads, and compares each device's block (or slab) with NumPy's."""
    tensors = tiny_tensors()
    source = MemorySource(tensors)
    wanted = assembled(tensors)
    plan = planned(mapping, HOSTS[arrangement], source)
    for host in range(plan.num_hosts):
        before = source.bytes_read
        for load in plan.loads:
            for piece in load.pieces:
                boxes, _ = distinct_boxes(load.device_boxes(MESH, piece)[plan.host_devices(host)])
                blocks = [Block(box=box, memory=np.zeros(box_shape(box), np.float32)) for box in boxes]
                for read_plan in plan_reads(load, blocks):
                    for request in read_plan.requests(200):
                        buffer = source.read(request.tensor, to_slices(request.box))
                        for block, copy in request.copies:
                            copy.scatter(buffer, block.memory)
                for block in blocks:
                    expected = wanted[load.path][to_slices(block.box)]
                    inside = tuple(slice(0, size) for size in expected.shape)
                    np.testing.assert_array_equal(block.memory[inside], expected)
        assert source.bytes_read - before == plan.bytes_by_host[host]
    assert source.bytes_read <= 1.02 * source.nbytes
    assert plan.amplification <= 1.02


@pytest.mark.parametrize("arrangement", HOSTS)
def test_byte_ranges_of_all_hosts_cover_the_checkpoint_once(arrangement):
    source = MemorySource(tiny_tensors())
    plan = planned(MAPPINGS[1], HOSTS[arrangement], source)
    times = np.zeros(source.nbytes, np.int32)
    for host in range(plan.num_hosts):
        for piece in byte_ranges(plan, source, host):
            times[piece.start : piece.stop] += 1
    assert times.min() == 1
    assert times.sum() <= 1.02 * source.nbytes


def test_strategies_follow_what_direct_reading_would_cost():
    source = MemorySource(tiny_tensors())
    plan = planned({"mlp": "data", "embed": "model"}, HOSTS["columns of the mesh"], source)
    # Hosts hold halves of `embed`: the inner axis of gate_proj, the outer of down_proj, the only one of the norms.
    found = {load.path.rsplit(".", 2)[-2]: load for load in plan.loads}
    assert {name: load.strategy for name, load in found.items()} == {
        "token_embeddings": "exchange",
        "q_proj": "exchange",
        "k_proj": "exchange",
        "o_proj": "direct",
        "gate_proj": "exchange",
        "down_proj": "direct",
        "input_layernorm": "direct",
        "norm": "direct",
    }
    assert found["gate_proj"].direct_amplification == 2.0
    assert found["gate_proj"].reason.startswith("reading it directly would read it 2.00×")
    assert all(load.amplification == 1.0 for load in plan.loads)
    assert plan.bytes_by_host == (source.nbytes // 2, source.nbytes // 2)
    plan = planned({"mlp": "data", "embed": "model"}, None, source)
    assert {load.strategy for load in plan.loads} == {"direct"}


def test_the_job_stays_below_its_own_limit():
    """A leaf below 1.25× is still exchanged where the whole checkpoint would be read more than 1.02 times."""
    rules = WeightRules(rules=tuple(WeightRule(target=n, source=n, axes=(("mlp",), ("embed",))) for n in "vw"))
    source = MemorySource({"v": np.zeros((64, 16), np.float32), "w": np.zeros((64, 160), np.float32)})
    leaves = [Leaf(n, (("mlp", 64), ("embed", size)), np.dtype(np.float32)) for n, size in (("v", 16), ("w", 160))]
    # The second host has one of the sixteen devices: the other one with the same shard is at the first host.
    hosts = np.zeros((8, 2), int)
    hosts[7, 1] = 1
    plan = planned({"mlp": "data"}, hosts, source, leaves=leaves, rules=rules, mesh=MeshSpec.of(data=8, model=2))
    assert {load.path: load.direct_amplification for load in plan.loads} == {"v": 1.125, "w": 1.125}
    assert {load.path: load.strategy for load in plan.loads} == {"v": "direct", "w": "exchange"}
    assert 1 < plan.amplification <= 1.02


def test_pieces_respect_the_limit_and_the_budget():
    source = MemorySource(tiny_tensors())
    whole = planned({}, HOSTS["one device each"], source)
    small = planned({}, HOSTS["one device each"], source, transient_limit=6400)
    budget = planned({}, HOSTS["one device each"], source, memory_bytes=12800)
    q = "transformer.layers.stacked.self_attn.q_proj.weight"
    assert len(whole.by_path[q].pieces) == 1
    assert small.by_path[q].pieces == ((0, 1), (1, 2), (2, 3)) and small.by_path[q].transient_device_bytes <= 6400
    assert small.amplification == budget.amplification == 1.0
    assert budget.by_path[q].transient_device_bytes <= 6400


def test_pieces_of_a_source_on_another_machine_follow_the_budget_that_load_chooses():
    """A piece is read while another one is exchanged: both are within the 256 MiB of a host with one array of 1 GiB."""
    stacked = {f"{n}.w": np.broadcast_to(np.float32(0), (2048, 2048)) for n in range(64)}
    leaf = Leaf("w", (("layers", 64), ("mlp", 2048), ("embed", 2048)), np.dtype(np.float32))
    rules = WeightRules(rules=(WeightRule(target="w", source="{layers}.w", axes=(("mlp",), ("embed",))),))
    mib = 1 << 20
    near, far = (
        planned({}, HOSTS["one device each"], kind(stacked), leaves=[leaf], rules=rules).loads[0]
        for kind in (MemorySource, FarSource)
    )
    assert 128 * mib < near.transient_device_bytes <= 448 * mib
    assert 32 * mib < far.transient_device_bytes <= 128 * mib and len(far.pieces) > len(near.pieces)


def test_leaves_of_the_same_tensors_arrive_piece_by_piece_together():
    """The columns of one tensor: read alone, each leaf would read the others' bytes too."""
    names = "qkv"
    leaves = [Leaf(n, (("layers", 4), ("head", 8), ("embed", 16)), np.dtype(np.float32)) for n in names]
    rules = WeightRules(
        rules=tuple(
            WeightRule(
                target=n,
                source="{layers}.qkv",
                axes=(("embed",), ("head",)),
                part=FusedPart(axis=1, start=8 * i, size=8, of=24),
            )
            for i, n in enumerate(names)
        )
    )
    source = FarSource({f"{n}.qkv": np.zeros((16, 24), np.float32) for n in range(4)})
    hosts = HOSTS["one device each"]
    plan = planned({}, hosts, source, leaves=leaves, rules=rules, transient_limit=1500)
    arriving = [(step.loads[0].path, step.piece) for step in plan.steps]
    pieces = plan.loads[0].pieces
    assert len(pieces) > 1 and arriving == [(name, piece) for piece in pieces for name in names]
    for host in range(8):
        batches = list(read_batches(plan, plan.host_devices(host), together=True))
        assert [len(batch.steps) for batch in batches] == [3] * len(pieces)
        assert sum(r.nbytes for r in byte_ranges(plan, source, host)) == plan.bytes_by_host[host] == source.nbytes / 8


def test_programs_are_the_steps_of_the_plan():
    source = MemorySource(tiny_tensors())
    plan = planned({}, HOSTS["one device each"], source, transient_limit=6400)
    names = [program.name for program in plan.programs]
    assert "load.exchange.transformer.layers.stacked.self_attn.q_proj.weight.1" in names
    assert names[-1] == "load.seconds"
    assert len(set(names)) == len(names)
    abstract = MESH.abstract()
    for program in plan.programs:
        assert program.lower(abstract).as_text()


def test_exchanges_that_differ_in_their_paths_alone_are_one_program():
    axes = (("embed", 64), ("mlp", 32))
    leaves = [Leaf(path, axes, np.dtype(np.float32)) for path in ("a", "b", "c")]
    leaves.append(Leaf("turned", axes[::-1], np.dtype(np.float32)))
    rules = WeightRules(
        rules=tuple(
            WeightRule(target=leaf.path, source=leaf.path, axes=tuple((n,) for n in leaf.names)) for leaf in leaves
        )
    )
    source = MemorySource({leaf.path: np.zeros(leaf.shape, np.float32) for leaf in leaves})
    plan = planned({}, HOSTS["one device each"], source, leaves=leaves, rules=rules, transient_limit=9000)
    exchanges = [name for name in (program.name for program in plan.programs) if name.startswith("load.exchange")]
    assert [name.split(".")[2] for name in exchanges] == ["a", "turned"]
    by_leaf = {path: {plan.step_programs(s) for s in plan.steps if s.loads[0].path == path} for path in "abc"}
    assert by_leaf["a"] == by_leaf["b"] == by_leaf["c"] and len(by_leaf["a"]) == 1


def test_the_plan_prints_itself():
    source = MemorySource(tiny_tensors())
    text = str(planned({"mlp": "data", "embed": "model"}, HOSTS["columns of the mesh"], source))
    assert text.splitlines()[0].split() == ["leaf", "from", "strategy", "bytes", "read", "transient", "why"]
    assert "3 × float32" in text
    assert "read 1.000× by 2 hosts" in text


class Described:
    """Tensors that are only described: 405 billion parameters in bf16, or blocks of a quantized format."""

    def __init__(self, tensors):
        self.tensors = tensors


def test_quantized_storage_is_counted_in_stored_bytes():
    info = TensorInfo(name="w", shape=(64, 64), dtype=np.dtype(np.float32), nbytes=64 * 64 * 34 // 32)
    rules = WeightRules(rules=(WeightRule(target="w", source="w", axes=(("mlp",), ("embed",))),))
    leaves = [Leaf("w", (("mlp", 64), ("embed", 64)), np.dtype(np.float32))]
    plan = planned({"mlp": "data"}, HOSTS["rows of the mesh"], Described({"w": info}), leaves=leaves, rules=rules)
    assert plan.source_bytes == info.nbytes
    assert plan.bytes_by_host == (info.nbytes // 2, info.nbytes // 2)


@pytest.mark.parametrize("hosts", [np.zeros(4, int), np.array([0, 0, 0, 0, 2, 2, 2, 2])])
def test_hosts_must_number_every_device(hosts):
    with pytest.raises(ValueError, match="numbered from 0 without"):
        planned({}, hosts, MemorySource(tiny_tensors()))
