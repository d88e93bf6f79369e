"""Upstream's documents of `eval_harness`, of both generations: every key, upstream's defaults, each of them runs.

Their resolved forms and migrations are golden (`test_legacy_documents`).
"""

import json
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.evaluation_inputs import write_tiny
from helpers.legacy_documents import FOLDER, june_2026

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.harness.config import EvalHarnessConfig
from levanter.commands.harness.eval_harness import main
from levanter.eval.harness import tasks
from levanter.eval.harness.config import HarnessConfig, HarnessTaskConfig

DOCUMENTS = {"37_new_eval_harness": "new", "38_eval_harness_2025": "old"}
"""The documents, and the ids of their runs."""


def path_of(name: str) -> Path:
    return FOLDER / "harness" / f"{name}.yaml"


def test_the_documents_have_every_key():
    documents = [yaml.safe_load(path_of(name).read_text()) for name in DOCUMENTS]
    keys, blocks = june_2026()["entry_points"], [each["eval_harness"] for each in documents]
    assert {key for each in documents for key in each} == set(keys["eval_harness"])
    assert {key for each in blocks for key in each} == {*keys["eval_harness.eval_harness"], "max_eval_length"}
    asked = [task for each in blocks for task in each["task_spec"]]
    assert {key for each in asked for key in each} == {
        *keys["eval_harness.eval_harness.task_spec[]"],
        "doct_to_target",
    }

    logged = {key for each in blocks for key in each.get("sample_logging", ())}
    assert logged == set(keys["eval_harness.eval_harness.sample_logging"])


def ours_of(cls: Any) -> dict[str, Any]:
    made = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(cls)}
    return {key: asdict(value) if hasattr(value, "__dataclass_fields__") else value for key, value in made.items()}


OTHERWISE: dict[str, Any] = {"task_spec": [], "tokenizer": None, "checkpoint_path": None, "task": MISSING}
"""What upstream requires: tasks, tokenizer and model may be given otherwise here."""


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("eval_harness", EvalHarnessConfig),
        ("eval_harness.eval_harness", HarnessConfig),
        ("eval_harness.eval_harness.task_spec[]", HarnessTaskConfig),
    ],
)
def test_defaults_are_upstreams(name: str, cls: Any):
    ours = ours_of(cls)
    for key, theirs in june_2026()["defaults"][name].items():
        if key == "confirm_run_unsafe_code":
            # Upstream runs code that a model wrote unless it is told not to.
            assert ours[key] is False and theirs is True
        elif key != "eval_harness":
            assert ours[key] == (OTHERWISE[key] if theirs == "(required)" else theirs), key


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("upstream"))


@pytest.fixture
def run(tiny, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: the extra `harness`")
    create = tasks._Manager._create_manager
    # Reading the 14,000 names that lm_eval has takes longer than all of this.
    monkeypatch.setattr(tasks._Manager, "_create_manager", lambda self, *, defaults: create(self, defaults=False))
    monkeypatch.chdir(tiny.parent)
    return lambda name, *words: run_entry_point(EvalHarnessConfig, main, ["--config_path", str(path_of(name)), *words])


def found(tiny: Path, run_id: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    out = tiny / "out" / "eval_harness" / run_id / "harness"
    (results,) = out.glob("results_*.json")
    samples = {
        path.name.removeprefix("samples_").split("_2")[0]: list(map(json.loads, path.read_text().splitlines()))
        for path in out.glob("samples_*.jsonl")
    }
    return json.loads(results.read_text()), samples


@pytest.mark.slow
def test_a_new_document_runs_with_tasks_of_its_own(run, tiny):
    assert run("37_new_eval_harness") == 0
    results, samples = found(tiny, "new")
    assert results["levanter"]["requests"] == {"loglikelihood": 6, "generate_until": 3}
    assert {name: len(lines) for name, lines in samples.items()} == {"choices_one_shot": 3, "own_texts": 3}
    asked = samples["choices_one_shot"][0]["arguments"]["gen_args_0"]["arg_0"]
    # A solved document is a turn of its own, behind the description.
    assert "Which one?" in asked and asked.count("the cat") == 2
    assert results["n-shot"]["choices_one_shot"] == 1 and results["versions"]["choices_one_shot"] == 2.0


def test_a_document_of_2025_runs(run, tiny):
    assert run("38_eval_harness_2025") == 0
    results, samples = found(tiny, "old")
    assert results["levanter"]["requests"] == {"loglikelihood": 4} and not samples
    assert 0 <= results["results"]["own_choices"]["acc,none"] <= 1


@pytest.mark.slow
def test_sample_logging_writes_as_many_as_it_says(run, tiny):
    words = ("--eval_harness.sample_logging.max_samples_per_benchmark", "1", "--trainer.id", "few")
    assert run("38_eval_harness_2025", *words) == 0
    assert {name: len(lines) for name, lines in found(tiny, "few")[1].items()} == {"own_choices": 1}
    words = ("--eval_harness.sample_logging.log_all", "true", "--trainer.id", "all")
    assert run("38_eval_harness_2025", *words) == 0
    assert {name: len(lines) for name, lines in found(tiny, "all")[1].items()} == {"own_choices": 2}


WHOLE = "task: own, dataset_path: ./tiny/choices, output_type: multiple_choice, test_split: test"


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("{task: own, dataset_path: ./tiny/choices}", "own: no task, group or tag of this name"),
        (
            "{task: own, dataset_path: ./tiny/choices, output_type: multiple_choice}",
            "own: a task failed: ValueError: Task dataset (path=./tiny/choices, name=None) must have valid",
        ),
        (
            "{task: own, dataset_path: ./tiny/none, output_type: multiple_choice, test_split: test}",
            "own: its documents are not available here",
        ),
        (
            f"{{{WHOLE}, use_prompt: 'promptsource:a'}}",
            "own: it needs a package that is not installed here (Tried to load a Promptsource template",
        ),
        ("{task: ./tiny/own.yaml, num_fewshot: 1}", "own.yaml: a file; changes (num_fewshot) are a task's"),
    ],
)
def test_a_task_that_is_half_defined_is_said(run, tiny, capsys, task: str, said: str):
    (tiny / "own.yaml").write_text("task: own\n")
    assert run("38_eval_harness_2025", "--eval_harness.task_spec", f"[{task}]") == 2
    told = capsys.readouterr()
    assert said in told.err and "Traceback" not in told.err and "loading weights" not in told.out
