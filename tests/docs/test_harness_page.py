"""`docs/harness.md`: its keys are keys, and its commands run."""

import re
import shlex
from pathlib import Path

import pytest

from levanter.commands.harness.config import EvalHarnessConfig
from levanter.config import load_written
from levanter.config.schema import config_fields
from levanter.eval.harness.config import HarnessConfig, HarnessTaskConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "harness.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^python -m levanter\.main\.(?:plan )?eval_harness (.*)$", PAGE, re.M)


def test_its_keys_are_keys():
    (table,) = re.findall(r"\n\| key \|.*?\n\n", PAGE, re.S)
    cells = [re.findall(r"`([\w.]+)`", line.split("|")[1]) for line in table.strip().splitlines()[2:]]
    named = [key for cell in cells for key in cell]
    known = {*config_fields(EvalHarnessConfig), *config_fields(HarnessConfig), *config_fields(HarnessTaskConfig)}
    assert len(named) > 15 and not {key.removeprefix("eval_harness.") for key in named} - known


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_are_read(command: str, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_written(EvalHarnessConfig, shlex.split(command.partition(" --target ")[0])).config
    assert config.harness.tasks


@pytest.mark.slow
@pytest.mark.optimized
def test_the_demonstration_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: the extra `harness`")
    from levanter.commands.cli.errors import run_entry_point
    from levanter.commands.harness.eval_harness import main

    (demo,) = [command for command in COMMANDS if "demo.yaml" in command]
    monkeypatch.chdir(ROOT)
    words = [*shlex.split(demo), "--limit", "4", "--output_path", str(tmp_path)]
    assert run_entry_point(EvalHarnessConfig, main, words) == 0
    said = capsys.readouterr().out
    assert re.search(r"^made_letters +acc ", said, re.M) and re.search(r"^made_sums +exact_match,number ", said, re.M)
    assert len(list(tmp_path.glob("samples_*.jsonl"))) == 6 and len(list(tmp_path.glob("page_*.html"))) == 1
