"""`docs/perplexity-gap.md`: its keys are keys, its YAML is read, and its command runs."""

import json
import re
import shlex
from pathlib import Path

import pytest

from levanter.commands.evaluate.gap.config import GapModelConfig, PerplexityGapConfig
from levanter.config import load_written, parse_text
from levanter.config.schema import config_fields

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "perplexity-gap.md").read_text(encoding="utf-8")
(COMMAND,) = re.findall(r"^python -m levanter\.main\.perplexity_gap (.*)$", PAGE, re.M)


def test_its_keys_are_keys():
    (table,) = re.findall(r"\n\| key \|.*?\n\n", PAGE, re.S)
    named = [key for line in table.strip().splitlines()[2:] for key in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert set(named) | {"trainer", "plan"} == set(config_fields(PerplexityGapConfig))
    (models,) = [line for line in table.splitlines() if line.startswith("| `model_a`")]
    assert set(re.findall(r"`(\w+)`", models.split("|")[2])) - {"eval_lm"} <= set(config_fields(GapModelConfig))


def test_its_configurations_are_read(monkeypatch):
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    config = parse_text(PerplexityGapConfig, block)
    assert config.datasets.keys() == {"web", "code"}
    monkeypatch.chdir(ROOT)
    config = load_written(PerplexityGapConfig, shlex.split(COMMAND)).config
    assert config.models.keys() == {"model_a", "model_b"}


@pytest.mark.slow
@pytest.mark.optimized
def test_the_demonstration_runs(tmp_path, monkeypatch, capsys):
    from levanter.commands.cli.errors import run_entry_point
    from levanter.commands.evaluate.gap.run import main

    monkeypatch.chdir(ROOT)
    words = [*shlex.split(COMMAND), "--max_docs_per_dataset", "6", "--output_path", str(tmp_path)]
    assert run_entry_point(PerplexityGapConfig, main, words) == 0
    (row,) = json.loads((tmp_path / "summary.json").read_text())["datasets"]
    assert 0.5 < row["model_b_bpb"] < 1.5 and abs(row["gap_bpb"]) < 0.05
    assert "python_docs" in capsys.readouterr().out
