"""Requests that are adjacent in a remote file are merged; nothing else is read, and values are NumPy's."""

import numpy as np
import pytest
from helpers.memory_source import FarSource, MemorySource
from helpers.tiny_llama import assembled, tiny_leaves, tiny_rules, tiny_tensors

from haliax_ext.abstract import Leaf
from haliax_ext.host_reader import HostReader, Readers
from haliax_ext.loading import load, plan_loading
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.read_plan import filled_bytes, merged_requests, slice_box, slice_bytes
from haliax_ext.read_scheduler import read_batches
from haliax_ext.rules import FusedPart, WeightRule, WeightRules

MESH = MeshSpec.of(data=4, model=2)
LAYERS, HEADS, SIZE, EMBED = 3, 4, 5, 8
WIDTH = HEADS * SIZE


def fused(kind: str, *, apart: bool = True) -> tuple[list[Leaf], WeightRules, dict[str, np.ndarray]]:
    """q, k and v in one tensor: `heads` (of head after head, as GPT-NeoX), `rows`, or `columns` (as GPT-2).

    Where they lie `apart`, something that no leaf wants is between the tensors of layers.
    """
    axes = (("layers", LAYERS), ("head", HEADS), ("size", SIZE), ("embed", EMBED))
    out, into = ("head", "size"), ("embed",)
    rules = []
    for n, name in enumerate("qkv"):
        if kind == "heads":
            part = FusedPart(axis=0, start=n * SIZE, size=SIZE, of=3 * SIZE, repeats_over=("head",))
        else:
            part = FusedPart(axis=0 if kind == "rows" else 1, start=n * WIDTH, size=WIDTH, of=3 * WIDTH)
        of = (into, out) if kind == "columns" else (out, into)
        rules.append(WeightRule(target=name, source="{layers}.qkv", axes=of, part=part))
    shape = (EMBED, 3 * WIDTH) if kind == "columns" else (3 * WIDTH, EMBED)
    rng = np.random.default_rng(1)
    tensors = {}
    for n in range(LAYERS):
        tensors[f"{n}.qkv"] = rng.normal(size=shape).astype(np.float32)
        if apart:
            tensors[f"{n}.between"] = np.zeros(2, np.float32)
    leaves = [Leaf(name, axes, np.dtype(np.float32)) for name in "qkv"]
    return leaves, WeightRules(rules=tuple(rules), ignored=("*.between",)), tensors


