"""A YaRN stage: from a checkpoint's context to a longer one; transformers reads its export, with the same logits."""

import json
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from helpers.hf_folder import CONFIG, tensors, write_folder
from helpers.llama_on_mesh import abstract_model, named_arrays

from haliax_ext.abstract import with_arrays
from levanter.commands.cli.errors import run_entry_point
from levanter.commands.model.context_stage import StageError
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe, train
from levanter.compat.open import open_checkpoint
from levanter.config import load_written
from levanter.layers.rotary import YarnRotaryConfig
from levanter.models import LlamaConfig
from levanter.runplan import Target

LOCAL = Target(name="local", platform="cpu", kind="cpu", devices=8)
ORIGINAL, LONG = 48, 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stages") / "model"
    config = {**CONFIG, "max_position_embeddings": ORIGINAL, "rope_theta": 5000.0}
    write_folder(folder, config=config, weights=small(config))
    return folder


def small(config: dict) -> dict:
    """As transformers' own random weights: logits that f32 holds to five digits."""
    return {
        name: each if "norm" in name else (0.2 * each.astype(np.float32)).astype(each.dtype)
        for name, each in tensors(config).items()
    }


def document(folder: Path, out: Path, **model) -> dict:
    return {
        "data": {
            "tokenizer": str(folder),
            "cache_dir": None,
            "components": {"t": {"type": "direct", "datasets": {"train": ["the cat sat on the mat " * 200]}}},
        },
        "initialize_from_hf": str(folder),
        "hf_save_path": str(out / "hf"),
        "model": {
            "type": "llama",
            "max_seq_len": LONG,
            "hidden_dim": CONFIG["hidden_size"],
            "intermediate_dim": CONFIG["intermediate_size"],
            "num_layers": CONFIG["num_hidden_layers"],
            "num_heads": CONFIG["num_attention_heads"],
            "num_kv_heads": CONFIG["num_key_value_heads"],
            "tie_word_embeddings": True,
            "rope": {"type": "yarn", "factor": LONG / ORIGINAL, "original_max_position_embeddings": ORIGINAL},
            **model,
        },
        "trainer": {
            "id": "stage",
            "mp": "f32",
            "tracker": [],
            "num_train_steps": 1,
            "train_batch_size": 8,
            "log_dir": str(out / "logs"),
            "checkpointer": {"base_path": str(out / "checkpoints"), "keep": []},
        },
    }


def planned(folder: Path, out: Path, change=lambda _: None, **model):
    given = document(folder, out, **model)
    change(given)
    path = out / "stage.yaml"
    path.write_text(json.dumps(given))
    loaded = load_written(TrainLmConfig, ["--config_path", str(path)])
    return describe(loaded.config, LOCAL, written=loaded.written)


@pytest.mark.slow
def test_a_stage_s_export_has_the_same_logits_in_transformers(folder, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "stage.yaml"
    path.write_text(json.dumps(document(folder, tmp_path)))
    assert (
        run_entry_point(
            TrainLmConfig, lambda config: 0 if train(config).taken == 1 else 1, ["--config_path", str(path)]
        )
        == 0
    )
    (export,) = (tmp_path / "hf" / "stage").glob("step-*")
    said = json.loads((export / "config.json").read_text())
    expected = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": ORIGINAL}
    assert said["max_position_embeddings"] == LONG and said["rope_theta"] == 5000.0
    for block in (said["rope_parameters"], said["rope_scaling"]):
        assert expected.items() <= block.items()
    model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    opened = open_checkpoint(str(export))
    assert isinstance(opened.config, LlamaConfig)
    expected_rope = YarnRotaryConfig(theta=5000.0, factor=2.0, original_max_position_embeddings=ORIGINAL)
    assert opened.config.rope == expected_rope
    # Twice the original context, all of it.
    ids = np.random.default_rng(0).integers(3, 250, (2, LONG))
    with torch.no_grad():
        theirs = model(torch.from_numpy(ids)).logits.numpy()
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        before = plain(torch.from_numpy(ids)).logits.numpy()
    ours = logits(opened, export, ids)
    np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=0)
    assert np.abs(theirs - before).max() > 2e-3, "the stretch must be seen"


def logits(opened, folder: Path, ids: np.ndarray) -> np.ndarray:
    """What a loaded model says."""
    config = opened.config
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    arrays = named_arrays(config, weights, vocab=config.vocab_size)
    model = with_arrays(abstract_model(config, config.vocab_size), {k: jnp.asarray(v) for k, v in arrays.items()})
    tokens = hax.named(ids.astype(np.int32), ("batch", "position"))

    @jax.jit
    def run(model, tokens):
        return model.head(model(tokens).activations)

    return np.asarray(run(model, tokens).rearrange(("batch", "position", "vocab")).array)


def test_what_a_stage_says(folder, tmp_path):
    plan = planned(folder, tmp_path)
    (said,) = [check.message for check in plan.checks if check.name == "stage"]
    assert said == "rotary embeddings are stretched by 2, from 48 tokens to 96 (YaRN)" and not plan.errors
    # What is not written follows from the checkpoint.
    plan = planned(folder, tmp_path, rope={"type": "yarn", "factor": 1.5})
    _, note = [check.message for check in plan.checks if check.name == "stage"]
    assert "rows of 96 tokens are longer than these 72; factor 2 reaches them" in note


def test_rows_beyond_the_context_without_a_stretch(folder, tmp_path):
    plan = planned(folder, tmp_path, rope={"type": "default", "theta": 5000.0})
    (said,) = [check for check in plan.checks if check.name == "context"]
    assert said.status == "note" and "longer than the 48 that the rotary embeddings of" in said.message
    assert "model.rope: {type: yarn, factor: 2} does" in said.message
    short = planned(folder, tmp_path, rope={"type": "default", "theta": 5000.0}, max_seq_len=ORIGINAL)
    assert not [check for check in short.checks if check.name in ("context", "stage")]


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"theta": 10000.0}, "model.rope.theta is 10000.0, the checkpoint's is 5000.0"),
        ({"original_max_position_embeddings": 64}, "original_max_position_embeddings is 64, the checkpoint's is 48"),
        ({"original_max_position_embeddings": 64, "theta": 2.0}, "leave them out: they are the checkpoint's"),
    ],
)
def test_a_stretch_of_another_model_is_refused(folder, tmp_path, rope, said):
    with pytest.raises(StageError, match=said.replace(".", r"\.")):
        planned(folder, tmp_path, rope={"type": "yarn", "factor": 2.0, **rope})


def test_adapters_cannot_say_that_a_context_was_stretched(folder, tmp_path):
    def adapted(given: dict) -> None:
        del given["hf_save_path"]
        given["adapter"] = {"type": "lora", "r": 2}

    with pytest.raises(StageError, match="adapter files do not record"):
        planned(folder, tmp_path, adapted)


def test_a_second_stage_counts_from_the_original_context(folder, tmp_path):
    config = {**CONFIG, "max_position_embeddings": LONG, "rope_theta": 5000.0}
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": ORIGINAL}
    write_folder(tmp_path / "second", config=config, weights=tensors(config))
    plan = planned(tmp_path / "second", tmp_path, rope={"type": "yarn", "factor": 4.0}, max_seq_len=192)
    (said,) = [check.message for check in plan.checks if check.name == "stage"]
    assert said == "rotary embeddings are stretched by 4, from 48 tokens to 192 (YaRN)"
    model = plan.work.model
    assert isinstance(model, LlamaConfig) and model.rope == YarnRotaryConfig(
        theta=5000.0, factor=4.0, original_max_position_embeddings=ORIGINAL
    )
