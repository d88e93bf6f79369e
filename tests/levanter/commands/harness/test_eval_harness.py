"""`eval_harness` as a user runs it: lm_eval's files, one clear error and exit code 2 for bad input."""

import errno
import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: the extra `harness`")

from helpers.harness import CONTEXT, CPU8, TASKS, by_ours, harness_config, tiny_llama

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.harness.config import EvalHarnessConfig
from levanter.commands.harness.eval_harness import describe, main
from levanter.config import parse
from levanter.eval.harness import tasks
from levanter.eval.harness.config import GENERATION, HarnessTaskConfig
from levanter.eval.harness.generation import GenerationKeys


@pytest.fixture(autouse=True)
def without_lm_evals_own(monkeypatch):
    """Reading the 14,000 names that lm_eval has takes longer than all of this; tests/multihost does so."""
    create = tasks._Manager._create_manager
    monkeypatch.setattr(tasks._Manager, "_create_manager", lambda self, *, defaults: create(self, defaults=False))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def document(folder: Path, model: Path, **more) -> list[str]:
    """The command line of a run in a folder."""
    path = folder / "harness.yaml"
    config = {
        "hf_checkpoint": str(model),
        "include_path": str(TASKS),
        "output_path": str(folder / "out"),
        "trainer": {"mp": "f32", "tracker": {"type": "json_file", "output_path": str(folder / "tracker")}},
        **more,
    }
    path.write_text(json.dumps(config))
    return ["--config_path", str(path)]


def run(*words: str) -> int:
    return run_entry_point(EvalHarnessConfig, main, list(words))


def test_a_run_writes_lm_evals_files(tmp_path, model, capsys):
    words = document(tmp_path, model, eval_harness={"log_samples": True, "bootstrap_iters": 10})
    assert run(*words, "--tasks", "made_letters,made_texts", "--limit", "4") == 0
    said = capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    (results,) = [name for name in names if name.startswith("results_")]
    date = results.removeprefix("results_").removesuffix(".json")
    samples = [f"samples_made_{task}_{date}.jsonl" for task in ("letters", "texts")]
    assert names == sorted([results, f"page_{date}.html", *samples])
    found = json.loads((tmp_path / "out" / results).read_text())
    assert {"results", "configs", "versions", "n-shot", "higher_is_better", "n-samples", "config", "date"} <= set(found)
    accuracy = found["results"]["made_letters"]["acc,none"]
    assert re.search(rf"^made_letters +acc +{accuracy:.4f} +± ", said, re.M)
    assert found["n-samples"]["made_letters"] == {"original": 60, "effective": 4}
    asked = found["levanter"]
    assert asked["requests"] == {"loglikelihood": 16, "loglikelihood_rolling": 4}
    assert len(asked["request_digest"]) == 64 and asked["first_ids"]["loglikelihood"][0] == 1
    lines = [
        json.loads(line) for line in (tmp_path / "out" / f"samples_made_letters_{date}.jsonl").read_text().splitlines()
    ]
    assert [line["doc_id"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["arguments"]["gen_args_0"]["arg_1"] == " A" and lines[0]["resps"][0][0][1] in ("True", "False")
    tracked = (tmp_path / "tracker" / "metrics.jsonl").read_text()
    assert '"lm_eval/made_letters/acc":' in tracked and '"lm_eval/averages/macro_avg_acc":' in tracked


def test_a_full_disk_at_the_end_loses_nothing(tmp_path, model, capsys, monkeypatch):
    real = os.fsync

    def full(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.startswith(str(tmp_path / "out")) and "results_" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    words = document(tmp_path, model, eval_harness={"log_samples": True})
    assert run(*words, "--tasks", "made_letters", "--limit", "2") == 2
    told = capsys.readouterr()
    assert re.search(r"^made_letters +acc +", told.out, re.M) and "Traceback" not in told.err
    (kept,) = re.findall(
        r"results_\S+ *: cannot be written \(No space left on device\)[^\n]*\n.*?it was kept in (\S+)", told.err, re.S
    )
    assert json.loads(Path(kept).read_text())["levanter"]["requests"] == {"loglikelihood": 8}
    Path(kept).unlink()
    # What there was room for is there, and the tracker has the numbers.
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".html", ".jsonl"}
    assert '"lm_eval/made_letters/acc":' in (tmp_path / "tracker" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "made_leters"], "made_leters: no task, group or tag of this name; did you mean `made_letters`"),
        (["--tasks", "made,made_sums"], "made_sums: listed twice"),
        ([], "no tasks: give tasks (names, separated by commas) or eval_harness.task_spec"),
        (["--tasks", "made", "--eval_harness.task_spec", "[made]"], "tasks and eval_harness.task_spec both name tasks"),
        (["--tasks", "made_sums", "--limit", "2", "--eval_harness.max_examples", "3"], "are one key; give one"),
        (["--tasks", "made_sums", "--include_path", "/not/here"], "include_path: /not/here: no such folder"),
        (["--tasks", "made_sums", "--eval_harness.max_length", "1"], "eval_harness.max_length must be at least 2"),
        (
            ["--eval_harness.task_spec", "[{task: made, num_fewshot: 2, description: x}]"],
            "made: a group; changes (description) are a task's",
        ),
        (["--tasks", "made_endings", "--eval_harness.max_length", "4"], "made_endings, document 0: the answer"),
        (
            ["--tasks", "made_sums", "--eval_harness.max_length", "8", "--limit", "2"],
            "made_sums, document 0: max_gen_toks: 8 leave no tokens for a prompt in the context of 8 tokens",
        ),
    ],
)
def test_bad_input_is_said_before_a_weight_is_read(tmp_path, model, capsys, words: list[str], said: str):
    assert run(*document(tmp_path, model), *words) == 2
    told = capsys.readouterr()
    assert said in told.err and "Traceback" not in told.err
    assert "loading weights" not in told.out and not (tmp_path / "out").exists()


