"""What is known of a model whose checkpoint is not here, and that a broken one is not mistaken for an absent one."""

# pyright: reportAttributeAccessIssue=false, reportOptionalSubscript=false, reportArgumentType=false

import json

import numpy as np
import pytest
from helpers.hf_folder import CONFIG, write_folder
from helpers.hf_folder import tensors as tensors_as_transformers_writes_them

from haliax_ext.abstract import abstract, cast, leaves
from haliax_ext.abstract_source import ExpectedSource
from levanter.commands.evaluate.eval_lm import EvalLmConfig
from levanter.commands.model.source import (
    ModelBlock,
    UnknownArchitectureError,
    find_tokenizer,
    resolve_source,
    vocabulary,
)
from levanter.compat.hf.errors import CheckpointError, ConfigMismatchError, MissingCheckpointFileError
from levanter.compat.open import open_checkpoint
from levanter.config import read

pytestmark = pytest.mark.quick

BLOCK = "{type: llama, hidden_dim: 32, intermediate_dim: 48, num_layers: 2, num_heads: 4, num_kv_heads: 2}"


def block(text: str) -> ModelBlock:
    overrides = [("hf_checkpoint", "x"), ("model", text)]
    loaded = read(EvalLmConfig, overrides=overrides)
    found = ModelBlock.of(loaded.config.model, loaded.written)
    assert found is not None
    return found


@pytest.fixture
def config_only(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_config_json_says_what_the_model_looks_like(config_only):
    origin = resolve_source(str(config_only), None)
    assert origin.checkpoint is None
    assert (origin.architecture.vocab_size, origin.stored.name) == (320, "bfloat16")
    (absent,) = [check for check in origin.checks if check.status == "unchecked"]
    assert absent.name == "weights" and "bfloat16" in absent.message
    assert isinstance(absent.error, MissingCheckpointFileError)


def test_what_is_expected_is_what_transformers_writes(config_only):
    import haliax as hax
    import jax

    config = resolve_source(str(config_only), None).architecture
    Vocab = hax.Axis("vocab", 320)
    module = cast(abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0))), np.dtype("float32"))
    found = ExpectedSource.of(config.weight_rules(Vocab), leaves(module), dtype=np.dtype("float16"))
    real = tensors_as_transformers_writes_them()
    assert {name: info.shape for name, info in found.tensors.items()} == {n: t.shape for n, t in real.items()}
    assert all(info.nbytes == 2 * info.size for info in found.tensors.values())


def test_the_block_is_enough_where_it_is_complete():
    origin = resolve_source("nobody/nothing", block(BLOCK))
    assert origin.checkpoint is None and origin.architecture.num_layers == 2  # pyright: ignore
    with pytest.raises(UnknownArchitectureError, match="model: does not set num_heads, num_kv_heads") as caught:
        resolve_source("nobody/nothing", block("{type: llama, hidden_dim: 64, intermediate_dim: 8, num_layers: 2}"))
    assert "nobody/nothing" in str(caught.value)
    with pytest.raises(UnknownArchitectureError, match="there is no model: block"):
        resolve_source("nobody/nothing", None)


@pytest.mark.parametrize(
    ("text", "mlp", "kv_heads"),
    [
        # A GPT-2's feed-forward part is four times as wide as its stream, and every head has its own keys and values.
        ("{type: gpt2, hidden_dim: 64, num_layers: 2, num_heads: 4}", 256, 4),
        ("{type: gpt_neox, hidden_dim: 64, intermediate_dim: 100, num_layers: 2, num_heads: 4}", 100, 4),
    ],
)
def test_sizes_that_follow_from_others_need_not_be_written(text, mlp, kv_heads):
    architecture = resolve_source("nobody/nothing", block(text)).architecture
    assert (architecture.Mlp.size, architecture.KVHead.size) == (mlp, kv_heads)
    with pytest.raises(UnknownArchitectureError, match=r"model: does not set num_layers\n"):
        resolve_source("nobody/nothing", block(text.replace(", num_layers: 2", "")))


def test_the_block_must_agree_with_config_json(config_only):
    with pytest.raises(ConfigMismatchError, match=r"model\.num_layers is 2.*|num_layers"):
        resolve_source(str(config_only), block(BLOCK.replace("num_layers: 2", "num_layers: 3")))
    free = resolve_source(str(config_only), block("{type: llama, max_seq_len: 16}"))
    assert free.architecture.max_seq_len == 16


def test_a_checkpoint_with_a_hole_is_broken(tmp_path):
    write_folder(tmp_path)
    whole = open_checkpoint(str(tmp_path))
    names = {name: "model-00001-of-00002.safetensors" for name in whole.source.tensors}
    names["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        resolve_source(str(tmp_path), block(BLOCK))


def test_where_the_size_of_the_vocabulary_comes_from(config_only):
    model = block(BLOCK).config
    origin = resolve_source(str(config_only), None)
    assert vocabulary(origin.architecture, tokenizer=None, names=("gpt2",)) == (320, "as configured")
    given = block(BLOCK.replace("}", ", vocab_size: 99}")).config
    assert vocabulary(given, tokenizer=None, names=("gpt2",))[0] == 99
    tokenizer, check = find_tokenizer("passthrough", origin=None, size=77)
    assert check.status == "ok"
    assert vocabulary(model, tokenizer=tokenizer, names=("gpt2",))[0] == 77
    assert vocabulary(model, tokenizer=None, names=(None, "gpt2")) == (50257, "the known size of gpt2")
    with pytest.raises(ValueError, match=r"nobody/nothing\)\n  → set model\.vocab_size"):
        vocabulary(model, tokenizer=None, names=("nobody/nothing",))


def test_a_tokenizer_without_its_weights(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    origin = resolve_source(str(tmp_path), None)
    tokenizer, check = find_tokenizer(None, origin=origin, size=origin.architecture.vocab_size)
    assert check.status == "ok" and tokenizer is not None
    with pytest.raises(ConfigMismatchError, match="have no embeddings"):
        find_tokenizer(None, origin=origin, size=tokenizer.vocab_size - 1)
    absent, check = find_tokenizer("nobody/nothing", origin=origin, size=None)
    assert absent is None and check.status == "unchecked" and isinstance(check.error, CheckpointError)


def test_a_well_known_checkpoint_is_planned_without_a_network():
    """The block must agree with it, as it must with a config.json that is read."""
    origin = resolve_source("Qwen/Qwen2.5-0.5B", None)
    assert origin.checkpoint is None and (origin.architecture.hidden_dim, origin.architecture.vocab_size) == (
        896,
        151936,
    )
    (absent,) = [check for check in origin.checks if check.status == "unchecked"]
    assert absent.name == "weights"
    assert origin.checks[0].message == "the known config.json of Qwen/Qwen2.5-0.5B (qwen2)"
    longer = resolve_source("Qwen/Qwen2.5-0.5B", block("{type: qwen, max_seq_len: 16}"))
    assert longer.architecture.max_seq_len == 16
    wrong = block("{type: qwen, hidden_dim: 1024}")
    with pytest.raises(ConfigMismatchError, match=r"hidden_dim is 1024, the known config\.json of .* says 896"):
        resolve_source("Qwen/Qwen2.5-0.5B", wrong)
    yielding = resolve_source("Qwen/Qwen2.5-0.5B", wrong, block_yields=True)
    assert yielding.architecture.hidden_dim == 896
    assert any("the checkpoint's architecture is used instead" in check.message for check in yielding.checks)