def taken_apart(kind: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The three leaves, by NumPy."""
    whole = np.stack([tensors[f"{n}.qkv"] for n in range(LAYERS)])
    if kind == "columns":
        whole = whole.transpose(0, 2, 1)
    if kind == "heads":
        parts = whole.reshape(LAYERS, HEADS, 3, SIZE, EMBED)
        return {name: parts[:, :, n] for n, name in enumerate("qkv")}
    parts = whole.reshape(LAYERS, 3, HEADS, SIZE, EMBED)
    return {name: parts[:, n] for n, name in enumerate("qkv")}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("kind", "mapping", "requests"),
    [
        # One tensor a layer, however it is cut within a head; two halves of its heads where these are on two devices.
        ("heads", {}, LAYERS),
        ("heads", {"head": "model"}, 2 * LAYERS),
        ("heads", {"embed": "model"}, LAYERS),
        ("rows", {}, LAYERS),
        ("rows", {"embed": "data"}, LAYERS),
        # A half of the heads is three ranges: of q, of k and of v.
        ("rows", {"head": "model"}, 3 * 2 * LAYERS),
        ("columns", {}, LAYERS),
        ("columns", {"embed": "model"}, 2 * LAYERS),
    ],
)
def test_a_fused_tensor_is_read_once_for_its_leaves(kind, mapping, requests, dtype, devices):
    leaves, rules, tensors = fused(kind)
    source = FarSource(tensors)
    sharding = plan_sharding(leaves, Mappings(params=AxisMapping(mapping)), MESH).check()
    plan = plan_loading(sharding, rules, source, dtype=np.dtype(dtype))
    found = load(plan, sharding, source, MESH.build(devices))
    for name, values in taken_apart(kind, tensors).items():
        np.testing.assert_array_equal(np.asarray(found[name]), values.astype(dtype))
    assert len(source.requests) == requests
    total = LAYERS * 3 * WIDTH * EMBED * 4
    assert sum(b - a for a, b in source.requests) == source.bytes_read == total == found.report.bytes_read


@pytest.mark.parametrize("kind", ["heads", "rows", "columns"])
def test_tensors_of_several_layers_that_lie_side_by_side_are_one_request(kind, devices):
    leaves, rules, tensors = fused(kind, apart=False)
    source = FarSource(tensors)
    sharding = plan_sharding(leaves, Mappings(), MESH).check()
    found = load(plan_loading(sharding, rules, source), sharding, source, MESH.build(devices))
    for name, values in taken_apart(kind, tensors).items():
        np.testing.assert_array_equal(np.asarray(found[name]), values)
    assert source.requests == [(0, source.nbytes)]


def test_small_tensors_that_lie_side_by_side_are_one_request(devices):
    names = [f"norm.{n}" for n in range(6)]
    leaves = [Leaf(name, (("embed", EMBED),), np.dtype(np.float32)) for name in names]
    rules = WeightRules(
        rules=tuple(WeightRule(target=n, source=n, axes=(("embed",),)) for n in names), ignored=("between",)
    )
    values = {n: np.full(EMBED, int(n[-1]), np.float32) for n in names}
    source = FarSource({**dict(list(values.items())[:4]), "between": np.zeros(2, np.float32), **values})
    sharding = plan_sharding(leaves, Mappings(), MESH).check()
    found = load(plan_loading(sharding, rules, source), sharding, source, MESH.build(devices))
    size = 4 * EMBED
    assert sorted(source.requests) == [(0, 4 * size), (4 * size + 8, 6 * size + 8)], "nobody wants what is between"
    for name in names:
        np.testing.assert_array_equal(np.asarray(found[name]), values[name])


@pytest.mark.parametrize("read_bytes", [64, 1000, 1 << 20])
@pytest.mark.parametrize("mapping", [{}, {"embed": "data", "mlp": "model", "kv_head": "model"}, {"head_size": "data"}])
def test_every_byte_once_whatever_lies_side_by_side(mapping, read_bytes, devices):
    tensors = tiny_tensors()
    source = FarSource(tensors)
    sharding = plan_sharding(tiny_leaves(), Mappings(params=AxisMapping(mapping)), MESH).check()
    plan = plan_loading(sharding, tiny_rules(), source)
    found = load(plan, sharding, source, MESH.build(devices), read_bytes=read_bytes)
    times = np.zeros(source.nbytes, int)
    for start, stop in source.requests:
        times[start:stop] += 1
    assert (times == 1).all()
    for path, values in assembled(tensors).items():
        np.testing.assert_array_equal(np.asarray(found[path]), values)


def test_merged_requests_are_no_larger_than_a_read_and_follow_the_file():
    leaves, rules, tensors = fused("heads")
    source = MemorySource(tensors)
    sharding = plan_sharding(leaves, Mappings(), MESH).check()
    (batch,) = read_batches(plan_loading(sharding, rules, source), np.arange(8), together=True)
    row = 4 * EMBED
    for read_bytes in (SIZE * row * 3, 1 << 20):
        merged = list(merged_requests(batch.plans, source, read_bytes=read_bytes, together=True))
        starts = [source.byte_ranges(first[0].tensor, spans(slice_box(first)))[0].start for first, *_ in merged]
        assert starts == sorted(starts)
        sizes = [sum(map(slice_bytes, slices)) for slices in merged]
        assert max(sizes) <= read_bytes
        total = LAYERS * 3 * WIDTH * EMBED * 4
        assert sum(sizes) == sum(map(filled_bytes, merged)) == total
        assert len(merged) == max(LAYERS, total // read_bytes)


def test_reads_get_smaller_towards_the_end():
    """So that the last of them, side by side, end together."""
    leaf = Leaf("w", (("rows", 8 << 10), ("columns", 1024)), np.dtype(np.float32))
    rules = WeightRules(rules=(WeightRule(target="w", source="w", axes=(("rows",), ("columns",))),))
    source = FarSource({"w": np.broadcast_to(np.float32(0), (8 << 10, 1024))})
    sharding = plan_sharding([leaf], Mappings(), MESH).check()
    (batch,) = read_batches(plan_loading(sharding, rules, source), np.arange(8), together=True)
    mib = 1 << 20
    with HostReader(source, Readers.of(source.remote, 4096 * mib, threads=None, read_bytes=None)) as reader:
        sizes = {
            remaining: max(map(filled_bytes, reader.requests(batch.plans, remaining)))
            for remaining in (4096 * mib, 256 * mib, 32 * mib)
        }
    assert sizes == {4096 * mib: 4 * mib, 256 * mib: 2 * mib, 32 * mib: mib}


def spans(box):
    return tuple(slice(start, stop) for start, stop in box)