def made_task(folder: Path, name: str, text: str) -> str:
    """A task of one's own on two documents."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text('{"q": "the cat", "a": 0}\n{"q": "a dog", "a": 1}\n')
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}\n"
        f"test_split: test\n{text}"
    )
    return str(folder)


CHOICE = "output_type: multiple_choice\ndoc_to_text: q\ndoc_to_target: a\ndoc_to_choice: [' x', ' y']\n"


def test_tasks_that_run_code_or_raise(tmp_path, model, capsys):
    folder = tmp_path / "tasks"
    made_task(folder, "runs_code", f"{CHOICE}unsafe_code: true\n")
    (folder / "broken.py").write_text("def results(doc, found):\n    raise KeyError('nothing')\n")
    made_task(folder, "raises", f"{CHOICE}process_results: !function broken.results\n")
    words = [*document(tmp_path, model), "--include_path", str(folder)]
    assert run(*words, "--tasks", "runs_code") == 2
    assert "runs_code: runs code that a model wrote" in capsys.readouterr().err
    assert run(*words, "--tasks", "raises") == 2
    said = capsys.readouterr().err
    assert "error: a task failed: KeyError: 'nothing' (" in said and "broken.py, line 2" in said
    assert "Traceback" not in said and not list((tmp_path / "out").glob("results_*"))


def test_without_lm_eval_its_installation_is_named(tmp_path, model, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)

    real = importlib.import_module

    def absent(name: str, package: str | None = None):
        # Every module's `import_module` is this function while the test runs; only lm_eval is absent.
        if name.partition(".")[0] == "lm_eval":
            raise ModuleNotFoundError(f"No module named {name!r}", name="lm_eval")
        return real(name, package)

    monkeypatch.setattr("levanter.eval.harness.tasks.importlib.import_module", absent)
    assert run(*document(tmp_path, model), "--tasks", "made_sums") == 2
    assert "pip install 'levanter-fork[harness]'" in capsys.readouterr().err
    # A plan goes on without it.
    plan = describe(harness_config(model, "made_letters"), CPU8)
    assert not plan.errors and len(plan.missing) == 1
    assert {each.executions for each in plan.workloads} == {None}


def test_what_is_planned_is_what_runs(model):
    found, plan = by_ours(harness_config(model, "made_letters,made_texts", limit=10))
    planned = {each.program: each.executions for each in plan.workloads}
    lengths = {each.program: each.tokens for each in plan.workloads}
    assert sum(planned[name] * lengths[name] for name in planned) == found.results["levanter"]["tokens"]
    assert 1 <= sum(count > 0 for count in planned.values()) <= 6
    assert all(each.reason == "50 requests of the tasks" for each in plan.workloads)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_answers_do_not_depend_on_the_batch(model, rows: int):
    one, _ = by_ours(harness_config(model, "made_endings,made_cloze", limit=8))
    other, _ = by_ours(harness_config(model, "made_endings,made_cloze", limit=8, per_device_eval_parallelism=rows))
    for task, samples in one.samples.items():
        for mine, theirs in zip(samples, other.samples[task], strict=True):
            for (a,), (b,) in zip(mine["resps"], theirs["resps"], strict=True):
                assert a[0] == pytest.approx(b[0], abs=1e-5) and a[1] == b[1]


def test_two_variants_of_a_task(model):
    spec = [
        HarnessTaskConfig(task="made_letters"),
        HarnessTaskConfig(task="made_letters", task_alias="two", num_fewshot=2),
    ]
    config = harness_config(model, "", limit=2, task_spec=spec)
    plan = describe(config, CPU8)
    assert not plan.errors
    loaded = plan.work.scoring.tasks.loaded
    assert {name: task.get_config("num_fewshot") for name, task in loaded.tasks.items()} == {
        "made_letters": 0,
        "two": 2,
    }


@pytest.mark.parametrize("count", [0, 3])
def test_a_number_of_examples_for_all_tasks_of_a_group(model, count):
    """As lm_eval's `simple_evaluate(num_fewshot=…)` sets it: every task but those whose file says 0."""
    plain = describe(harness_config(model, "made", limit=2), CPU8).work.scoring.tasks.loaded
    spec = [HarnessTaskConfig(task="made", num_fewshot=count)]
    loaded = describe(harness_config(model, "", limit=2, task_spec=spec), CPU8).work.scoring.tasks.loaded
    assert loaded.tasks.keys() == plain.tasks.keys() and len(plain.tasks) > 1 and loaded.groups.keys() == {"made"}
    files = {path.stem: path.read_text() for path in TASKS.glob("*.yaml")}
    for name, task in loaded.tasks.items():
        expected = 0 if "num_fewshot: 0" in files.get(name, "") else count
        assert task.get_config("num_fewshot") == expected, name


