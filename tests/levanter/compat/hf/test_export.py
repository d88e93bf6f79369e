"""Exports read by `transformers`: every key, every logit, every byte back."""

import dataclasses
import json

import haliax as hax
import jax
import numpy as np
import pytest
import torch
import transformers
from helpers.hf_folder import byte_level_tokenizer, write_folder
from helpers.llama_on_mesh import VOCAB, abstract_model, mappings_for, random_arrays, tiny_config
from jax.sharding import NamedSharding
from safetensors.numpy import load_file

from haliax_ext.abstract import leaves, with_arrays
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from levanter.compat.hf.export import ExportExtras, ExportPathError, export
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.compat.open import open_checkpoint

MESHES = [MeshSpec.of(data=1), MeshSpec.of(data=2, model=4), MeshSpec.of(data=2, model=2, group=2)]


def placed(config, values, mesh: MeshSpec, vocab: int = VOCAB):
    """The model with its arrays in their shards on a mesh of CPU devices."""
    module = abstract_model(config, vocab)
    heads = tuple(axis for axis in ("model", "group") if mesh.shape.get(axis, 1) > 1)
    if not heads:
        return with_arrays(module, {path: jax.numpy.asarray(x) for path, x in values.items()})
    plan = plan_sharding(leaves(module), mappings_for(config, mesh, heads=heads), mesh).check()
    devices = mesh.build(jax.devices()[: mesh.size])
    put = {p: jax.device_put(x, NamedSharding(devices, plan.spec(p))) for p, x in values.items()}
    return with_arrays(module, put)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "num_kv_heads": 4},
        {"attention_bias": True, "mlp_bias": True, "num_kv_heads": 4},
    ],
    ids=["grouped", "tied", "biases"],
)
def test_transformers_computes_the_same(tmp_path, mesh, changes):
    config = tiny_config(**{"num_kv_heads": 4, **changes})
    model = placed(config, random_arrays(config), mesh)
    folder = export(model, config, tmp_path / "out", max_shard_bytes=60_000)
    theirs, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = np.random.default_rng(1).integers(0, VOCAB, (2, 40))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids)).logits.numpy()
    alone = placed(config, random_arrays(config), MESHES[0])
    x = alone(hax.named(jax.numpy.asarray(ids, jax.numpy.int32), ("batch", "position"))).activations
    with jax.default_matmul_precision("highest"):
        logits = alone.head(x).array
    np.testing.assert_allclose(logits, expected, atol=2e-4)


def test_what_is_read_and_written_again_is_the_same_bytes(tmp_path):
    first = write_folder(tmp_path / "first", shards=3)
    checkpoint = open_checkpoint(str(first))
    config = checkpoint.config
    rules = config.weight_rules()
    module = abstract_model(config, checkpoint.vocab_size)
    values = {}
    for leaf in leaves(module):
        (match,) = [m for m in rules.match(leaves(module), checkpoint.source.tensors) if m.leaf.path == leaf.path]
        parts = [checkpoint.source.read(n, tuple(slice(0, s) for s in match.layout.source_shape)) for n in match.names]
        order = [*match.rule.stacked, *(name for group in match.rule.axes for name in group)]
        sizes = dict(leaf.axes)
        array = np.stack(parts) if match.rule.stacked else parts[0]
        array = array.reshape([sizes[n] for n in order]).transpose([order.index(n) for n in leaf.names])
        values[leaf.path] = jax.numpy.asarray(array)
    model = with_arrays(module, values)
    tokenizer = checkpoint.tokenizer()
    second = export(model, config, tmp_path / "second", extras=ExportExtras(tokenizer=tokenizer))
    mine = load_file(second / "model.safetensors")
    for file in first.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert mine.pop(name).tobytes() == tensor.tobytes(), name
    assert not mine
    again = open_checkpoint(str(second))
    # The head's size is written out.
    assert again.config == dataclasses.replace(config, head_dim=8)
    assert again.tokenizer().hash == tokenizer.hash
    theirs = transformers.AutoTokenizer.from_pretrained(second)
    text = "the cat sat on the mat, didn't it?"
    assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode_batch([text])[0].tolist()
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 0)


def test_rows_that_only_pad_are_left_out(tmp_path):
    config = tiny_config(vocab_size=250)
    values = random_arrays(config, vocab=256)
    model = placed(
        config, values, MESHES[1] if config.KVHead.size % 4 == 0 else MeshSpec.of(data=4, model=2), vocab=256
    )
    folder = export(model, config, tmp_path / "out", dtype="bfloat16")
    found = load_file(folder / "model.safetensors")
    assert found["model.embed_tokens.weight"].shape == (250, config.hidden_dim)
    expected = values["lm_head.weight"][:250].astype(found["lm_head.weight"].dtype)
    assert found["lm_head.weight"].tobytes() == expected.tobytes()
    document = json.loads((folder / "config.json").read_text())
    assert (document["vocab_size"], document["dtype"]) == (250, "bfloat16")


def test_a_taken_place_is_refused_and_a_failed_export_leaves_no_half(tmp_path, monkeypatch):
    config = tiny_config()
    model = placed(config, random_arrays(config), MESHES[0])
    told = []
    folder = export(model, config, tmp_path / "out", progress=lambda *at: told.append(at))
    assert told[-1][0] == told[-1][1] > 0
    with pytest.raises(ExportPathError, match=r"out: it exists already\n  → choose another folder"):
        export(model, config, folder)
    before = (folder / "model.safetensors").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("levanter.compat.hf.export._write_extras", full)
    with pytest.raises(OSError, match="No space left"):
        export(model, config, folder, overwrite=True)
    assert (folder / "model.safetensors").read_bytes() == before
    monkeypatch.undo()
    # The remains of the failed one do not stand in the way.
    tokenizer = FastTokenizer(json.loads(byte_level_tokenizer().to_str()), name="bytes", eos_id=2)
    export(model, config, folder, overwrite=True, extras=ExportExtras(tokenizer=tokenizer))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert (folder / "tokenizer.json").is_file()


def test_what_a_killed_replacement_left_is_put_back(tmp_path):
    config = tiny_config()
    model = placed(config, random_arrays(config), MESHES[0])
    folder = export(model, config, tmp_path / "out", extras=ExportExtras(eos_ids=(2, 5)))
    assert transformers.GenerationConfig.from_pretrained(folder).eos_token_id == [2, 5]
    before = (folder / "model.safetensors").read_bytes()
    # Killed between its two renames: the old one has its other name, and the new one is not there yet.
    folder.rename(tmp_path / "out.replaced")
    with pytest.raises(ExportPathError):
        export(model, config, folder)
    assert (folder / "model.safetensors").read_bytes() == before
    # Killed behind both.
    (tmp_path / "out.replaced").mkdir()
    export(model, config, folder, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
