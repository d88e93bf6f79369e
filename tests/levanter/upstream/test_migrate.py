"""`python -m levanter.main.migrate`, and the page whose tables come from the tables that the code uses."""

import os
import re
from pathlib import Path

import pytest
import yaml
from helpers import not_carried
from helpers.legacy_documents import FOLDER

from levanter.commands.model.unsupported import unsupported_option_checks
from levanter.commands.train.config import TrainLmConfig
from levanter.config import ConfigError, parse, read
from levanter.config.schema import config_fields, key_paths
from levanter.config.upstream import TABLE
from levanter.config.upstream.unsupported import NOT_CARRIED
from levanter.models.registry import LmConfig
from levanter.upstream.migrate import run
from levanter.upstream.migration_tables import TABLES, filled

pytestmark = pytest.mark.quick

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
    assert said.splitlines()[-1] == f"{len(said.splitlines()) - 1} changes; new document: {new}"
    assert run([str(new)]) == 0
    again = capsys.readouterr().out
    assert not again.startswith("#")
    assert yaml.safe_load(again) == yaml.safe_load(new.read_text())
    assert run([OLD, "--output", str(new)]) == 2
    assert "already exists" in capsys.readouterr().err


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


def test_keys_that_are_not_carried_are_treated_as_the_page_says():
    """Each row of the page's table, written into a document with a value that asks for something."""
    table = DOCS.read_text(encoding="utf-8").partition("<!-- table: not-carried -->")[2].partition("<!-- end -->")[0]
    rows = re.findall(r"^\| `([\w.*]+)`(?: \(of ([^)]*)\))? \| ([^|]*) \|", table, re.MULTILINE)
    assert len(rows) == len(NOT_CARRIED)
    for key, _, here in rows:
        config, document = not_carried.document(next(row for row in NOT_CARRIED if row.key == key))
        loaded = read(config, overrides=document)
        found = [check for check in unsupported_option_checks(loaded.config, loaded.written) if key in check.message]
        expected = "error" if here == "refused if set" else "note"
        assert [check.status for check in found] == [expected], key


def test_keys_in_the_prose_exist_and_are_refused_only_where_it_says_so():
    """A key in the text is one of today's or an old one; a value beside it is accepted, or refused if it says so."""
    text = re.sub(r"<!-- table.*?<!-- end -->", "", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    known = set(key_paths(TrainLmConfig)) | {row.name for row in TABLE} | {row.name for row in NOT_CARRIED}
    known |= {key for cls in (*LmConfig.get_known_choices().values(),) for key in config_fields(cls)}
    found = 0
    for sentence in re.split(r"(?<=[.:])\s", text.replace("\n", " ")):
        for key, value in re.findall(r"`((?:trainer|model|data|optimizer)\.[a-z_.]+)(?::\s*([^`…]+))?`", sentence):
            found += 1
            assert key.rpartition(".")[2] in known, key
            if not value:
                continue
            kind = re.search(r"of (GPT-2|GPT-NeoX|Llama)", sentence)
            model = {"GPT-2": "gpt2", "GPT-NeoX": "gpt_neox"}.get(kind[1], "llama") if kind else "llama"
            overrides = {"model.type": model, key: value}
            if "refused" in sentence or "is an error" in sentence:
                with pytest.raises(ConfigError):
                    parse(TrainLmConfig, overrides=overrides)
            else:
                parse(TrainLmConfig, overrides=overrides)
    assert found >= 4
