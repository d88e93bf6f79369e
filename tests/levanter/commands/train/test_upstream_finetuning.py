"""Upstream's documents of fine-tuning, of both generations: together they have every key, and each of them runs.

The documents are those whose resolved form and migration `test_legacy_documents` keeps; here they train, as the command
that they are of does it, and what they ask to be saved is there. What is not here is refused by name.
"""

import importlib
import json
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers.finetuning_inputs import write_tiny
from helpers.legacy_documents import FOLDER, june_2026
from safetensors.numpy import load_file

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.train.dpo.config import ReferenceConfig
from levanter.config import plain
from levanter.models.adapters.config import LoraConfig
from levanter.upstream.migrate import config_class

OF = {
    "29_lora_lm_2025": "lora_lm",
    "30_new_lora_lm": "lora_lm",
    "31_sft": "sft",
    "32_sft_mixture": "sft_mixture",
    "33_new_train_dpo": "train_dpo",
    "34_new_train_dpo_lora": "train_dpo",
    "35_train_dpo_first": "train_dpo",
    "36_new_lora_dpo": "lora_dpo",
}
"""The documents, and whose they are."""
SAVED = {
    "29_lora_lm_2025": ("lora_lm_2025", ["merged/run/step-2", "peft/run/step-2"]),
    "30_new_lora_lm": ("lora_lm", ["merged/run/step-1", "merged/run/step-2", "peft/run/step-1", "peft/run/step-2"]),
    "31_sft": ("sft", ["hf/run/step-1", "hf/run/step-2"]),
    "32_sft_mixture": ("sft_mixture", ["hf/run/step-2"]),
    "33_new_train_dpo": ("train_dpo", ["hf/run/step-2"]),
    "34_new_train_dpo_lora": ("train_dpo_lora", ["merged/run/step-2", "peft/run/step-2"]),
    "35_train_dpo_first": ("train_dpo_first", []),
    "36_new_lora_dpo": ("lora_dpo", ["merged/run/step-2", "peft/run/step-2"]),
}
"""Document → its folder in `out`, and what is saved there."""
SFT_2025 = {
    "sft": "trainer model optimizer supervised_data initialize_from_hf hf_save_path hf_upload hf_save_steps "
    "max_seq_len model_name_or_path tokenizer dataset_type chat_train_urls messages_field input_role output_role "
    "data_seed epoch reinit_tokens reinit_lm_head reinit_embeddings",
    "sft_mixture": "trainer optimizer supervised_data mixture_weights mixture_block_size stop_strategy "
    "initialize_from_hf hf_save_path hf_upload hf_save_steps max_seq_len model_name_or_path tokenizer dataset_type "
    "messages_field input_role output_role data_seed reinit_tokens",
}
BLOCKS = {
    ("lora_lm", "lora"): june_2026()["entry_points"]["lora_lm.lora"],
    ("train_dpo", "adapter"): [*june_2026()["entry_points"]["lora_lm.lora"], "type"],
    ("train_dpo", "reference"): ["type", "model_path", "is_hf"],
    ("train_dpo", "reference_eval_cache"): ["mode", "cache_dir"],
}


def document(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "finetuning" / f"{name}.yaml").read_text())


def written(entry_point: str) -> list[dict[str, Any]]:
    return [document(name) for name, of in OF.items() if of == entry_point]


@pytest.mark.parametrize("entry_point", sorted(set(OF.values())))
def test_the_documents_have_every_key(entry_point: str):
    expected = june_2026()["entry_points"].get(entry_point) or SFT_2025[entry_point].split()
    if entry_point == "lora_lm":
        expected = [*expected, "max_train_length"]
    if entry_point == "train_dpo":
        expected = [*expected, "reference_model_path", "reference_is_hf"]
    documents = written(entry_point)
    assert set(expected) == {key for each in documents for key in each}
    for (of, block), keys in BLOCKS.items():
        if of == entry_point:
            assert set(keys) == {key for each in documents for key in each.get(block, {})}, block
    if entry_point == "train_dpo":
        formats = [one["format"] for each in documents for one in each["data"]["components"].values()]
        assert {key for each in formats for key in each} == {*june_2026()["formats"]["preference_chat"], "type"}


def default_of(cls: Any, name: str) -> Any:
    (field,) = (field for field in fields(cls) if field.name == name)
    if field.default is not MISSING:
        return field.default
    return "(required)" if field.default_factory is MISSING else field.default_factory()


