"""The commands of `docs/training.md` are understood as they stand there: entry points, files, keys, flags."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from levanter.commands.evaluate.eval_lm import EvalLmConfig
from levanter.commands.export.export_lm_to_hf import ConvertLmConfig
from levanter.commands.plan_options import parse_plan_request
from levanter.commands.tokenize.cache_dataset import CacheDatasetConfig
from levanter.commands.train.lm.train_lm import TrainLmConfig
from levanter.config import load
from levanter.infra import launch

ROOT = Path(__file__).parents[4]
CONFIGS = {
    "train_lm": TrainLmConfig,
    "cache_dataset": CacheDatasetConfig,
    "eval_lm": EvalLmConfig,
    "export_lm_to_hf": ConvertLmConfig,
}


def commands() -> list[str]:
    text = (ROOT / "docs/training.md").read_text().replace("\\\n", " ")
    return [line.strip() for line in re.findall(r"^    (python -m levanter\..*)$", text, re.M)]


def test_the_walk_is_there():
    named = {command.split()[2] for command in commands()}
    assert {f"levanter.main.{name}" for name in (*CONFIGS, "plan")} | {"levanter.infra.launch"} <= named


@pytest.mark.parametrize("command", commands())
def test_a_command_is_understood(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    module, *words = shlex.split(command)[2:]
    kind = module.rsplit(".", 1)[-1]
    if kind == "launch":
        verb = [] if words[0].startswith("--") else [words.pop(0)]
        if not verb:
            words = ["--dry_run", "--plan_first=false", *words]
            assert launch.main(words) == 0, capsys.readouterr().err
            assert "gcloud" in capsys.readouterr().out
    elif kind == "plan":
        asked = parse_plan_request(words)
        assert asked.targets
        assert isinstance(load(CONFIGS[asked.entry_point.name], asked.argv), TrainLmConfig)
    elif kind in CONFIGS:
        assert load(CONFIGS[kind], _with_shipped_files(words)) is not None
    else:
        assert find_spec(module) is not None


def _with_shipped_files(words: list[str]) -> list[str]:
    """Without a file of the reader's own."""
    if "--config_path" in words and not Path(words[(at := words.index("--config_path")) + 1]).exists():
        return words[:at] + words[at + 2 :]
    return words
