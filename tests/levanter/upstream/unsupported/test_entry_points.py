"""What is not implemented yet: read, checked, migrated, and refused by name with exit code 2 when it is run."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.legacy_documents import FOLDER

import levanter
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.config import parse
from levanter.models.registry import LmConfig
from levanter.models.unsupported import FAMILIES, AbsentFamilyError, AbsentModelConfig
from levanter.optim.config import OptimizerConfig
from levanter.optim.unsupported import AbsentOptimizerConfig, AbsentOptimizerError
from levanter.runplan import Target
from levanter.upstream.migrate import config_class
from levanter.upstream.unsupported.entry_points import ABSENT
from levanter.upstream.unsupported.refusal import run_absent

pytestmark = pytest.mark.quick

CPU = Target(name="local", platform="cpu", kind="cpu", devices=8)


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_help_and_misspelt_keys(name: str, capsys):
    assert run_absent(name, ["--help"]) == 0
    assert "--trainer." in capsys.readouterr().out or name == "export_hf_to_lm"
    assert run_absent(name, ["--config_path", os.devnull, "--dta.tokenizer", "x"]) == 2
    assert "dta: unknown key" in capsys.readouterr().err
    assert config_class(name) is ABSENT[name].config


AS_USERS_HAVE_THEM = {
    "export_hf_to_lm": "hf_checkpoint: acme/llama@v1\noutput_path: gs://acme/out\nmodel: {type: llama, seq_len: 64}\n",
    "train_asr": "data: {id: acme/speech}\nbatch_size: 8\nmodel: {type: whisper}\n",
}


def test_every_absent_entry_point_has_a_document_here():
    assert set(AS_USERS_HAVE_THEM) == set(ABSENT)


@pytest.mark.parametrize("name", sorted(AS_USERS_HAVE_THEM))
def test_a_users_document_is_read_then_refused(name: str, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(AS_USERS_HAVE_THEM[name])
    assert run_absent(name, ["--config_path", str(path)]) == 2
    said = capsys.readouterr().err
    error = said[said.index("error: ") :]
    assert error.startswith(
        f"error: levanter.main.{name} is not implemented yet ({ABSENT[name].what}); the configuration was read"
    )
    assert f"today: {ABSENT[name].instead}" in error


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_its_module_is_made_of_the_table(name: str):
    """It is imported and run by name as ever, without a file."""
    module = importlib.import_module(f"levanter.main.{name}")
    assert getattr(module, "__file__", None) is None
    with pytest.raises(AttributeError, match=f"levanter.main.{name} has no attribute 'nothing'"):
        _ = module.nothing
    folder = Path(levanter.__file__).parent / "main"
    assert not (folder / f"{name}.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(AS_USERS_HAVE_THEM))
def test_a_module_is_one_call(name: str, tmp_path):
    """As a user starts it, with old keys in it: exit code 2, the reason, no traceback."""
    path = tmp_path / "mine.yaml"
    path.write_text(AS_USERS_HAVE_THEM[name])
    done = subprocess.run(
        [sys.executable, "-m", f"levanter.main.{name}", "--config_path", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 2
    assert f"error: levanter.main.{name} is not implemented yet ({ABSENT[name].what})" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def absent_families() -> list[str]:
    names = LmConfig.choice_names()
    return [name for name in names if issubclass(LmConfig.get_choice_class(name), AbsentModelConfig)]


def test_absent_families_are_refused_by_name_at_run_time():
    config = parse(TrainLmConfig, paths=[str(FOLDER / "07_gpt2_hyena_nano.yaml")])
    with pytest.raises(AbsentFamilyError, match=r"model\.type: gpt2_hyena is an upstream family .* llama"):
        describe(config, CPU)
    for name in absent_families():
        with pytest.raises(AbsentFamilyError, match=f"model.type: {name} "):
            LmConfig.get_choice_class(name)().for_platform("cpu", compute_dtype="float32")
    assert set(absent_families()) == set(FAMILIES)  # no row outlives the day its family is built


def test_absent_optimizers_are_refused_by_name_at_run_time():
    overrides = {"model": {"type": "llama", "hidden_dim": 32, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2}}
    data = {"data": {"tokenizer": "passthrough", "vocab_size": 64}}
    config = parse(TrainLmConfig, overrides={**overrides, **data, "optimizer": {"type": "soap", "shampoo_beta": 0.9}})
    assert isinstance(config.optimizer, AbsentOptimizerConfig)
    with pytest.raises(AbsentOptimizerError, match=r"optimizer\.type: soap is an upstream optimizer .* adam"):
        describe(config, CPU)
    for name, cls in OptimizerConfig.get_known_choices().items():
        if issubclass(cls, AbsentOptimizerConfig):
            with pytest.raises(AbsentOptimizerError, match=f"optimizer.type: {name} "):
                cls().build(10)


def test_several_books_are_another_name_of_what_is_here(capsys):
    from levanter.commands.memorize import eval_careless_lm
    from levanter.config import HelpRequested, load
    from levanter.main import eval_sliding_total

    assert eval_sliding_total.main is eval_careless_lm.main
    assert eval_sliding_total.describe is eval_careless_lm.describe
    cls = eval_sliding_total.EvalCarelessLmConfig
    config = parse(cls, paths=[str(FOLDER / "books/24_eval_sliding_total_8b.yaml")])
    assert list(config.books) == ["first", "second"]
    with pytest.raises(HelpRequested):
        load(cls, ["--help"])
