"""`HFCheckpointConverter`: configs in and out, weights onto meshes, and what it refuses."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import hf_folder
from transformers import LlamaConfig as HfLlamaConfig

from haliax_ext.errors import ShardingError
from haliax_ext.meshspec import MeshSpec
from levanter.compat.hf.converter import HFCheckpointConverter
from levanter.compat.hf.errors import ConfigMismatchError, UnknownModelError
from levanter.compat.hf.export import ExportPathError
from levanter.compat.hf.tokenizer import as_transformers
from levanter.compat.open import load_tokenizer
from levanter.models import LlamaConfig, QwenConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hf_folder.write_folder(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def converter(folder):
    return HFCheckpointConverter.from_hf(str(folder))


def weight(model, name: str) -> np.ndarray:
    return np.asarray(getattr(model.transformer.layers.stacked.mlp, name).weight.array, np.float32)


def test_configs_cross_both_ways(converter, folder):
    config = converter.config_from_hf_checkpoint()
    assert isinstance(config, LlamaConfig) and converter.LevConfigClass is LlamaConfig
    assert (config.hidden_dim, config.num_kv_heads, config.vocab_size) == (32, 2, 320)
    theirs = converter.hf_config_from_config(config)
    assert isinstance(theirs, HfLlamaConfig)
    assert (theirs.hidden_size, theirs.num_key_value_heads, theirs.tie_word_embeddings) == (32, 2, True)
    assert converter.config_from_hf_config(hf_folder.CONFIG, {"max_seq_len": 16}).max_seq_len == 16
    wider = converter.with_config_overrides({"rope_theta": 5e5}).with_config_overrides({"rms_norm_eps": 1e-3})
    assert (wider.default_config.rope.theta, wider.default_config.layer_norm_epsilon) == (5e5, 1e-3)
    assert converter.default_config.rope.theta == 1e4
    assert wider.with_config_overrides({}, merge=False).default_config == converter.default_config


def test_parts_are_replaced_one_by_one(converter, folder):
    tokenizer = load_tokenizer(str(folder))
    other = converter.replaced(tokenizer=tokenizer, trust_remote_code=True)
    assert other.tokenizer is tokenizer and other.trust_remote_code and not converter.trust_remote_code
    assert other.reference_checkpoint == str(folder)
    assert converter.tokenizer.hash == tokenizer.hash
    assert converter.Vocab == hax.Axis("vocab", tokenizer.vocab_size)


def test_nothing_is_read_before_it_is_asked_for():
    unreachable = HFCheckpointConverter.of(LlamaConfig())
    assert unreachable.reference_checkpoint == "NousResearch/Llama-2-7b-hf"
    assert unreachable.replaced(reference_checkpoint="/nowhere").reference_checkpoint == "/nowhere"


def test_weights_arrive_whole_without_a_mesh_and_in_shards_on_one(converter, folder, devices):
    stored = hf_folder.tensors()
    alone = converter.load_pretrained()
    assert alone.transformer.norm.weight.array.dtype == jnp.bfloat16
    assert len(alone.transformer.norm.weight.array.devices()) == 1
    expected = np.stack([stored[f"model.layers.{n}.mlp.gate_proj.weight"].astype(np.float32) for n in range(2)])
    np.testing.assert_array_equal(weight(alone, "gate_proj"), expected)
    mesh = MeshSpec.of(data=4, model=2).build(devices)
    with jax.set_mesh(mesh):
        model = converter.load_pretrained(
            axis_mapping={"batch": "data", "embed": "data", "mlp": "model", "heads": "model"}, dtype="float32"
        )
        with hax.axis_mapping({"embed": ("data", "model")}):
            other = converter.load_pretrained()
    gate = model.transformer.layers.stacked.mlp.gate_proj.weight.array
    assert gate.dtype == jnp.float32 and gate.sharding.shard_shape(gate.shape) == (2, 24, 8)
    # `heads` reaches q, k and v: 2 KV heads over 2 devices.
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        each = getattr(model.transformer.layers.stacked.self_attn, name).weight.array
        assert np.prod(each.sharding.shard_shape(each.shape)) * 8 == each.size, name
    np.testing.assert_array_equal(weight(model, "gate_proj"), expected)
    table = other.embeddings.token_embeddings.weight.array
    assert table.sharding.shard_shape(table.shape) == (320, 4)


def test_tensors_by_their_own_names_are_spread_over_the_mesh(converter, folder, devices):
    stored = hf_folder.tensors()
    alone = converter.load_state_dict()
    assert set(alone) == set(stored)
    for name, value in alone.items():
        assert len(value.devices()) == 1 and value.dtype == stored[name].dtype, name
        np.testing.assert_array_equal(np.asarray(value, np.float32), stored[name].astype(np.float32))
    with jax.set_mesh(MeshSpec.of(data=4, model=2).build(devices)):
        spread = converter.load_state_dict(str(folder), dtype="float32")
    for name, value in spread.items():
        assert value.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(value), stored[name].astype(np.float32))
    embeddings = spread["model.embed_tokens.weight"]
    assert embeddings.sharding.shard_shape(embeddings.shape) != embeddings.shape


def test_a_tokenizer_of_transformers_serves_too(converter, folder):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="e")
    other = converter.replaced(tokenizer=theirs)
    assert len(other.tokenizer) == other.Vocab.size == len(theirs)
    assert other.tokenizer.eos_id == theirs.eos_token_id
    text = hf_folder.TEXTS[0]
    assert other.tokenizer.encode_batch([text])[0].tolist() == theirs.encode(text, add_special_tokens=False)
    back = as_transformers(other.tokenizer)
    assert isinstance(back, PreTrainedTokenizerFast)
    assert back(text, add_special_tokens=False)["input_ids"] == theirs.encode(text, add_special_tokens=False)
    with pytest.raises(TypeError, match="expected a transformers fast tokenizer, a name or a folder, got 3"):
        _ = converter.replaced(tokenizer=3).tokenizer


def test_what_is_saved_is_what_was_loaded(converter, folder, tmp_path):
    model = converter.load_pretrained()
    converter.save_pretrained(model, tmp_path / "out", dtype="float32")
    again = HFCheckpointConverter.from_hf(str(tmp_path / "out"))
    assert again.config_from_hf_checkpoint().axes == model.config.axes
    assert again.tokenizer.vocab_size == converter.tokenizer.vocab_size
    np.testing.assert_array_equal(weight(again.load_pretrained(), "up_proj"), weight(model, "up_proj"))
    with pytest.raises(ExportPathError, match="exists already"):
        converter.save_pretrained(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda c: HFCheckpointConverter().load_pretrained(), ValueError, "no checkpoint is given"),
        (lambda c: HFCheckpointConverter(feature_extractor="x"), ValueError, "feature_extractor"),
        (lambda c: c.replaced(feature_extractor="x"), ValueError, "feature_extractor"),
        (
            lambda c: HFCheckpointConverter(QwenConfig, c.reference_checkpoint).load_pretrained(),
            ValueError,
            "is a LlamaConfig, but the converter is for QwenConfig",
        ),
        (
            lambda c: c.load_pretrained(resize_vocab_to_match_tokenizer=True),
            ValueError,
            "has 320 rows; leave it out",
        ),
        (lambda c: c.load_pretrained(config=LlamaConfig(num_layers=3)), ConfigMismatchError, "model.num_layers is 3"),
        (lambda c: c.save_pretrained(None, "x", upload_to_hf=True), ValueError, "upload_to_hf: not supported"),
        (lambda c: c.config_from_hf_config({"model_type": "lama"}), UnknownModelError, "'llama'"),
    ],
)
def test_what_is_refused_is_said(converter, call, error, said: str):
    with pytest.raises(error, match=said):
        call(converter)


def test_a_mapping_that_does_not_fit_is_refused(converter, devices):
    with jax.set_mesh(MeshSpec.of(data=1, model=8).build(devices)):
        with pytest.raises(ShardingError, match=r"embd.*did you mean.*embed"):
            converter.load_pretrained(axis_mapping={"embd": "data"})
        with pytest.raises(ShardingError, match=r"heads"):
            converter.load_pretrained(axis_mapping={"heads": "model"})
