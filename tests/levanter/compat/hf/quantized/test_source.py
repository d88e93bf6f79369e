"""`DequantizingSource` with a format of its own: MXFP4, as gpt-oss stores it; and slices that touch in a file.

Blocks of 32 values in a row share one byte, an exponent of two; values have 4 bits, two to a byte, the first in the low
bits. The files have `[…, rows, blocks, 16]` bytes and `[…, rows, blocks]` exponents (Open Compute Project,
Microscaling Formats 1.0).
"""

import ml_dtypes
import numpy as np
import pytest
from helpers.object_store import ObjectStore
from safetensors.numpy import save_file

from haliax_ext.abstract import Leaf
from haliax_ext.loading import load, plan_loading
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.rules import WeightRule, WeightRules
from haliax_ext.sources import AdjacentSource, RemoteSource, TensorSource
from levanter.compat.hf.errors import CheckpointError
from levanter.compat.hf.index import open_weights
from levanter.compat.hf.quantized import DequantizingSource, QuantizedTensor, StoredPart, spread_blocks
from levanter.compat.hf.quantized import source as dequantizing
from levanter.compat.hf.quantized.compressed_tensors import Int8Format, packed
from levanter.compat.hf.repository import RemoteFolder
from levanter.compat.hf.safetensors import SafetensorsSource

BYTE = np.dtype(np.uint8)
FP4 = np.asarray([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)


def decode_mxfp4(components, index, out):
    """As a format would: nibbles apart, cut to the slice, times two to the exponent."""
    pairs, exponents = components
    nibbles = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1)
    first = index[-1].start % 2
    values = FP4[nibbles[..., first : first + out.shape[-1]]]
    block = (*(1 for _ in index[:-1]), 32)
    out[...] = np.ldexp(values, spread_blocks(exponents.astype(np.int32) - 127, block, index))


def mxfp4(name: str, shape: tuple[int, ...]) -> QuantizedTensor:
    *outer, columns = shape
    blocks, one = columns // 32, (1,) * len(outer)
    return QuantizedTensor(
        name=name,
        shape=shape,
        dtype=np.dtype(ml_dtypes.bfloat16),
        components=(
            StoredPart(name=f"{name}_blocks", shape=(*outer, blocks, 16), dtypes=(BYTE,), block=(*one, 2), view=BYTE),
            StoredPart(name=f"{name}_scales", shape=(*outer, blocks), dtypes=(BYTE,), block=(*one, 32)),
        ),
        decode=decode_mxfp4,
    )


