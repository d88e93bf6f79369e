"""Damaged safetensors headers: each is refused with the reason, and the library refuses it too."""

import json
import struct

import numpy as np
import pytest
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from levanter.compat.hf.errors import CorruptFileError
from levanter.compat.hf.header import read_header
from levanter.compat.hf.readers import LocalFile

pytestmark = pytest.mark.quick

AGAIN = "\n  → download or copy the file again; its content has changed since it was written"


def write(path, header, data: bytes = b"", *, length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def refusal(path) -> str:
    with pytest.raises(SafetensorError):
        deserialize(path.read_bytes())
    with pytest.raises(CorruptFileError) as caught:
        read_header(LocalFile(path), path.name)
    return str(caught.value).removeprefix(f"{path}: ")


def f32(begin, end, *shape):
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": f32(0, 12, 2, 2)}, 16, "tensor 'a': data_offsets [0, 12] are 12 bytes, but F32 [2, 2] takes 16"),
        ({"a": f32(0, 8, 2), "b": f32(4, 12, 2)}, 12, "tensors 'a' and 'b' overlap in the file"),
        ({"a": f32(0, 8, 2), "b": f32(12, 20, 2)}, 20, "4 bytes before tensor 'b' belong to no tensor"),
        ({"a": f32(0, 8, 2)}, 11, "3 bytes after the last tensor belong to no tensor"),
        ({"a": f32(8, 0, -2)}, 8, "tensor 'a': shape [-2] is not a list of sizes"),
        ({"a": f32(0, 4, 2**62, 2**62)}, 4, None),
        ({"a": {**f32(0, 8, 2), "data_offsets": [0]}}, 8, "tensor 'a': data_offsets [0] is not [begin, end]"),
        ({"a": {"dtype": "F32"}}, 0, "tensor 'a': expected dtype, shape and data_offsets, got {'dtype': 'F32'}"),
        ([1], 0, "corrupt safetensors header: it is not a JSON object" + AGAIN),
    ],
)
def test_what_a_header_may_not_say(tmp_path, header, size, message):
    found = refusal(write(tmp_path / "x.safetensors", header, bytes(size)))
    if message is None:
        message = f"tensor 'a': data_offsets [0, 4] are 4 bytes, but F32 [{2**62}, {2**62}] takes {2**126}"
    assert found == message


def test_unknown_dtype(tmp_path):
    header = {"a": {**f32(0, 8, 2), "dtype": "Q4_1"}}
    found = refusal(write(tmp_path / "x.safetensors", header, bytes(8)))
    assert found.startswith("tensor 'a': dtype 'Q4_1' is not one of F64, F32, F16, BF16, ")


def test_everything_wrong_is_listed_together(tmp_path):
    header = {"a": f32(0, 12, 2, 2), "b": f32(0, 8, 3), "c": f32(0, 8, 2)}
    path = write(tmp_path / "x.safetensors", header, bytes(8))
    assert refusal(path) == (
        "2 problems:\n"
        "  [1] tensor 'a': data_offsets [0, 12] are 12 bytes, but F32 [2, 2] takes 16\n"
        "  [2] tensor 'b': data_offsets [0, 8] are 8 bytes, but F32 [3] takes 12"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file has 0 bytes, fewer than the 8 that give the length of its header"),
        (b"\x01\x02", "the file has 2 bytes, fewer than the 8 that give the length of its header"),
        (struct.pack("<Q", 10**12) + b"{}", "it claims to be 1000000000000 bytes long (the format allows 100000000)"),
        (struct.pack("<Q", 500) + b"{}", "it claims to be 500 bytes long in a file of 10 bytes"),
    ],
)
def test_a_length_that_cannot_be(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert refusal(path) == f"corrupt safetensors header: {message}{AGAIN}"


def test_not_json(tmp_path):
    found = refusal(write(tmp_path / "x.safetensors", b'{"a": nonsense'))
    assert found.startswith("corrupt safetensors header: it is not UTF-8 JSON (Expecting value: line 1 column 7")
    found = refusal(write(tmp_path / "x.safetensors", b"\xff\xfe{}"))
    assert found.startswith("corrupt safetensors header: it is not UTF-8 JSON ('utf-8' codec can't decode")
    with pytest.raises(CorruptFileError, match="it is not UTF-8 JSON"):
        read_header(LocalFile(write(tmp_path / "x.safetensors", b"[" * 200_000)), "x")


def test_a_name_twice(tmp_path):
    text = (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    )
    path = write(tmp_path / "x.safetensors", text, bytes(4))
    with pytest.raises(CorruptFileError) as caught:
        read_header(LocalFile(path), "x")
    assert str(caught.value) == f"{path}: corrupt safetensors header: it names 'a' twice"


def test_a_truncated_file_says_what_is_cut(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": np.zeros(100, np.float32), "b": np.zeros(100, np.float32)}, path)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-40])
    assert refusal(path) == (
        f"truncated: the file has {size - 40} bytes, its header describes {size}; "
        "1 of 2 tensors are truncated, the first is 'b'" + AGAIN
    )


def test_a_long_header_and_scalars_and_empty_tensors(tmp_path):
    path = tmp_path / "x.safetensors"
    many = {f"layer.{n}.{'x' * 60}": np.zeros((), np.float32) for n in range(2000)} | {"e": np.zeros((0, 3), np.int8)}
    save_file(many, path)
    header = read_header(LocalFile(path), "x")
    assert {entry.name: entry.shape for entry in header.tensors} == {name: each.shape for name, each in many.items()}
    assert header.tensors[-1].stop == path.stat().st_size
