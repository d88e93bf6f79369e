"""Every broken checkpoint ends `eval_lm` with one clear error and exit code 2, before a weight is read."""

import json

import pytest
from helpers.hf_folder import CONFIG, byte_level_tokenizer, tensors, write_folder, write_json

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.evaluate.eval_lm import EvalLmConfig, main


def truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])


def corrupt_header(folder):
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 16 + file.read_bytes()[16:])


def index_outside(folder):
    (folder / "model.safetensors").unlink()
    names = list(tensors())
    write_json(folder / "model.safetensors.index.json", {"weight_map": dict.fromkeys(names, "../other.safetensors")})


def wrong_shape(folder):
    write_json(folder / "config.json", {**CONFIG, "intermediate_size": 64})


def unknown_type(folder):
    write_json(folder / "config.json", {**CONFIG, "model_type": "lama"})


def unknown_rope(folder):
    write_json(folder / "config.json", {**CONFIG, "rope_scaling": {"rope_type": "spiral", "factor": 2.0}})


def large_tokenizer(folder):
    definition = json.loads(byte_level_tokenizer().to_str())
    extra = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    definition["added_tokens"].append({"id": 5000, "content": "<far>", **extra})
    write_json(folder / "tokenizer.json", definition)


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncated, "model.safetensors"),
        (corrupt_header, "model.safetensors"),
        (index_outside, "../other.safetensors"),
        (wrong_shape, "mlp.gate_proj.weight"),
        (unknown_type, "lama"),
        (unknown_rope, "spiral"),
        (large_tokenizer, "5001"),
        (pickled, "pytorch_model.bin"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_clear_error(tmp_path, capsys, damage, words):
    folder = write_folder(tmp_path / "model")
    damage(folder)
    text = tmp_path / "text.txt"
    text.write_text("some text to score")
    words_given = ["--hf_checkpoint", str(folder), "--trainer.tracker.type", "noop"]
    words_given += ["--data.components", json.dumps({"t": {"source": {"validation_urls": [str(text)]}}})]
    assert run_entry_point(EvalLmConfig, main, words_given) == 2
    shown = capsys.readouterr().err
    assert shown.count("error: ") == 1
    assert words in shown
    assert "Traceback" not in shown
    assert "loading weights" not in shown
