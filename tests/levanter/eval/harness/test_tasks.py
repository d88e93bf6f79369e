"""lm_eval's tasks: the made ones are as their script makes them; broken ones are said with their names."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: the extra `harness`")

from helpers.harness import TASKS

from levanter.eval.harness import tasks
from levanter.eval.harness.config import HarnessConfig, HarnessTaskConfig
from levanter.eval.harness.encoding import HarnessError
from levanter.eval.harness.tasks import UnavailableTaskError, load_tasks

SOUND = (
    "task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}\ntest_split: test\n"
    "output_type: multiple_choice\ndoc_to_text: q\ndoc_to_target: a\ndoc_to_choice: [' x', ' y']\n"
)
LINES = '{"q": "a", "a": 0}\n{"q": "b", "a": 1}\n'


@pytest.fixture(autouse=True)
def without_lm_evals_own(monkeypatch):
    """Reading the 14,000 names that lm_eval has takes longer than all of this."""
    made = tasks._Manager._made
    monkeypatch.setattr(tasks._Manager, "_made", lambda self, *, defaults: made(self, defaults=False))


def test_the_made_tasks_are_what_their_script_makes(tmp_path):
    spec = importlib.util.spec_from_file_location("make_tasks", TASKS.parent / "make_tasks.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in TASKS.iterdir()}


def test_a_group_is_its_tasks_and_changes_are_over_their_files():
    found = load_tasks(HarnessConfig(task_spec=["made"]), [str(TASKS)])
    assert len(found.tasks) == 6 and set(found.documents(7).values()) == {7}
    assert found.kinds == {"loglikelihood", "loglikelihood_rolling", "generate_until"}
    changed = HarnessTaskConfig(task="made_sums", doc_to_text="{{a}} plus {{b}} is", additional_stop_strings=["!"])
    found = load_tasks(HarnessConfig(task_spec=[changed]), [str(TASKS)])
    (task,) = found.tasks.values()
    assert task.get_config("doc_to_text") == "{{a}} plus {{b}} is" and task.get_config("test_split") == "test"
    assert found.stops == {"made_sums": ("!",)} and found.groups == {}


@pytest.mark.parametrize(
    ("change", "lines", "error", "said"),
    [
        (("", ""), '{"q": "a", "a": 0}\n{"q": \n', HarnessError, "a task failed: DatasetGenerationError: "),
        (("", ""), None, UnavailableTaskError, "its documents are not available here (Unable to find '"),
        (("", ""), "", HarnessError, "a task failed: "),
        (("test_split: test", "test_split: train"), LINES, HarnessError, "a task failed: KeyError: 'train'"),
        (("doc_to_text: q", "doc_to_text: '{{zzz}}'"), LINES, HarnessError, "UndefinedError: 'zzz' is undefined"),
        (("multiple_choice", "nonsense"), LINES, HarnessError, "Got invalid output_type 'nonsense'"),
    ],
)
def test_a_broken_task_is_said_with_its_name(tmp_path: Path, change, lines, error, said: str):
    (tmp_path / "mine.yaml").write_text(SOUND.format(name="mine").replace(*change))
    if lines is not None:
        (tmp_path / "mine.jsonl").write_text(lines)
    with pytest.raises(error) as told:
        load_tasks(HarnessConfig(task_spec=["mine"]), [str(tmp_path)])
    assert str(told.value).startswith("eval_harness.task_spec: mine: ") and said in str(told.value)


def test_a_file_that_is_no_yaml_hides_no_other(tmp_path: Path):
    (tmp_path / "broken.yaml").write_text("task: [broken\n")
    (tmp_path / "mine.yaml").write_text(SOUND.format(name="mine"))
    (tmp_path / "mine.jsonl").write_text(LINES)
    assert load_tasks(HarnessConfig(task_spec=["mine"]), [str(tmp_path)]).documents(None) == {"mine": 2}


def test_documents_of_the_hub_come_from_its_cache(tmp_path: Path):
    """As `datasets` keeps them; there is no network here."""
    import datasets

    cache = tmp_path / "cache"
    (tmp_path / "mine.jsonl").write_text(LINES)
    with tasks.silence_lm_eval():
        datasets.load_dataset("json", data_files={"test": str(tmp_path / "mine.jsonl")}, cache_dir=str(cache))
    (arrow,) = cache.rglob("*.arrow")
    kept = cache / "acme___made" / "default" / "0.0.0" / ("0" * 40)
    kept.parent.mkdir(parents=True)
    arrow.parent.rename(kept)
    (kept / arrow.name).rename(kept / "made-test.arrow")
    info = json.loads((kept / "dataset_info.json").read_text())
    (kept / "dataset_info.json").write_text(json.dumps({**info, "dataset_name": "made"}))
    (tmp_path / "mine.jsonl").unlink()
    for name in ("made", "absent"):
        text = SOUND.format(name=name).replace("dataset_path: json", f"dataset_path: acme/{name}")
        text = text.replace(f"{{data_files: {{test: {name}.jsonl}}}}", f"{{cache_dir: {cache}}}")
        (tmp_path / f"{name}.yaml").write_text(text)
    found = load_tasks(HarnessConfig(task_spec=["made"]), [str(tmp_path)])
    assert found.documents(None) == {"made": 2}
    with pytest.raises(UnavailableTaskError, match="absent: its documents are not available here"):
        load_tasks(HarnessConfig(task_spec=["absent"]), [str(tmp_path)])
