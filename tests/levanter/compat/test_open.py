"""open_checkpoint: what it gives, that it reads no weight, and every bad input with its message."""

import json
import re
from pathlib import Path

import fsspec
import numpy as np
import pytest
from helpers.hf_folder import CONFIG, byte_level_tokenizer, tensors, write_folder, write_json
from helpers.object_store import ObjectStore, files_of

from haliax_ext.sources import TensorSource
from levanter.compat.hf.errors import (
    CheckpointError,
    ConfigMismatchError,
    CorruptFileError,
    MissingCheckpointFileError,
    UnknownModelError,
    UnsafeCheckpointError,
)
from levanter.compat.open import hf_config, open_checkpoint
from levanter.models.llama.config import LlamaConfig
from levanter.models.registry import families_of_config_json

pytestmark = pytest.mark.quick


def read_all(source: TensorSource) -> dict[str, bytes]:
    whole = {name: tuple(slice(0, size) for size in info.shape) for name, info in source.tensors.items()}
    return {name: source.read(name, index).tobytes() for name, index in whole.items()}


def edit(folder: Path, **fields) -> Path:
    document = json.loads((folder / "config.json").read_text()) | fields
    write_json(folder / "config.json", {name: value for name, value in document.items() if value is not ...})
    return folder


def refusal(folder, error: type[CheckpointError], **options) -> str:
    with pytest.raises(error) as caught:
        open_checkpoint(str(folder), **options).tokenizer()
    return str(caught.value).replace(str(folder), "CKPT")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_checkpoint_is_opened_without_reading_a_weight(tmp_path, shards):
    opened = open_checkpoint(str(write_folder(tmp_path, shards=shards)))
    assert isinstance(opened.config, LlamaConfig) and opened.config.hidden_dim == 32
    assert (opened.vocab_size, opened.findings, opened.quantization, opened.passed_over) == (320, (), None, ())
    assert opened.document == CONFIG == hf_config(str(tmp_path))
    assert opened.tokenizer().vocab_size == 300
    assert opened.source.bytes_read == 0
    expected = tensors()
    assert opened.nbytes == sum(each.nbytes for each in expected.values())
    assert opened.description == f"{tmp_path} (llama, safetensors bfloat16, {opened.nbytes / 2**20:,.1f} MiB)"
    assert read_all(opened.source) == {name: array.tobytes() for name, array in expected.items()}
    assert opened.source.bytes_read == opened.nbytes
    opened.check_model_block({"type": "llama", "hidden_dim": 32})
    with pytest.raises(ConfigMismatchError, match=r"model\.hidden_dim is 33, .*config\.json says 32"):
        opened.check_model_block({"hidden_dim": 33})