def test_assumed_requests_give_minutes_without_documents(model, monkeypatch):
    from levanter.eval.harness import task_discovery as finding
    from levanter.eval.harness.tasks import UnavailableTaskError

    def absent(*_: object):
        raise UnavailableTaskError(
            "eval_harness.task_spec: hellaswag: its documents are not available here (no network)"
        )

    monkeypatch.setattr(finding, "load_tasks", absent)
    config = parse(
        EvalHarnessConfig,
        overrides={"hf_checkpoint": str(model), "tasks": "hellaswag", "plan.assume_requests": "40168"},
    )
    plan = describe(config, CPU8)
    assert [each.name for each in plan.checks if each.status == "unchecked"] == ["tasks"]
    assert sum(each.executions * each.tokens for each in plan.workloads) >= 40168 * CONTEXT


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (("\n",), 256, {}, None)),
        ({"until": "x", "max_new_tokens": 5}, (("x", "\n"), 5, {}, None)),
        ({"until": ["x", ""], "do_sample": False, "temperature": 0.7}, (("x", "\n"), 256, {}, None)),
        ({"temperature": 0.7, "top_p": 0.9}, (("\n",), 256, {"temperature": 0.7, "top_p": 0.9}, None)),
        ({"do_sample": True, "temperature": 1, "seed": 3}, (("\n",), 256, {"temperature": 1.0}, 3)),
        ({"temperature": 1, "top_k": 4.0}, (("\n",), 256, {"temperature": 1.0, "top_k": 4}, None)),
    ],
)
def test_keys_of_generation(given, expected):
    found = GenerationKeys.of(given, GENERATION, ["\n"], "a, document 0")
    assert (found.until, found.max_tokens, dict(found.sampling), found.seed) == expected


def test_keys_of_generation_that_are_unknown_are_listed():
    with pytest.raises(ValueError) as told:
        GenerationKeys.of(
            {"num_beams": 4, "max_gen_toks": 0, "until": [3], "top_k": 1.5}, GENERATION, [], "a, document 0"
        )
    first, second, third, fourth = str(told.value).splitlines()
    assert fourth.endswith("generation_kwargs.top_k: expected an integer, got 1.5")
    assert first.startswith("a, document 0: generation_kwargs.num_beams: not a key of generation here")
    assert "expected a number of tokens, got 0" in second and "expected texts, got [3]" in third


@pytest.mark.slow
def test_two_runs_are_compared(tmp_path, model, capsys):
    words = document(tmp_path, model, eval_harness={"log_samples": True})
    first = tmp_path / "first"
    assert run(*words, "--tasks", "made_letters,made_texts", "--limit", "6", "--output_path", str(first)) == 0
    (results,) = first.glob("results_*.json")
    capsys.readouterr()
    again = [*words, "--tasks", "made_letters,made_texts", "--against", str(results)]
    assert run(*again, "--limit", "6") == 0
    said = capsys.readouterr().out
    assert f"beside {results}:" in said and len(re.findall(r"p 1\.000 +equal$", said, re.M)) == 4
    (page,) = (tmp_path / "out").glob("page_*.html")
    assert f"this run beside {results}" in page.read_text()
    # Other documents there: what was computed is written and shown all the same.
    for path in first.glob("samples_made_letters_*.jsonl"):
        path.write_text(path.read_text().replace('"doc_hash": "', '"doc_hash": "x'))
    before = len(list((tmp_path / "out").glob("results_*.json")))
    assert run(*words, "--tasks", "made_letters", "--limit", "6", "--against", str(results)) == 2
    told = capsys.readouterr()
    assert "made_letters: the other run has different documents" in told.err
    assert "Traceback" not in told.err and "made_letters  acc " in told.out
    assert len(list((tmp_path / "out").glob("results_*.json"))) == before + 1
    assert run(*words, "--tasks", "made_boolean", "--limit", "2", "--against", str(results)) == 2
    told = capsys.readouterr()
    assert "no task in common: here made_boolean; there made_letters, made_texts" in told.err
    assert "loading weights" not in told.out
    (first / results.name).rename(first / "other.json")
    assert run(*words, "--tasks", "made_letters", "--against", str(first / "other.json")) == 2
    assert "there are no samples_<task>_other.json" in capsys.readouterr().err
