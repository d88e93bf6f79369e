"""What is not here yet: read, checked, migrated, and refused by name with exit code 2 when it is run."""

import os
import subprocess
import sys

import pytest
from helpers.legacy_documents import FOLDER

from levanter.config import parse
from levanter.main.absent import ABSENT, run_absent
from levanter.main.migrate import config_class
from levanter.main.train_lm import TrainLmConfig, describe
from levanter.models.absent import FAMILIES, AbsentFamilyError, AbsentModelConfig
from levanter.models.registry import LmConfig
from levanter.optim.absent import AbsentOptimizerConfig, AbsentOptimizerError
from levanter.optim.config import OptimizerConfig
from levanter.run import Target

CPU = Target(name="local", platform="cpu", kind="cpu", devices=8)
DOCUMENTS = {
    "sample_lm": "sampler/20_sample_llama8b.yaml",
    "eval_harness": "harness/21_eval_llama3.yaml",
    "sft_mixture": "22_sft_llama3_mixture.yaml",
    "train_dpo": "26_new_lora_dpo_tp4.yaml",
}


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_a_sound_document_is_read_and_refused_by_name(name: str, capsys):
    assert run_absent(name, ["--config_path", str(FOLDER / DOCUMENTS[name])]) == 2
    said = capsys.readouterr().err
    assert f"levanter.main.{name} is not here yet ({ABSENT[name].what})" in said
    assert f"today: {ABSENT[name].instead}" in said


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_help_and_misspelt_keys(name: str, capsys):
    assert run_absent(name, ["--help"]) == 0
    assert "--trainer." in capsys.readouterr().out or name == "export_hf_to_lm"
    assert run_absent(name, ["--config_path", os.devnull, "--dta.tokenizer", "x"]) == 2
    assert "dta: unknown key" in capsys.readouterr().err
    assert config_class(name) is ABSENT[name].config


@pytest.mark.slow
def test_a_module_is_one_call(tmp_path):
    """As a user starts it, with old keys in it."""
    path = tmp_path / "lora.yaml"
    path.write_text(
        "data: {tokenizer: passthrough, vocab_size: 8, train_urls: [a.jsonl]}\n"
        "initialize_from_hf: acme/llama\nmax_train_length: 64\ntrainer: {wandb: {project: p}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "levanter.main.lora_lm", "--config_path", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 2
    assert "max_train_length: 64 → train_seq_len: 64" in done.stderr
    assert "error: levanter.main.lora_lm is not here yet (fine-tuning with low-rank adapters)" in done.stderr
    assert "Traceback" not in done.stderr


def absent_families() -> list[str]:
    return [name for name, cls in LmConfig.get_known_choices().items() if issubclass(cls, AbsentModelConfig)]


def test_absent_families_are_refused_by_name_at_run_time():
    config = parse(TrainLmConfig, paths=[str(FOLDER / "07_gpt2_hyena_nano.yaml")])
    with pytest.raises(AbsentFamilyError, match=r"model\.type: gpt2_hyena is a family of upstream's .* llama"):
        describe(config, CPU)
    for name in absent_families():
        with pytest.raises(AbsentFamilyError, match=f"model.type: {name} "):
            LmConfig.get_known_choices()[name]().for_platform("cpu", compute_dtype="float32")
    assert set(absent_families()) <= set(FAMILIES)


def test_absent_optimizers_are_refused_by_name_at_run_time():
    overrides = {"model": {"type": "llama", "hidden_dim": 32, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2}}
    data = {"data": {"tokenizer": "passthrough", "vocab_size": 64}}
    config = parse(TrainLmConfig, overrides={**overrides, **data, "optimizer": {"type": "sophia-h", "gamma": 0.01}})
    assert isinstance(config.optimizer, AbsentOptimizerConfig)
    with pytest.raises(AbsentOptimizerError, match=r"optimizer\.type: sophia-h is an optimizer of upstream's .* adam"):
        describe(config, CPU)
    for name, cls in OptimizerConfig.get_known_choices().items():
        if issubclass(cls, AbsentOptimizerConfig):
            with pytest.raises(AbsentOptimizerError, match=f"optimizer.type: {name} "):
                cls().build(10)


def test_several_books_are_another_name_of_what_is_here(capsys):
    from levanter.config import HelpRequested, load
    from levanter.main import eval_careless_lm, eval_sliding_total

    assert eval_sliding_total.main is eval_careless_lm.main
    assert eval_sliding_total.describe is eval_careless_lm.describe
    cls = eval_sliding_total.EvalCarelessLmConfig
    config = parse(cls, paths=[str(FOLDER / "books/24_eval_sliding_total_8b.yaml")])
    assert list(config.books) == ["first", "second"]
    with pytest.raises(HelpRequested):
        load(cls, ["--help"])