def test_local_references_contact_nothing(tmp_path, monkeypatch):
    write_folder(tmp_path)

    def refuse(*_, **__):
        raise AssertionError("a local checkpoint was looked up on the network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    assert open_checkpoint(str(tmp_path)).tokenizer()


def test_a_remote_folder_is_streamed(tmp_path):
    write_folder(tmp_path, shards=2)
    memory = fsspec.filesystem("memory")
    for file in tmp_path.iterdir():
        memory.pipe(f"/bucket/tiny/{file.name}", file.read_bytes())
    opened = open_checkpoint("memory://bucket/tiny")
    assert opened.where == "memory://bucket/tiny/config.json"
    assert opened.source.bytes_read == 0
    assert read_all(opened.source) == {name: array.tobytes() for name, array in tensors().items()}
    assert opened.tokenizer().vocab_size == 300
    with pytest.raises(MissingCheckpointFileError) as caught:
        open_checkpoint("memory://bucket/none")
    assert str(caught.value) in (
        "memory://bucket/none: there is no such folder",
        "memory://bucket/none: there is no config.json (the model's architecture); it has no files",
    )
    with pytest.raises(CheckpointError, match=r"this kind of file must be on a local disk"):
        open_checkpoint("memory://bucket/tiny/model.gguf")


def test_missing_folder(tmp_path):
    write_folder(tmp_path / "smollm2")
    assert refusal(tmp_path / "smolm2", MissingCheckpointFileError) == (
        f"CKPT: there is no such file or folder\n  → did you mean {tmp_path / 'smollm2'}?"
    )
    assert refusal(tmp_path / "no" / "where", MissingCheckpointFileError) == (
        f"CKPT: there is no such file or folder, and no folder {tmp_path / 'no'} either"
    )


def test_missing_config(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "configs.json")
    assert refusal(tmp_path, MissingCheckpointFileError) == (
        "CKPT: there is no config.json (the model's architecture); it has configs.json, model.safetensors, "
        "tokenizer.json, tokenizer_config.json\n  → did you mean configs.json?"
    )
    (tmp_path / "model.Q4.gguf").write_bytes(b"")
    assert refusal(tmp_path, CheckpointError) == (
        "CKPT: there is no config.json, but GGUF files: model.Q4.gguf\n  → give the file:  CKPT/model.Q4.gguf"
    )


def test_one_file_of_a_checkpoint(tmp_path):
    write_folder(tmp_path)
    assert refusal(tmp_path / "model.safetensors", CheckpointError) == (
        "CKPT: a model is its whole folder (config.json, weights, tokenizer), not one file of it\n"
        f"  → give the folder:  {tmp_path}"
    )
    (tmp_path / "notes.txt").write_text("")
    assert refusal(tmp_path / "notes.txt", CheckpointError) == "CKPT: a checkpoint is a folder or a .gguf, .json file"


def test_corrupt_config(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    assert refusal(tmp_path, CorruptFileError).startswith(
        "CKPT/config.json: it is not UTF-8 JSON (Expecting value: line 1 column 16 (char 15))"
    )
    (tmp_path / "config.json").write_text("[]")
    assert refusal(tmp_path, CorruptFileError) == "CKPT/config.json: it is not a JSON object"


def test_corrupt_safetensors_header(tmp_path):
    write_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[20] = 0xFF
    path.write_bytes(content)
    assert re.fullmatch(
        r"CKPT/model\.safetensors: corrupt safetensors header: it is not UTF-8 JSON \('utf-8' codec can't decode byte "
        r"0xff in position 12: invalid start byte\)\n  → download or copy the file again; "
        r"its content has changed since it was written",
        refusal(tmp_path, CorruptFileError),
    )


def test_truncated_shard(tmp_path):
    write_folder(tmp_path, shards=2)
    path = tmp_path / "model-00002-of-00002.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    found = refusal(tmp_path, CorruptFileError)
    assert found.startswith(
        f"CKPT/{path.name}: truncated: the file has {len(content) - 10} bytes, its header describes {len(content)}; "
        "1 of 10 tensors are truncated, the first is '"
    )
    assert found.endswith(
        "\n  → download or copy the file again; "
        r"its content has changed since it was written"
    )


def test_index_naming_a_file_outside_the_folder(tmp_path):
    folder = write_folder(tmp_path / "ckpt", shards=2)
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    write_json(index, document)
    assert refusal(folder, UnsafeCheckpointError) == (
        "CKPT/model.safetensors.index.json: file name '../secret.safetensors' leaves the checkpoint's folder; "
        "it is refused"
    )


def test_shape_that_disagrees_with_the_config(tmp_path):
    assert refusal(edit(write_folder(tmp_path), intermediate_size=40), ConfigMismatchError) == (
        "CKPT/config.json: 3 problems:\n"
        "  [1] tensor 'model.layers.0.mlp.gate_proj.weight' (and 1 more) has shape [48, 32], config.json says [40, 32] "
        "(intermediate_size 40 by hidden_size 32)\n"
        "  [2] tensor 'model.layers.0.mlp.up_proj.weight' (and 1 more) has shape [48, 32], config.json says [40, 32] "
        "(intermediate_size 40 by hidden_size 32)\n"
        "  [3] tensor 'model.layers.0.mlp.down_proj.weight' (and 1 more) has shape [32, 48], config.json says [32, 40] "
        "(hidden_size 32 by intermediate_size 40)\n"
        "  → config.json and the weights do not belong to the same model"
    )


def test_weights_of_another_dtype_than_the_configs_are_read_as_they_are(tmp_path):
    checkpoint = open_checkpoint(write_folder(tmp_path, weights=tensors(CONFIG, np.float16)).as_posix())
    assert checkpoint.source.tensors["model.norm.weight"].dtype == np.float16
    assert checkpoint.notes == (
        "torch_dtype: 'bfloat16': tensor 'model.embed_tokens.weight' (and 19 more) is stored as float16, and is read "
        "as it is stored",
    )


def test_unknown_model_type(tmp_path):
    known = ", ".join(sorted(families_of_config_json("llama")))
    assert refusal(edit(write_folder(tmp_path), model_type="llamma"), UnknownModelError) == (
        f"CKPT/config.json: unknown model type 'llamma'; known model types: {known}\n"
        "  → the nearest known one is 'llama'"
    )


def test_unknown_rope_type(tmp_path):
    folder = edit(write_folder(tmp_path), rope_scaling={"rope_type": "yarm", "factor": 2.0})
    assert refusal(folder, CheckpointError) == (
        "CKPT/config.json: rope type 'yarm' is not one of default, linear, dynamic, llama3, yarn, longrope; "
        "did you mean 'yarn'?"
    )


def test_tokenizer_larger_than_the_vocabulary(tmp_path):
    config = CONFIG | {"vocab_size": 290}
    folder = write_folder(tmp_path, config=config)
    assert open_checkpoint(str(folder)).vocab_size == 290
    assert refusal(folder, ConfigMismatchError) == (
        "CKPT/config.json: tokenizer CKPT has 300 ids, the model's vocabulary 290: ids 290 to 299 have no embeddings\n"
        "  → use the tokenizer that belongs to the model"
    )


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_pickle_checkpoint(tmp_path, allow_pickle):
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    said = (
        "allow_pickle accepts the risk, but this project has no reader for them (it would need torch)"
        if allow_pickle
        else "reading them can run any code, so they are refused"
    )
    assert refusal(tmp_path, UnsafeCheckpointError, allow_pickle=allow_pickle) == (
        f"CKPT: its weights are pickle files (pytorch_model.bin); {said}\n"
        "  → convert it once, where torch is installed and the file is trusted: "
        'AutoModelForCausalLM.from_pretrained("…").save_pretrained("…", safe_serialization=True)'
    )


def test_unknown_fields_are_findings(tmp_path):
    opened = open_checkpoint(str(edit(write_folder(tmp_path), secret_sauce=7)))
    assert [str(finding) for finding in opened.findings] == [
        "secret_sauce: 7: not understood and ignored; the results will differ if it matters"
    ]


def test_alternatives_take_the_first_that_can_be_reached(tmp_path):
    folder = write_folder(tmp_path / "here")
    opened = open_checkpoint(f"{tmp_path}/absent | no-such-org/no-such-model | {folder}")
    assert str(opened.ref) == str(folder)
    absent, hub = opened.passed_over
    assert absent == f"{tmp_path}/absent: there is no such file or folder"
    assert hub == (
        "no-such-org/no-such-model: it is not in the Hub's local cache, and the Hub cannot be reached "
        "(HF_HUB_OFFLINE is set)"
    )
    with pytest.raises(MissingCheckpointFileError) as caught:
        open_checkpoint(f"{tmp_path}/a | {tmp_path}/b")
    assert str(caught.value) == (
        f"{tmp_path}/a | {tmp_path}/b: 2 problems:\n"
        f"  [1] {tmp_path}/a: there is no such file or folder\n  [2] {tmp_path}/b: there is no such file or folder"
    )
    # One that is there but broken is an error, not a reason to take another model.
    edit(folder, model_type="other")
    with pytest.raises(UnknownModelError):
        open_checkpoint(f"{folder} | {tmp_path}")


def test_a_byte_level_tokenizer_json_alone_is_no_model(tmp_path):
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert refusal(tmp_path / "tokenizer.json", CheckpointError).startswith("CKPT: a model is its whole folder")


def test_tied_heads_that_are_stored_twice(tmp_path):
    table = tensors()["model.embed_tokens.weight"]
    weights = tensors() | {"lm_head.weight": table.copy()}
    opened = open_checkpoint(str(write_folder(tmp_path, weights=weights)))
    assert opened.config.tie_word_embeddings and opened.notes == ()
    # One number of the last row: the head was trained by itself.
    weights["lm_head.weight"][-1, -1] += np.asarray(1, table.dtype)
    opened = open_checkpoint(str(write_folder(tmp_path, weights=weights)))
    assert not opened.config.tie_word_embeddings
    assert opened.notes == (
        "tie_word_embeddings: True: 'lm_head.weight' differs from 'model.embed_tokens.weight', so the output head is "
        "read as a matrix of its own",
    )


@pytest.mark.parametrize("shards", [1, 3])
def test_a_web_server_that_cannot_list_its_folders(tmp_path, shards):
    write_folder(tmp_path, shards=shards)
    with ObjectStore({f"models/tiny/{name}": path for name, path in files_of(tmp_path).items()}) as store:
        opened = open_checkpoint(f"{store.url}/models/tiny")
        assert opened.tokenizer().vocab_size == 300
        assert read_all(opened.source) == {name: array.tobytes() for name, array in tensors().items()}
        assert opened.source.bytes_read == opened.nbytes
        with pytest.raises(MissingCheckpointFileError, match=r"models/small: there is no config\.json"):
            open_checkpoint(f"{store.url}/models/small")


def test_a_protocol_without_its_package(monkeypatch):
    def refuse(path):
        raise ImportError("Please install gcsfs to access Google Storage")

    # The package may be installed, and imported by another test.
    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(ValueError, match=r"gs:// needs one more package: pip install gcsfs"):
        open_checkpoint("gs://bucket/model")