def shown(value: Any) -> Any:
    """A default as the golden file has it: blocks by their keys and their type's name in documents."""
    if isinstance(value, LoraConfig):
        return {key: plain(value)[key] for key in june_2026()["entry_points"]["lora_lm.lora"]}
    if isinstance(value, ReferenceConfig):
        return {"type": value.get_choice_name(type(value)), **{f.name: getattr(value, f.name) for f in fields(value)}}
    return {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else value


OTHERWISE = {
    ("lora_dpo", "initialize_from_hf"): ("", "(required)"),
    ("train_dpo", "adapter"): ({"type": "none"}, None),
    ("train_dpo", "hf_upload"): (False, "(not a key: refused where it asks for something)"),
    ("train_dpo", "peft_hf_upload"): (False, None),
    ("lora_dpo", "peft_hf_upload"): (False, None),
}
"""Defaults that are written otherwise here and mean the same: upstream's, and ours."""


@pytest.mark.parametrize("entry_point", ["lora_lm", "train_dpo", "lora_dpo"])
def test_defaults_are_upstreams(entry_point: str):
    cls = config_class(entry_point)
    for key, theirs in june_2026()["defaults"][entry_point].items():
        expected, ours = OTHERWISE.get((entry_point, key), (theirs, theirs))
        assert theirs == expected, key
        if key != "hf_upload":
            assert shown(default_of(cls, key)) == ours, key


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("upstream"))


def run(entry_point: str, path: Path, *words: str) -> int:
    module = importlib.import_module(f"levanter.main.{entry_point}")
    return run_entry_point(config_class(entry_point), module.main, ["--config_path", str(path), *words])


FAST = {"29_lora_lm_2025", "31_sft"}
"""The others are slow; runs of `train_dpo` and on mixtures of conversations are in other tests too."""


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in OF])
def test_a_document_runs(name: str, tiny: Path, monkeypatch, capsys):
    monkeypatch.chdir(tiny.parent)
    assert run(OF[name], FOLDER / "finetuning" / f"{name}.yaml") == 0
    assert "done after 2 of 2 steps" in capsys.readouterr().out
    folder, expected = SAVED[name]
    out = tiny / "out" / folder
    saved = [path for kind in ("hf", "merged", "peft") for path in out.glob(f"{kind}/run/step-*")]
    assert sorted(str(path.relative_to(out)) for path in saved) == expected
    assert (out / "checkpoints" / "run" / "step-2").is_dir()
    base = load_file(tiny / "model" / "model.safetensors")
    for path in saved:
        if "peft" in path.parts:
            found = load_file(path / "adapter_model.safetensors")
            assert all(np.isfinite(x).all() and x.any() for x in found.values())
            asked = document(name).get("lora", document(name).get("adapter"))
            assert json.loads((path / "adapter_config.json").read_text())["r"] == asked["r"]
        elif path.name == "step-2":
            moved = load_file(path / "model.safetensors")
            assert moved.keys() == base.keys() and any((moved[key] != base[key]).any() for key in base)


REFUSED = [
    ("30_new_lora_lm", ("--peft_hf_upload", "acme/x"), "peft_hf_upload: uploading is not supported"),
    ("30_new_lora_lm", ("--merged_hf_upload", "acme/x"), "merged_hf_upload: uploading is not supported"),
    ("36_new_lora_dpo", ("--peft_hf_upload", "true"), "peft_hf_upload: uploading is not supported"),
    ("33_new_train_dpo", ("--hf_upload", "acme/x"), "hf_upload: exports are written but not uploaded"),
    ("31_sft", ("--hf_upload", "acme/x"), "hf_upload: exports are written but not uploaded"),
    (
        "33_new_train_dpo",
        ("--data.components.pairs.format.pack", "true"),
        "pack: true: several pairs to a row are not implemented yet; set it to false",
    ),
]


@pytest.mark.parametrize(("name", "words", "expected"), REFUSED)
def test_what_is_not_here_is_refused_by_name(name, words, expected, tiny, monkeypatch, capsys):
    monkeypatch.chdir(tiny.parent)
    assert run(OF[name], FOLDER / "finetuning" / f"{name}.yaml", *words) == 2
    assert expected in capsys.readouterr().err
