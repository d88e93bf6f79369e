"""Upstream's documents of `perplexity_gap`: together they have every key, defaults are upstream's, each of them runs.

Their resolved forms and migrations are golden (`test_legacy_documents`).
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.evaluation_inputs import write_tiny
from helpers.legacy_documents import FOLDER, june_2026

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.evaluate.gap.config import GapModelConfig, PerplexityGapConfig
from levanter.commands.evaluate.gap.run import main
from levanter.config import parse_text
from levanter.upstream.migrate import migrate

DOCUMENTS = {
    "39_new_perplexity_gap": "new_gap",
    "40_perplexity_gap_2025": "old_gap",
    "41_new_model_perplexity": "one",
}
"""The documents, and the folders of their results."""
FILES = {
    "new_gap": {"summary.json", "report.md", "worst_documents.jsonl", "page.html"},
    "one": {"summary.json", "scored_documents.parquet"},
}


def path_of(name: str) -> Path:
    return FOLDER / "gap" / f"{name}.yaml"


def test_the_documents_have_every_key():
    documents = [yaml.safe_load(path_of(name).read_text()) for name in DOCUMENTS]
    assert {key for each in documents for key in each} == {*june_2026()["entry_points"]["perplexity_gap"], "model"}
    models = [each[key] for each in documents for key in ("model_a", "model_b", "model") if key in each]
    assert {key for each in models for key in each} == set(june_2026()["entry_points"]["perplexity_gap.model_a"])


ABSENT = "(required)"
OTHERWISE: dict[str, tuple[Any, Any]] = {"model_a": (ABSENT, None), "model_b": (ABSENT, None), "model": (ABSENT, None)}
"""Keys that one class requires and the other does not have: either both models are given here, or one."""


def test_defaults_are_upstreams():
    ours = {each.name: each.default for each in fields(PerplexityGapConfig)}
    for key, theirs in june_2026()["defaults"]["perplexity_gap"].items():
        expected, here = OTHERWISE.get(key, (theirs, {"datasets": theirs, "output_path": None}.get(key, theirs)))
        assert theirs == expected and (key == "datasets" or ours[key] == here), key
    one = GapModelConfig(hf_checkpoint="a")
    texts = parse_text(PerplexityGapConfig, "{model: {hf_checkpoint: a}, datasets: {x: {}}}")
    assert texts.folder == june_2026()["defaults"]["perplexity_gap (one model)"]["output_path"]
    both = parse_text(
        PerplexityGapConfig, "{model_a: {hf_checkpoint: a}, model_b: {hf_checkpoint: b}, datasets: {x: {}}}"
    )
    assert both.folder == june_2026()["defaults"]["perplexity_gap"]["output_path"]
    for key, theirs in june_2026()["defaults"]["perplexity_gap.model_a"].items():
        assert getattr(one, key) == (None if key == "checkpoint_path" else theirs), key


def test_old_keys_of_every_model_are_translated():
    done = migrate(str(path_of("40_perplexity_gap_2025")), "perplexity_gap")
    changes = [change.key for change in done.changes]
    assert [key for key in changes if key.endswith("seq_len")] == ["model_a.model.seq_len", "model_b.model.seq_len"]
    new = yaml.safe_load(done.text)
    for key in ("model_a", "model_b"):
        assert new[key]["model"]["max_seq_len"] == 64 and "seq_len" not in new[key]["model"]
    one = migrate(str(path_of("41_new_model_perplexity")), "perplexity_gap")
    assert [change.key for change in one.changes] == ["model.model.seq_len"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("upstream"))


SLOW = {"39_new_perplexity_gap", "41_new_model_perplexity"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in DOCUMENTS])
def test_a_document_runs(name: str, tiny: Path, monkeypatch):
    monkeypatch.chdir(tiny.parent)
    assert run_entry_point(PerplexityGapConfig, main, ["--config_path", str(path_of(name))]) == 0
    out = tiny / "out" / DOCUMENTS[name]
    assert {path.name for path in out.iterdir()} == FILES["one" if DOCUMENTS[name] == "one" else "new_gap"]
    summary = json.loads((out / "summary.json").read_text())
    sets = {row["name"]: row for row in summary["datasets"]}
    assert sets.keys() == ({"web", "pairs"} if DOCUMENTS[name] == "new_gap" else {"web"})
    if DOCUMENTS[name] == "one":
        assert sets["web"]["bpb"] > 0
    else:
        assert all(row["model_a_bpb"] > 0 and row["gap_bpb"] != 0 for row in sets.values())
