"""`python -m levanter.main.migrate`, and the page whose tables come from the tables that the code uses."""

import os
from pathlib import Path

import pytest
import yaml
from helpers.legacy_documents import FOLDER

from levanter.legacy.migrate import run
from levanter.legacy.migration_tables import TABLES, filled

DOCS = Path(__file__).parents[3] / "docs" / "migrating.md"
OLD = str(FOLDER / "15_llama3_small_4k_yarn.yaml")


@pytest.mark.golden
def test_the_page_has_the_tables_of_the_code():
    text = DOCS.read_text(encoding="utf-8")
    if os.environ.get("UPDATE_GOLDEN"):
        DOCS.write_text(filled(text), encoding="utf-8")
        text = DOCS.read_text(encoding="utf-8")
    assert all(f"<!-- table: {name} -->" in text for name in TABLES)
    assert filled(text) == text, "`make golden` writes the tables anew"


def test_the_new_document_is_printed_with_its_changes_as_comments(capsys):
    assert run([OLD]) == 0
    text = capsys.readouterr().out
    comments = [line for line in text.splitlines() if line.startswith("# ")]
    assert any(
        line.startswith(f"# {OLD}:") and "trainer.model_axis_size: 1 → trainer.mesh.axes.model: 1 (" in line
        for line in comments
    )
    document = yaml.safe_load(text)
    assert document["trainer"]["mesh"]["axes"] == {"model": 1}
    assert document["model"]["max_seq_len"] == 4096 and "seq_len" not in document["model"]
    assert document["data"]["components"]["train"]["source"]["train_urls"]


def test_it_is_written_once(tmp_path, capsys):
    new = tmp_path / "new.yaml"
    assert run([OLD, "--output", str(new), "--entry_point", "train_lm"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == f"{len(said.splitlines()) - 1} changes; the new document is {new}"
    assert run([str(new)]) == 0
    again = capsys.readouterr().out
    assert not again.startswith("#")
    assert yaml.safe_load(again) == yaml.safe_load(new.read_text())
    assert run([OLD, "--output", str(new)]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("trainer: {model_axis_size: 4, mesh: {axes: {model: 8}}}", [], "contradicts `trainer.mesh.axes.model`"),
        ("trainer: [", [], "not valid YAML"),
        ("model: {type: lama}", ["--entry_point", "train_lm"], "did you mean `llama`"),
        ("model: {type: llama}", ["--entry_point", "train_ml"], "unknown entry point 'train_ml'; known: cache_dataset"),
    ],
)
def test_what_cannot_be_migrated_is_said(tmp_path, capsys, text: str, words: list[str], said: str):
    path = tmp_path / "old.yaml"
    path.write_text(text)
    assert run([str(path), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_not_there(capsys):
    assert run(["nowhere.yaml"]) == 2
    assert "no such file: nowhere.yaml" in capsys.readouterr().err
