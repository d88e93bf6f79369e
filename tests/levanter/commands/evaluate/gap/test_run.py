"""`perplexity_gap` as a user runs it: sums are `eval_lm`'s whatever the tokenizers; one model is there at a time."""

import json
from pathlib import Path

import jax
import pytest
from helpers.hf_folder import CONFIG, byte_level_tokenizer, tensors, write_folder
from tokenizers import normalizers

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.evaluate import eval_lm
from levanter.commands.evaluate.config import EvalLmConfig
from levanter.commands.evaluate.gap import run as gap_run
from levanter.commands.evaluate.gap.config import PerplexityGapConfig
from levanter.config import load_written
from levanter.plan.target_from_name import pod_target

TEXTS = {
    "web": ["the cat sat on the mat, didn't it? " * 9, "naïve café 12.5 — 日本語のテキスト 🎉", "x"],
    "code": ["def f(x):\n    return x + 1\n\n\n" * 4],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two models whose tokenizers and contexts differ, and two sets of texts."""
    folder = tmp_path_factory.mktemp("gap")
    write_folder(folder / "a")
    config = {**CONFIG, "vocab_size": 304, "max_position_embeddings": 96, "hidden_size": 16, "num_attention_heads": 2}
    weights = {name: 2 * each for name, each in tensors(config).items()}
    write_folder(folder / "b", config=config, weights=weights)
    byte_level_tokenizer(262).save(str(folder / "b" / "tokenizer.json"))
    for name, texts in TEXTS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def document(folder: Path, **more) -> dict:
    return {
        "model_a": {"checkpoint_path": str(folder / "a"), "checkpoint_is_hf": True},
        "model_b": {"hf_checkpoint": str(folder / "b")},
        "datasets": {
            name: {"source": {"validation_urls": [str(folder / f"{name}.jsonl")]}, "tags": ["all"]} for name in TEXTS
        },
        "trainer": {"mp": "f32", "per_device_eval_parallelism": 1, "tracker": []},
        **more,
    }


def run(path: Path, config: dict, *words: str) -> int:
    path.mkdir(parents=True, exist_ok=True)
    (path / "gap.yaml").write_text(json.dumps(config))
    given = ["--config_path", str(path / "gap.yaml"), "--output_path", str(path / "out"), *words]
    return run_entry_point(PerplexityGapConfig, gap_run.main, given)


def summary_of(path: Path) -> dict:
    return json.loads((path / "out" / "summary.json").read_text())


def test_sums_are_eval_lms_with_tokenizers_that_differ(folder, tmp_path, monkeypatch, capsys):
    there = []
    load = gap_run.load_pretrained

    def watched(*args, **more):
        there.append(sum(each.size for each in jax.live_arrays() if each.ndim > 1))
        return load(*args, **more)

    monkeypatch.setattr(gap_run, "load_pretrained", watched)
    tracker = {"type": "json_file", "output_path": str(tmp_path / "tracker")}
    config = document(folder)
    config["trainer"]["tracker"] = tracker
    before = sum(each.size for each in jax.live_arrays() if each.ndim > 1)
    assert run(tmp_path, config) == 0
    # Nothing of A is left when B is loaded.
    assert there == [before, before]
    summary = summary_of(tmp_path)
    rows = {row["name"]: row for row in (*summary["datasets"], *summary["dataset_groups"])}
    assert rows.keys() == {"web", "code", "all"}
    assert rows["web"]["model_a_tokens"] != rows["web"]["model_b_tokens"]
    for key in ("a", "b"):
        evaluation = {
            "hf_checkpoint": str(folder / key),
            "data": {"components": config["datasets"], "enforce_eos": False, "cache_dir": None},
            "trainer": {**config["trainer"], "tracker": []},
        }
        path = tmp_path / f"{key}.yaml"
        path.write_text(json.dumps(evaluation))
        words = ["--config_path", str(path), "--output_path", str(tmp_path / f"{key}.json")]
        assert run_entry_point(EvalLmConfig, eval_lm.main, words) == 0
        for name, found in json.loads((tmp_path / f"{key}.json").read_text())["sets"].items():
            assert found["bits_per_byte"] == pytest.approx(rows[name][f"model_{key}_bpb"], rel=1e-6), (key, name)
            assert (found["bytes"], found["tokens"]) == (rows[name]["bytes"], rows[name][f"model_{key}_tokens"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("summary.json", "report.md", "worst_documents.jsonl", "page.html")
    }
    said = capsys.readouterr().out
    assert f"model_a: tokenizer: {folder}/a, 300 ids" in said and "programs: score_a → score_b" in said
    assert "gap/datasets/web/bpb_gap" in (tmp_path / "tracker" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_model_beside_itself_is_zero_everywhere(folder, tmp_path):
    config = document(folder, model_b={"hf_checkpoint": str(folder / "a")})
    assert run(tmp_path, config) == 0
    summary = summary_of(tmp_path)
    for section in ("datasets", "dataset_groups", "pattern_buckets"):
        assert summary[section] and {row["delta_bits"] for row in summary[section]} == {0.0}
    assert summary["top_documents"] == {"model_a_worse": [], "model_b_worse": []}


def test_one_model_by_itself_and_limits(folder, tmp_path):
    config = document(folder, model={"hf_checkpoint": str(folder / "a")}, max_docs_per_dataset=2, max_doc_bytes=100)
    del config["model_a"], config["model_b"]
    assert run(tmp_path, config) == 0
    summary = summary_of(tmp_path)
    (web,) = [row for row in summary["datasets"] if row["name"] == "web"]
    assert web["documents"] == 2 and web["bytes"] == 100 + len(TEXTS["web"][1].encode())
    assert web["bits"] == pytest.approx(web["bpb"] * web["bytes"]) and web["tokens"] > 0
    import pyarrow.parquet as pq

    table = pq.read_table(tmp_path / "out" / "scored_documents.parquet").to_pylist()
    assert len(table) == 3 and table[1]["text"] == TEXTS["web"][1]
    for row in table:
        assert len(row["per_byte_loss"]) == row["num_bytes"] == len(row["text"].encode())
    assert sum(sum(row["per_byte_loss"]) for row in table if row["dataset_name"] == "web") * 1.4426950408889634 == (
        pytest.approx(web["bits"])
    )


@pytest.mark.slow
@pytest.mark.slow
def test_only_targets_of_pairs_count(folder, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"q": "naïve ", "a": "the cat"}) + "\n")
    pairs = {
        "source": {"validation_urls": [str(tmp_path / "pairs.jsonl")]},
        "format": {"type": "supervised", "input_key": "q", "target_key": "a"},
    }
    assert run(tmp_path, document(folder, datasets={"pairs": pairs})) == 0
    (row,) = summary_of(tmp_path)["datasets"]
    assert row["bytes"] == len("the cat")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_b": None}, "give model_a and model_b, which are compared, or one model to score; there is model_a"),
        ({"model": {"hf_checkpoint": "x"}}, "there is model_a, model_b, model"),
        ({"model_a": {}}, "give one model: checkpoint_path, or hf_checkpoint"),
        ({"datasets": {}}, "datasets: no data set is configured"),
        ({"max_eval_length": 1}, "max_eval_length must be at least 2"),
        ({"max_doc_bytes": 0}, "max_doc_bytes"),
        ({"model_b": {"hf_checkpoint": "/not/here"}}, "/not/here"),
        ({"datasets": {"one": {"source": {"validation_urls": ["/not/here.jsonl"]}}}}, "error: datasets.one."),
        ({"datasets": {"one": {"format": {"type": "chat"}, "source": {"validation_urls": ["CHAT"]}}}}, "`chat` is not"),
        ({"datasets": {"one": {"source": {"validation_urls": ["EMPTY"]}}}}, "data set 'one' is empty: no text"),
    ],
)
def test_bad_input_is_one_error(folder, tmp_path, capsys, changed: dict, said: str):
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    given = json.dumps(document(folder, **changed))
    given = given.replace("CHAT", str(tmp_path / "chat.jsonl")).replace("EMPTY", str(tmp_path / "empty.jsonl"))
    assert run(tmp_path, json.loads(given)) == 2
    told = capsys.readouterr()
    assert said in told.err and "Traceback" not in told.err and "loading weights" not in told.out
    assert not (tmp_path / "out").exists()


def test_it_is_planned_for_a_pod(folder, tmp_path):
    (tmp_path / "gap.yaml").write_text(json.dumps(document(folder)))
    loaded = load_written(PerplexityGapConfig, ["--config_path", str(tmp_path / "gap.yaml")])
    plan = gap_run.describe(loaded.config, pod_target("v4-8"), written=loaded.written)
    assert not plan.errors and [program.name for program in plan.computing] == ["score_a", "score_b"]
    assert plan.load is not None and plan.second_load is not None
    # The larger one is what lies on a chip.
    assert plan.load is plan.work.halves[0].work.pretrained.load_plan
    assert {each.program: each.executions is not None for each in plan.workloads} == {"score_a": True, "score_b": True}


def test_texts_that_ids_do_not_keep_are_refused(folder, tmp_path, capsys):
    """A tokenizer with lower case and one text with a capital: its losses are those of another text."""
    built = byte_level_tokenizer(262)
    built.normalizer = normalizers.Lowercase()
    built.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ["a cat", "The cat"]))
    sets = {"web": {"source": {"validation_urls": [str(tmp_path / "texts.jsonl")]}}}
    config = document(folder, datasets=sets)
    config["model_b"]["tokenizer"] = str(tmp_path)
    assert run(tmp_path, config) == 2
    error = capsys.readouterr().err
    assert "model_b: bits per byte of web: the ids of 1 of 2 documents do not keep their text" in error
    assert "its normalizer Lowercase changes text" in error and "model_a: bits" not in error
    assert "→ a model whose tokenizer keeps the texts" in error
