"""Which files hold the weights: indexes that lie, leave the folder, or name what is not there; pickle files."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.hf_folder import tensors, write_folder, write_json
from safetensors.numpy import save_file

from levanter.compat.hf.errors import (
    CheckpointError,
    CorruptFileError,
    MissingCheckpointFileError,
    UnsafeCheckpointError,
)
from levanter.compat.hf.index import open_weights
from levanter.compat.hf.repository import LocalFolder, stays_inside

pytestmark = pytest.mark.quick

INDEX = "model.safetensors.index.json"
CONVERT = (
    "\n  → convert it once, where torch is installed and the file is trusted: "
    'AutoModelForCausalLM.from_pretrained("…").save_pretrained("…", safe_serialization=True)'
)


def rewrite_index(folder: Path, change) -> None:
    document = json.loads((folder / INDEX).read_text())
    change(document["weight_map"])
    write_json(folder / INDEX, document)


def refusal(folder: Path, error: type[CheckpointError], **options) -> str:
    with pytest.raises(error) as caught:
        open_weights(LocalFolder(folder), **options)
    return str(caught.value).replace(str(folder), "CKPT")


@pytest.mark.parametrize("shards", [1, 3])
def test_one_file_or_shards(tmp_path, shards):
    source = open_weights(LocalFolder(write_folder(tmp_path, shards=shards)))
    expected = tensors()
    assert set(source.tensors) == set(expected)
    for name, array in expected.items():
        found = source.read(name, tuple(slice(0, size) for size in array.shape))
        assert found.tobytes() == array.tobytes()


def test_a_missing_shard(tmp_path):
    write_folder(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    assert refusal(tmp_path, MissingCheckpointFileError) == (
        f"CKPT/{INDEX}: 2 problems:\n"
        "  [1] names model-00002-of-00003.safetensors, which is not there (7 tensors)\n"
        "  [2] names model-00003-of-00003.safetensors, which is not there (6 tensors)\n"
        "  → the download or copy of the checkpoint is not complete"
    )


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/etc/model.safetensors", "a/../../m.safetensors"])
def test_a_file_name_that_leaves_the_folder(tmp_path, file):
    folder = write_folder(tmp_path / "ckpt", shards=2)
    rewrite_index(folder, lambda weight_map: weight_map.update({"model.norm.weight": file}))
    assert refusal(folder, UnsafeCheckpointError) == (
        f"CKPT/{INDEX}: file name {file!r} leaves the checkpoint's folder; it is refused"
    )


@pytest.mark.parametrize(
    ("file", "inside"),
    [
        ("m.safetensors", True),
        ("sub/m.safetensors", True),
        *((file, False) for file in ("..", "a//b", "./m", "C:\\m", "a\\..\\m", "gs://b/m", "", "m\0")),
    ],
)
def test_which_names_stay_inside(file, inside):
    assert stays_inside(file) is inside


def test_a_pickle_in_the_index(tmp_path):
    folder = write_folder(tmp_path, shards=2)
    rewrite_index(folder, lambda weight_map: weight_map.update({"model.norm.weight": "pytorch_model.bin"}))
    assert refusal(folder, UnsafeCheckpointError) == (
        f"CKPT/{INDEX}: file 'pytorch_model.bin' is not a safetensors file"
    )


def test_a_tensor_that_only_the_index_has_is_refused(tmp_path):
    folder = write_folder(tmp_path, shards=2)
    (first, _) = sorted(file.name for file in folder.glob("*.safetensors"))
    rewrite_index(folder, lambda weight_map: weight_map.update({"model.extra.weight": first}))
    message = refusal(folder, CorruptFileError)
    assert message.startswith(
        f"CKPT/{INDEX}: tensor 'model.extra.weight' should be in {first}, and no file that the index names has it\n  → "
    )
    assert "delete the index if the shards are complete" in message


def test_tensors_that_the_index_does_not_place_rightly_are_read_from_where_they_are(tmp_path):
    folder = write_folder(tmp_path, shards=2)
    (first, second) = sorted(file.name for file in folder.glob("*.safetensors"))
    placed = json.loads((folder / INDEX).read_text())["weight_map"]
    moved = next(name for name in placed if placed[name] == first)

    def change(weight_map):
        del weight_map["model.norm.weight"]
        weight_map[moved] = second

    rewrite_index(folder, change)
    source, expected = open_weights(LocalFolder(folder)), tensors()
    assert source.tensors.keys() == expected.keys()
    for name in (moved, "model.norm.weight"):
        values = source.read(name, tuple(slice(0, size) for size in expected[name].shape))
        assert values.tobytes() == expected[name].tobytes()
    assert source.notes == (
        f"{moved}: in another file than the index says; read from {first}",
        f"model.norm.weight: not in the index; read from {placed['model.norm.weight']}",
    )


def test_a_whole_file_is_read_beside_an_old_index(tmp_path):
    folder = write_folder(tmp_path, shards=2)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    weights = {name: (array * 2).astype(array.dtype) for name, array in tensors().items()}
    save_file(weights, folder / "model.safetensors")
    source = open_weights(LocalFolder(folder))
    assert source.read("model.norm.weight", (slice(0, 32),)).tobytes() == weights["model.norm.weight"].tobytes()
    assert source.notes == (f"{INDEX} is not used: model.safetensors has all tensors in one file",)


@pytest.mark.parametrize("value", [1, 7])
def test_a_tensor_in_two_shards_must_be_the_same_in_both(tmp_path, value):
    weights = {"a": np.zeros(2, np.float32), "b": np.ones(2, np.float32)}
    save_file(weights, tmp_path / "1.safetensors")
    save_file({"b": np.full(2, value, np.float16)}, tmp_path / "2.safetensors")
    write_json(tmp_path / INDEX, {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    if value == 1:
        source = open_weights(LocalFolder(tmp_path))
        assert source.tensors["b"].dtype == np.float16
        return
    assert refusal(tmp_path, CorruptFileError).startswith(
        f"CKPT/{INDEX}: tensor 'b' is in 1.safetensors and, with other values, in 2.safetensors\n  → "
    )


@pytest.mark.parametrize(
    ("document", "message"),
    [({}, "it has no weight_map"), ({"weight_map": {"a": 3}}, "tensor 'a': 3 is not a file name")],
)
def test_an_index_without_sense(tmp_path, document, message):
    write_json(tmp_path / INDEX, document)
    assert refusal(tmp_path, CorruptFileError) == f"CKPT/{INDEX}: {message}"
    (tmp_path / INDEX).write_text("{")
    assert refusal(tmp_path, CorruptFileError).startswith(f"CKPT/{INDEX}: it is not UTF-8 JSON (Expecting property")


def test_damaged_shards_are_reported_together(tmp_path):
    folder = write_folder(tmp_path, shards=3)
    (first, second, _) = sorted(folder.glob("*.safetensors"))
    first.write_bytes(b"")
    second.write_bytes(b"\xff" * 100)
    found = refusal(folder, CorruptFileError)
    assert found == (
        "2 of 3 files: 2 problems:\n"
        f"  [1] CKPT/{first.name}: corrupt safetensors header: the file has 0 bytes, fewer than the 8 that give the "
        "length of its header\n"
        f"  [2] CKPT/{second.name}: corrupt safetensors header: it claims to be 18446744073709551615 bytes long "
        "(the format allows 100000000)\n"
        "  → download or copy the file again; its content has changed since it was written"
    )


def test_pickle_files_are_refused(tmp_path):
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "training_args.pt"):
        (tmp_path / name).write_bytes(b"")
    names = "pytorch_model-00001-of-00002.bin, pytorch_model-00002-of-00002.bin, training_args.pt"
    assert refusal(tmp_path, UnsafeCheckpointError) == (
        f"CKPT: its weights are pickle files ({names}); reading them can run any code, so they are refused{CONVERT}"
    )
    assert refusal(tmp_path, UnsafeCheckpointError, allow_pickle=True) == (
        f"CKPT: its weights are pickle files ({names}); allow_pickle accepts the risk, but this project has no reader "
        f"for them (it would need torch){CONVERT}"
    )


def test_safetensors_win_over_pickle(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert open_weights(LocalFolder(tmp_path)).tensors


def test_unusual_names(tmp_path):
    assert refusal(tmp_path, MissingCheckpointFileError) == (
        f"CKPT: there are no weights (model.safetensors or {INDEX}); it has nothing"
    )
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "consolidated.safetensors")
    assert set(open_weights(LocalFolder(tmp_path)).tensors) == {"a"}
    save_file({"b": np.zeros(2, np.float32)}, tmp_path / "other.safetensors")
    assert refusal(tmp_path, CheckpointError) == (
        f"CKPT: there is neither model.safetensors nor {INDEX}, but several other files: consolidated.safetensors, "
        "other.safetensors\n  → rename the intended one to model.safetensors"
    )


def test_shards_without_an_index(tmp_path):
    folder = write_folder(tmp_path, shards=3)
    (folder / INDEX).unlink()
    assert set(open_weights(LocalFolder(folder)).tensors) == set(tensors())
    (folder / "model-00003-of-00003.safetensors").unlink()
    assert refusal(folder, MissingCheckpointFileError) == (
        f"CKPT: there is no {INDEX}, and the shards do not form one set: model-00001-of-00003.safetensors, "
        "model-00002-of-00003.safetensors\n  → the download or copy of the checkpoint is not complete"
    )
