"""GgufSource against the library's dequantization of whole tensors and llama.cpp's documented permutation."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from helpers.gguf_file import HEADS, KV_HEADS, gguf_tensors, hf_weights, permute, write_gguf

from haliax_ext.sources import TensorSource
from levanter.compat.gguf import GgufSource, open_gguf
from levanter.compat.gguf import source as module
from levanter.compat.hf.errors import CheckpointError, CorruptFileError, MissingCheckpointFileError

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


def opened(path) -> GgufSource:
    return GgufSource(open_gguf(path), heads=HEADS, kv_heads=KV_HEADS)


def through_storage(array: np.ndarray, kind: Kind) -> np.ndarray:
    """What the library makes of a whole tensor after storing it."""
    return gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)


def oracle(weights, kind: Kind) -> dict[str, np.ndarray]:
    """Whole tensors quantized in llama.cpp's order, dequantized by the library, rows put back by sorting."""
    found = {}
    for name, array in weights.items():
        if array.ndim == 1:
            found[name] = array
            continue
        heads = HEADS if ".q_proj" in name else KV_HEADS if ".k_proj" in name else None
        if heads is None:
            found[name] = through_storage(array, kind)
            continue
        order = permute(np.arange(array.shape[0])[:, None], heads)[:, 0]  # stored row → row
        found[name] = through_storage(array[order], kind)[np.argsort(order)]
    return found


def random_index(rng, shape):
    index = []
    for size in shape:
        start = int(rng.integers(0, size + 1))
        index.append(slice(start, int(rng.integers(start, size + 1))))
    return tuple(index)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_slices_equal_slices_of_whole_dequantized_tensors(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 500)
    weights = hf_weights(tied=False, bias=True)
    source = opened(write_gguf(tmp_path / "m.gguf", gguf_tensors(weights), kind=kind))
    assert isinstance(source, TensorSource)
    expected = oracle(weights, kind)
    assert set(source.tensors) == set(expected)
    rng = np.random.default_rng(1)
    for name, array in expected.items():
        info = source.tensors[name]
        assert info.shape == array.shape
        for index in [tuple(slice(0, n) for n in array.shape), *(random_index(rng, array.shape) for _ in range(4))]:
            before = source.bytes_read
            found = source.read(name, index)
            assert found.dtype == info.dtype
            np.testing.assert_array_equal(found.astype(np.float32), array[index].astype(np.float32))
            ranges = source.byte_ranges(name, index)
            assert source.bytes_read - before == sum(r.nbytes for r in ranges)
            assert all(a.stop < b.start for a, b in itertools.pairwise(ranges)), "sorted and coalesced"


def test_q_and_k_rows_are_those_before_the_permutation(tmp_path):
    weights = hf_weights(bias=True)
    source = opened(write_gguf(tmp_path / "m.gguf", gguf_tensors(weights)))
    for part in ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.weight", "o_proj.weight"):
        name = f"model.layers.1.self_attn.{part}"
        whole = tuple(slice(0, n) for n in weights[name].shape)
        np.testing.assert_array_equal(source.read(name, whole), weights[name])
    # The permutation is not the identity, or this would test nothing.
    name = "model.layers.1.self_attn.q_proj.weight"
    assert not np.array_equal(permute(weights[name], HEADS), weights[name])


def test_a_whole_tensor_is_one_range_and_each_byte_is_read_once(tmp_path):
    source = opened(write_gguf(tmp_path / "m.gguf", kind=Kind.Q4_1))
    for name, info in source.tensors.items():
        before, whole = source.bytes_read, tuple(slice(0, n) for n in info.shape)
        out = np.full(info.shape, np.nan, info.dtype)
        assert source.read(name, whole, out) is out
        assert not np.isnan(out).any()
        (only,) = source.byte_ranges(name, whole)
        assert only.nbytes == info.nbytes == source.bytes_read - before


def test_columns_read_only_their_blocks(tmp_path):
    source = opened(write_gguf(tmp_path / "m.gguf", kind=Kind.Q8_0))
    ranges = source.byte_ranges("model.layers.0.mlp.down_proj.weight", (slice(3, 4), slice(40, 60)))
    assert [r.nbytes for r in ranges] == [34], "one block of 32 numbers"


def test_many_threads(tmp_path):
    weights = hf_weights()
    source = opened(write_gguf(tmp_path / "m.gguf", kind=Kind.Q4_1))
    expected = oracle(weights, Kind.Q4_1)
    rng = np.random.default_rng(3)
    wanted = [(name, random_index(rng, expected[name].shape)) for name in list(expected) * 5]
    with ThreadPoolExecutor(8) as pool:
        for (name, index), found in zip(wanted, pool.map(lambda item: source.read(*item), wanted), strict=True):
            np.testing.assert_array_equal(found, expected[name][index])


def test_tensors_without_a_place(tmp_path):
    tensors = gguf_tensors(hf_weights()) | {
        "blk.0.attn_qq.weight": np.zeros((64, 64), np.float32),
        "blk.0.ffn_gate_exps.weight": np.zeros((64, 64), np.float32),
        "blk.1.attn_k.weight": np.zeros((30, 64), np.float32),
    }
    path = write_gguf(tmp_path / "m.gguf", tensors)
    with pytest.raises(CheckpointError) as caught:
        opened(path)
    assert str(caught.value) == (
        f"{path}: 3 problems:\n"
        "  [1] tensor 'blk.1.attn_k.weight' has 30 rows for 2 heads\n"
        "  [2] tensor 'blk.0.attn_qq.weight' does not belong to a llama model (nearest known part: attn_q)\n"
        "  [3] tensor 'blk.0.ffn_gate_exps.weight' does not belong to a llama model (nearest known part: ffn_gate)"
    )


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(MissingCheckpointFileError, match="there is no such file"):
        open_gguf(path)
    path.write_bytes(b"PK\x03\x04 not this")
    with pytest.raises(CorruptFileError) as caught:
        open_gguf(path)
    assert str(caught.value) == f"{path}: it is not a GGUF file: it begins with b'PK\\x03\\x04', not b'GGUF'"
    write_gguf(path, kind=Kind.Q4_1)
    content = path.read_bytes()
    for size in (4, 20, 400, len(content) // 2, len(content) - 1000):
        path.write_bytes(content[:size])
        with pytest.raises(CorruptFileError, match=rf"it is a damaged or truncated GGUF file \({size} bytes; "):
            open_gguf(path)


def test_the_storage_of_most_weights_names_the_quantization(tmp_path):
    assert open_gguf(write_gguf(tmp_path / "m.gguf", kind=Kind.Q5_1)).quantization == "Q5_1"