def stored_mxfp4(name: str, shape: tuple[int, ...], seed: int = 0):
    """Random bytes, and their numbers, one block after another."""
    rng = np.random.default_rng(seed)
    *outer, columns = shape
    pairs = rng.integers(0, 256, (*outer, columns // 32, 16)).astype(np.uint8)
    exponents = rng.integers(110, 140, (*outer, columns // 32)).astype(np.uint8)
    exact = np.empty(shape, np.float32)
    for at in np.ndindex(*exponents.shape):
        for n in range(32):
            code = int(pairs[at][n // 2]) >> (4 * (n % 2)) & 15
            kind = ml_dtypes.float4_e2m1fn
            value = float(np.asarray([code], np.uint8).view(kind)[0]) if np.dtype(kind).itemsize == 1 else FP4[code]
            exact[(*at[:-1], at[-1] * 32 + n)] = value * 2.0 ** (int(exponents[at]) - 127)
    return {f"{name}_blocks": pairs, f"{name}_scales": exponents}, exact


def whole(shape):
    return tuple(slice(0, n) for n in shape)


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(6, 96), (3, 5, 64)])
def test_mxfp4_slices_begin_and_end_inside_bytes_and_blocks(shape, tmp_path, monkeypatch):
    monkeypatch.setattr(dequantizing, "DECODED_ELEMENTS", 40)
    stored, exact = stored_mxfp4("w", shape)
    save_file({**stored, "bias": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    source = DequantizingSource(SafetensorsSource.from_files(tmp_path / "m.safetensors"), [mxfp4("w", shape)])
    assert isinstance(source, TensorSource) and isinstance(source, AdjacentSource) and isinstance(source, RemoteSource)
    assert set(source.tensors) == {"w", "bias"} and source.quantized == {"w"} and source.remote is None
    assert source.tensors["w"].nbytes == exact.size // 2 + exact.size // 32
    rng = np.random.default_rng(1)
    last = shape[-1]
    columns = [(0, last), (1, 2), (31, 33), (30, 64), (33, last - 1), (7, 7)]
    columns += [tuple(sorted(rng.integers(0, last + 1, 2).tolist())) for _ in range(20)]
    for pair in columns:
        rows = tuple(slice(*sorted(rng.integers(0, n + 1, 2).tolist())) for n in shape[:-1])
        for outer in (whole(shape[:-1]), rows):
            index = (*outer, slice(*pair))
            np.testing.assert_array_equal(source.read("w", index).astype(np.float32), exact[index])


@pytest.mark.parametrize("mapping", [{}, {"mlp": "data"}, {"embed": "data"}, {"expert": "model", "embed": "data"}])
def test_mxfp4_is_loaded_with_every_stored_byte_once(mapping, tmp_path, devices):
    shape = (4, 24, 96)
    stored, exact = stored_mxfp4("experts.up", shape)
    save_file(stored, tmp_path / "m.safetensors")
    files = SafetensorsSource.from_files(tmp_path / "m.safetensors")
    source = DequantizingSource(files, [mxfp4("experts.up", shape)])
    rules = WeightRules(rules=(WeightRule(target="up", source="experts.up", axes=(("expert",), ("mlp",), ("embed",))),))
    leaf = Leaf("up", (("expert", 4), ("mlp", 24), ("embed", 96)), np.dtype(np.float32))
    mesh = MeshSpec.of(data=4, model=2)
    sharding = plan_sharding([leaf], Mappings(params=AxisMapping(mapping)), mesh).check()
    plan = plan_loading(sharding, rules, source)
    arrays = load(plan, sharding, source, mesh.build(devices), read_bytes=500)
    np.testing.assert_array_equal(np.asarray(arrays["up"]), exact)
    assert source.bytes_read == plan.source_bytes == sum(x.nbytes for x in stored.values()) and plan.amplification == 1


@pytest.mark.parametrize(
    ("change", "components"),
    [
        ({"w_scales": None}, ("'w_scales' is missing", "'w' [6, 96]", "uint8[6, 3]")),
        ({"w_scales": np.ones((6, 4), np.uint8)}, ("'w_scales'", "[6, 4]", "[6, 3]", "1 x 32")),
        ({"w_scales": np.ones((6, 3), np.int8)}, ("'w_scales' has dtype int8, expected uint8",)),
        ({"w_blocks": np.ones((6, 48), np.uint8)}, ("'w_blocks'", "[6, 48]", "[6, 3, 16]")),
        ({"w": np.ones((6, 96), np.float32)}, ("'w' is stored, and so is 'w_blocks', 'w_scales'",)),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, components, tmp_path):
    stored, _ = stored_mxfp4("w", (6, 96))
    stored = {name: x for name, x in {**stored, **change}.items() if x is not None}
    save_file(stored, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError) as refused:
        DequantizingSource(SafetensorsSource.from_files(tmp_path / "m.safetensors"), [mxfp4("w", (6, 96))])
    for part in (*components, "m.safetensors"):
        assert part in str(refused.value), part


def test_packed_integers_that_touch_in_a_remote_file_are_unpacked(tmp_path, devices):
    """Small tensors next to one another are read by one request, and each is decoded all the same."""
    rng = np.random.default_rng(0)
    exact = {f"layers.{n}.up.weight": rng.integers(-127, 128, (16, 32)).astype(np.int8) for n in range(4)}
    stored = {}
    for name, q in exact.items():
        stored |= {f"{name}_packed": packed(q), f"{name}_scale": np.ones((16, 1), np.float32)}
        stored[f"{name}_shape"] = np.asarray(q.shape, np.int64)
    save_file(stored, tmp_path / "model.safetensors")
    rules = WeightRules(
        rules=(
            WeightRule(target="q", source="layers.{layers}.up.weight", axes=(("mlp",), ("embed",))),
            WeightRule(target="scale", source="layers.{layers}.up.weight_scale", axes=(("mlp",), ())),
        )
    )
    leaves = [
        Leaf("q", (("layers", 4), ("mlp", 16), ("embed", 32)), np.dtype(np.int8)),
        Leaf("scale", (("layers", 4), ("mlp", 16)), np.dtype(np.float32)),
    ]
    mesh = MeshSpec.of(data=2, model=4)
    sharding = plan_sharding(leaves, Mappings(params=AxisMapping({})), mesh).check()
    with ObjectStore({"m/model.safetensors": tmp_path / "model.safetensors"}) as store:
        files = open_weights(RemoteFolder(f"{store.url}/m"), allow_pickle=False)
        source = Int8Format(packed=True).open(files)
        plan = plan_loading(sharding, rules, source)
        requests = store.requests
        arrays = load(plan, sharding, source, mesh.build(devices))
        assert store.requests - requests < 8, "requests are merged"
    np.testing.assert_array_equal(np.asarray(arrays["q"]), np.stack(list(exact.values())))


def test_runs_of_slices_end_at_tensors_of_several_parts(tmp_path):
    """Values, scales and a plain tensor that touch: one range of the file, and read one after another."""
    stored, exact = stored_mxfp4("w", (4, 64))
    plain = np.arange(12, dtype=np.uint8)
    save_file({"a": plain, **stored, "z": plain}, tmp_path / "model.safetensors")
    with ObjectStore({"m/model.safetensors": tmp_path / "model.safetensors"}) as store:
        files = open_weights(RemoteFolder(f"{store.url}/m"), allow_pickle=False)
        source = DequantizingSource(files, [mxfp4("w", (4, 64))])
        (only,) = source.byte_ranges("w", whole((4, 64)))
        assert only.nbytes == source.tensors["w"].nbytes
        outs = {"a": np.empty(12, np.uint8), "w": np.empty((4, 64), ml_dtypes.bfloat16), "z": np.empty(12, np.uint8)}
        source.read_adjacent([(name, whole(out.shape), out) for name, out in outs.items()])
    np.testing.assert_array_equal(outs["w"].astype(np.float32), exact)
    np.testing.assert_array_equal(outs["a"], plain)
    np.testing.assert_array_equal(outs["z"], plain)
