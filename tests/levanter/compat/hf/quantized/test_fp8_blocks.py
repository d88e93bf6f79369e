"""FP8 weights in blocks: slices across borders of blocks, whole loads on meshes, refusals, a folder from end to end."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.fp8_blocks import dequantized, fp8_tensors, quantized
from helpers.hf_folder import CONFIG, tensors, write_folder
from helpers.object_store import ObjectStore
from helpers.tiny_llama import assembled, tiny_leaves, tiny_rules, tiny_tensors
from safetensors.numpy import save_file

from haliax_ext.abstract import Leaf
from haliax_ext.loading import load, plan_loading
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.read_scheduler import byte_ranges
from haliax_ext.rules import WeightRule, WeightRules
from levanter.compat.hf.errors import CheckpointError
from levanter.compat.hf.index import open_weights
from levanter.compat.hf.quantized import DequantizingSource, Fp8BlockFormat, read_quantization, without_quantization
from levanter.compat.hf.quantized import source as dequantizing
from levanter.compat.hf.repository import RemoteFolder
from levanter.compat.hf.safetensors import SafetensorsSource
from levanter.compat.open import open_checkpoint

CONFIGURATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
MESHES = {
    "one": (MeshSpec.of(data=1), {}),
    "rows": (MeshSpec.of(data=8), {"mlp": "data"}),
    "columns": (MeshSpec.of(data=8), {"embed": "data"}),
    "both": (MeshSpec.of(data=4, model=2), {"mlp": "data", "embed": "model"}),
    "both, wide": (MeshSpec.of(data=2, model=4), {"mlp": "data", "embed": "model"}),
    "one axis over both": (MeshSpec.of(data=2, model=4), {"embed": ("data", "model")}),
    "replicated": (MeshSpec.of(data=4, model=2), {}),
}


def whole(shape):
    return tuple(slice(0, n) for n in shape)


def matrix(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def opened(folder, stored, block=(128, 128)) -> DequantizingSource:
    save_file(stored, folder / "model.safetensors")
    return Fp8BlockFormat(block=block).open(SafetensorsSource.from_files(folder / "model.safetensors"))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (256, 384), (1, 5), (127, 257), (576, 72)])
def test_slices_across_borders_are_those_of_the_whole(shape, dtype, tmp_path, monkeypatch):
    stored, exact = fp8_tensors({"w": matrix(shape)}, (128, 128), dtype=dtype)
    # Decoding in small pieces meets every border too.
    monkeypatch.setattr(dequantizing, "DECODED_ELEMENTS", 1000)
    source = opened(tmp_path, stored)
    info = source.tensors["w"]
    assert (info.shape, info.dtype) == (shape, np.float32) and list(source.tensors) == ["w"]
    assert info.nbytes == stored["w"].nbytes + stored["w_scale_inv"].nbytes
    rng = np.random.default_rng(1)
    indices = [whole(shape), *(tuple(slice(n // 2, n // 2) for n in shape),)]
    for _ in range(40):
        bounds = [sorted(rng.integers(0, n + 1, 2).tolist()) for n in shape]
        indices.append(tuple(slice(*pair) for pair in bounds))
    for index in indices:
        np.testing.assert_array_equal(source.read("w", index), exact["w"][index])
        out = np.full((shape[0] + 1, shape[1] + 3), np.nan, np.float32)
        view = out[: index[0].stop - index[0].start, : index[1].stop - index[1].start]
        assert source.read("w", index, view) is view
        np.testing.assert_array_equal(view, exact["w"][index])


def test_a_slice_reads_the_bytes_of_its_values_and_the_scales_once(tmp_path):
    """Bytes of ranges in the file, against those that were read."""
    stored, exact = fp8_tensors({"w": matrix((700, 5000)), "v": matrix((5, 5))}, (128, 128))
    source = opened(tmp_path, stored)
    index = (slice(100, 300), slice(0, 5000))
    ranges = source.byte_ranges("w", index)
    assert sum(item.nbytes for item in ranges) == 200 * 5000 + stored["w_scale_inv"].nbytes
    assert all(a.stop < b.start for a, b in itertools.pairwise(ranges))
    np.testing.assert_array_equal(source.read("w", index), exact["w"][index])
    assert source.bytes_read == 200 * 5000 + stored["w_scale_inv"].nbytes
    # The scales are in memory now.
    np.testing.assert_array_equal(source.read("w", (slice(250, 251), index[1])), exact["w"][250:251])
    assert source.bytes_read == 201 * 5000 + stored["w_scale_inv"].nbytes
    # Columns a block apart from the next row's: only their own bytes, a range for each row.
    column = source.byte_ranges("w", (slice(0, 700), slice(4000, 4001)))
    assert source.tensors["w"].nbytes > sum(item.nbytes for item in column) >= 700


def test_scales_that_are_too_large_to_cache_are_read_by_slices(tmp_path, monkeypatch):
    monkeypatch.setattr(dequantizing, "CACHED_BYTES", 1000)
    stored, exact = fp8_tensors({"w": matrix((900, 700))}, (4, 8))
    source = opened(tmp_path, stored, (4, 8))
    index = (slice(401, 411), slice(0, 700))
    np.testing.assert_array_equal(source.read("w", index), exact["w"][index])
    # Rows 400 to 411 are three rows of scales.
    assert source.bytes_read == sum(item.nbytes for item in source.byte_ranges("w", index)) == 10 * 700 + 3 * 88 * 4
    np.testing.assert_array_equal(source.read("w", index), exact["w"][index])


def test_the_cache_of_scales_is_bounded(tmp_path):
    stored, exact = fp8_tensors({f"w{n}": matrix((3, 5), n) for n in range(80)}, (2, 2))
    source = opened(tmp_path, stored, (2, 2))
    for name in (*exact, *exact):
        np.testing.assert_array_equal(source.read(name, whole((3, 5))), exact[name])
        assert len(source._cache) <= dequantizing.CACHED_PARTS


def test_stacked_matrices_have_a_grid_of_scales_each(tmp_path):
    """As experts of one layer in one tensor."""
    pairs = [quantized(matrix((130, 140), n), (128, 128)) for n in range(3)]
    stored = {"w": np.stack([v for v, _ in pairs]), "w_scale_inv": np.stack([s for _, s in pairs])}
    source = opened(tmp_path, stored)
    exact = np.stack([dequantized(v, s, (128, 128)) for v, s in pairs])
    for index in [whole((3, 130, 140)), (slice(1, 3), slice(100, 130), slice(127, 129))]:
        np.testing.assert_array_equal(source.read("w", index), exact[index])


@pytest.mark.quick
@pytest.mark.parametrize("mesh", MESHES)
def test_a_load_reads_every_stored_byte_once(mesh, tmp_path, devices):
    """Shards of 40 columns and 96 rows, whose borders are inside blocks of 128 x 128."""
    spec, mapping = MESHES[mesh]
    names = [f"layers.{n}.up_proj.weight" for n in range(2)]
    stored, exact = fp8_tensors({name: matrix((768, 320), n) for n, name in enumerate(names)}, (128, 128))
    source = opened(tmp_path, stored)
    rules = WeightRules(
        rules=(WeightRule(target="up", source="layers.{layers}.up_proj.weight", axes=(("mlp",), ("embed",))),)
    )
    leaf = Leaf("up", (("layers", 2), ("mlp", 768), ("embed", 320)), np.dtype(np.float32))
    sharding = plan_sharding([leaf], Mappings(params=AxisMapping(mapping)), spec).check()
    plan = plan_loading(sharding, rules, source)
    # Reads of 7 rows end inside blocks, most of them.
    arrays = load(plan, sharding, source, spec.build(devices[: spec.size]), read_bytes=7 * 320 * 4)
    np.testing.assert_array_equal(np.asarray(arrays["up"]), np.stack([exact[name] for name in names]))
    total = sum(x.nbytes for x in stored.values())
    assert total == 2 * (768 * 320 + 6 * 3 * 4)
    assert source.bytes_read == plan.source_bytes == arrays.report.bytes_read == total and plan.amplification == 1.0
    assert plan.by_path["up"].bytes_per_element == 1 + 6 * 3 * 4 / (768 * 320)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"embed": "data", "mlp": "model", "kv_head": "model", "vocab": "model"},
        {"head_size": "data", "q_heads_per_group": "model", "embed": "data"},
    ],
    ids=["replicated", "default", "heads inside"],
)
def test_a_model_is_loaded_from_blocks_into_shards(mapping, dtype, tmp_path, devices):
    """Every layout of the tiny model, in blocks that divide nothing, from two files."""
    weights = tiny_tensors(np.float32)
    stored, exact = fp8_tensors(weights, (5, 3), kept=("model.embed_tokens.weight",))
    paths = [tmp_path / f"{n}.safetensors" for n in range(2)]
    for n, path in enumerate(paths):
        # Values and their scales are in different files.
        save_file({name: x for i, (name, x) in enumerate(stored.items()) if i % 2 == n}, path)
    source = Fp8BlockFormat(block=(5, 3)).open(SafetensorsSource.from_files(*paths))
    rule = (("**.self_attn.*", AxisMapping({"embed": None})),) if "head_size" in mapping else ()
    mesh = MeshSpec.of(data=4, model=2)
    sharding = plan_sharding(tiny_leaves(dtype), Mappings(params=AxisMapping(mapping), overrides=rule), mesh).check()
    plan = plan_loading(sharding, tiny_rules(), source)
    arrays = load(plan, sharding, source, mesh.build(devices))
    for path, values in assembled(exact).items():
        np.testing.assert_array_equal(np.asarray(arrays[path]), values.astype(dtype))
    assert source.bytes_read == sum(x.nbytes for x in stored.values())


def test_hosts_read_the_parts_of_their_devices(tmp_path):
    """Ranges of the values, by hosts: each byte by one of them; the small scales by all."""
    stored, _ = fp8_tensors({"up.weight": matrix((1024, 512))}, (128, 128))
    source = opened(tmp_path, stored)
    rules = WeightRules(rules=(WeightRule(target="up", source="up.weight", axes=(("mlp",), ("embed",))),))
    leaf = Leaf("up", (("mlp", 1024), ("embed", 512)), np.dtype(np.float32))
    sharding = plan_sharding([leaf], Mappings(params=AxisMapping({"mlp": "data"})), MeshSpec.of(data=8)).check()
    plan = plan_loading(sharding, rules, source, hosts=np.arange(8) // 2)
    # Scales are listed for each read that needs them, and read once.
    read = np.zeros((4, (tmp_path / "model.safetensors").stat().st_size), bool)
    for host in range(4):
        for item in byte_ranges(plan, source, host):
            read[host, item.start : item.stop] = True
    assert read.sum(axis=1).tolist() == [256 * 512 + 8 * 4 * 4] * 4 and plan.amplification == 1.0
    assert read.any(axis=0).sum() == 1024 * 512 + 8 * 4 * 4


def test_a_server_sends_every_byte_once(tmp_path, devices):
    names = [f"layers.{n}.up_proj.weight" for n in range(3)]
    stored, exact = fp8_tensors({name: matrix((96, 64), n) for n, name in enumerate(names)}, (32, 32))
    # A tensor that is not quantized touches the others in the file.
    stored["norm"] = exact["norm"] = matrix((64,))
    save_file(stored, tmp_path / "model.safetensors")
    rules = WeightRules(
        rules=(
            WeightRule(target="up", source="layers.{layers}.up_proj.weight", axes=(("mlp",), ("embed",))),
            WeightRule(target="norm", source="norm", axes=(("embed",),)),
        )
    )
    leaves = [
        Leaf("up", (("layers", 3), ("mlp", 96), ("embed", 64)), np.dtype(np.float32)),
        Leaf("norm", (("embed", 64),), np.dtype(np.float32)),
    ]
    mesh = MeshSpec.of(data=4, model=2)
    mappings = Mappings(params=AxisMapping({"mlp": "data", "embed": "model"}))
    sharding = plan_sharding(leaves, mappings, mesh).check()
    with ObjectStore({"m/model.safetensors": tmp_path / "model.safetensors"}) as store:
        source = Fp8BlockFormat(block=(32, 32)).open(open_weights(RemoteFolder(f"{store.url}/m"), allow_pickle=False))
        plan = plan_loading(sharding, rules, source)
        assert source.remote is not None and plan.remote is not None
        arrays = load(plan, sharding, source, mesh.build(devices))
    np.testing.assert_array_equal(np.asarray(arrays["up"]), np.stack([exact[name] for name in names]))
    np.testing.assert_array_equal(np.asarray(arrays["norm"]), exact["norm"])
    assert source.bytes_read == sum(x.nbytes for x in stored.values())


def test_numbers_that_are_not_finite_are_reported(tmp_path, devices):
    stored, _ = fp8_tensors({"up.weight": matrix((300, 64))}, (128, 64))
    stored["up.weight_scale_inv"][1, 0] = np.inf
    stored["up.weight"].view(np.uint8)[299, 5] = 0x7F
    stored["up.weight"].view(np.uint8)[128:256] = 0x38
    source = opened(tmp_path, stored, (128, 64))
    rules = WeightRules(rules=(WeightRule(target="up", source="up.weight", axes=(("mlp",), ("embed",))),))
    leaf = Leaf("up", (("mlp", 300), ("embed", 64)), np.dtype(np.float32))
    sharding = plan_sharding([leaf], Mappings(params=AxisMapping({})), MeshSpec.of(data=1)).check()
    arrays = load(plan_loading(sharding, rules, source), sharding, source, MeshSpec.of(data=1).build(devices[:1]))
    (bad,) = arrays.report.not_finite
    assert bad.tensor == "up.weight" and (bad.infinite, bad.nan) == (128 * 64, 1)


def drop(name):
    return lambda stored: stored.pop(name)


def change(name, to):
    return lambda stored: stored.update({name: to})


@pytest.mark.parametrize(
    ("damage", "components"),
    [
        (drop("w_scale_inv"), ("'w_scale_inv' is missing", "'w'", "float32 or bfloat16[3, 2]")),
        (drop("w"), ("'w' is missing", "'w_scale_inv'", "float8_e4m3fn")),
        (change("w_scale_inv", np.ones((2, 3), np.float32)), ("'w_scale_inv'", "[2, 3]", "[3, 2]", "128 x 128")),
        (change("w_scale_inv", np.ones(6, np.float32)), ("'w_scale_inv'", "[6]", "[3, 2]")),
        (change("w_scale_inv", np.ones((3, 2), np.float16)), ("'w_scale_inv'", "float16", "float32 or bfloat16")),
        (change("w", np.ones((300, 200), ml_dtypes.bfloat16)), ("'w'", "bfloat16", "float8_e4m3fn")),
        (change("w", np.ones((300, 200), ml_dtypes.float8_e5m2)), ("'w'", "float8_e5m2", "float8_e4m3fn")),
        (change("w", np.ones(300, ml_dtypes.float8_e4m3fn)), ("'w'", "[300]", "a matrix")),
    ],
)
def test_damaged_files_are_refused(damage, components, tmp_path):
    stored, _ = fp8_tensors({"w": matrix((300, 200))}, (128, 128))
    damage(stored)
    with pytest.raises(ValueError) as refused:
        opened(tmp_path, stored)
    assert isinstance(refused.value, CheckpointError)
    for part in (*components, "model.safetensors"):
        assert part in str(refused.value), part


def test_everything_that_is_wrong_is_reported_at_once(tmp_path):
    stored, _ = fp8_tensors({"v": matrix((300, 200)), "w": matrix((300, 200))}, (128, 128))
    del stored["v_scale_inv"]
    stored["w_scale_inv"] = np.ones((9, 9), np.float64)
    with pytest.raises(CheckpointError) as refused:
        opened(tmp_path, stored)
    assert len(refused.value.problems) == 3


def test_the_configuration_of_deepseek_v3_is_read():
    assert read_quantization({"quantization_config": CONFIGURATION}, where="c") == Fp8BlockFormat(block=(128, 128))
    assert without_quantization({"a": 1, "quantization_config": CONFIGURATION}) == {"a": 1}
    assert read_quantization({"a": 1}, where="c") is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fmt", "e5m2"),
        ("activation_scheme", "static"),
        ("weight_block_size", None),
        ("weight_block_size", [128]),
        ("weight_block_size", [128, 0]),
        ("weight_block_size", [128, True]),
        ("weight_block_size", "128"),
    ],
)
def test_other_variants_are_refused_by_name(key, value):
    with pytest.raises(CheckpointError, match=rf"quantization_config\.{key} is ") as refused:
        read_quantization({"quantization_config": {**CONFIGURATION, key: value}}, where="c")
    assert refused.value.where == "c"


def test_torch_makes_the_same_numbers_of_a_file(tmp_path):
    """Torch's own reader and its own cast of FP8."""
    import torch
    from safetensors.torch import load_file

    stored, _ = fp8_tensors({"w": matrix((300, 200))}, (128, 128))
    # Every byte, NaN included.
    stored["w"].view(np.uint8)[0, :200] = np.arange(200)
    stored["w"].view(np.uint8)[1, :56] = np.arange(200, 256)
    source = opened(tmp_path, stored)
    theirs = load_file(tmp_path / "model.safetensors")
    scales = theirs["w_scale_inv"].repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    expected = (theirs["w"].to(torch.float32) * scales).numpy()
    assert np.isnan(expected).sum() >= 2
    np.testing.assert_array_equal(source.read("w", whole((300, 200))), expected)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_folder_is_scored_as_its_numbers(quantize, tmp_path, devices):
    """A checkpoint in blocks of 24 x 20 and one of what NumPy makes of it: the same arrays, bit for bit, and scores."""
    from helpers.family_models import describe_folder, score

    block = (24, 20)
    stored, exact = fp8_tensors(tensors(), block, dtype=ml_dtypes.bfloat16, kept=("model.embed_tokens.weight",))
    configuration = {**CONFIGURATION, "weight_block_size": list(block)}
    write_folder(tmp_path / "fp8", config={**CONFIG, "quantization_config": configuration}, weights=stored, shards=2)
    exact = {name: x.astype(np.float32) for name, x in exact.items()}
    write_folder(tmp_path / "exact", config={**CONFIG, "torch_dtype": "float32"}, weights=exact)
    checkpoint = open_checkpoint(str(tmp_path / "fp8"))
    assert "safetensors float8_e4m3fn in 24 x 20 blocks" in checkpoint.description
    assert checkpoint.nbytes == sum(x.nbytes for x in stored.values()) and not checkpoint.int8
    tokens = np.random.default_rng(5).integers(3, 300, (8, 16)).astype(np.int32)
    results = [
        score(
            describe_folder(tmp_path / name, mesh="group", positions=16, quantize=quantize),
            tokens,
            np.zeros_like(tokens),
        )
        for name in ("fp8", "exact")
    ]
    mine, theirs = (jax.tree.leaves(model) for model, _ in results)
    assert len(mine) == len(theirs) and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(mine, theirs, strict=True)
    )
    np.testing.assert_array_equal(results[0][1], results[1][1])
