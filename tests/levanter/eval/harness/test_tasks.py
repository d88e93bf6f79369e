"""lm_eval's tasks: the made ones are as their script makes them; broken ones are said with their names."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: the extra `harness`")

from helpers.harness import TASKS

from levanter.eval.harness import tasks
from levanter.eval.harness.config import HarnessConfig, HarnessTaskConfig
from levanter.eval.harness.encoding import HarnessError
from levanter.eval.harness.task_discovery import discover_tasks
from levanter.eval.harness.tasks import UnavailableTaskError, load_tasks

SOUND = (
    "task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}\ntest_split: test\n"
    "output_type: multiple_choice\ndoc_to_text: q\ndoc_to_target: a\ndoc_to_choice: [' x', ' y']\n"
)
LINES = '{"q": "a", "a": 0}\n{"q": "b", "a": 1}\n'


@pytest.fixture(autouse=True)
def without_lm_evals_own(monkeypatch):
    """Reading the 14,000 names that lm_eval has takes longer than all of this."""
    create = tasks._Manager._create_manager
    monkeypatch.setattr(tasks._Manager, "_create_manager", lambda self, *, defaults: create(self, defaults=False))


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


def error_of(folder: Path, text: str, name: str = "mine", **files: str) -> str:
    """The error of loading a task with these files beside it, and what it was."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)
    (folder / f"{name}.jsonl").write_text(LINES)
    for module, content in files.items():
        (folder / f"{module}.py").write_text(content)
    with pytest.raises(HarnessError) as info:
        load_tasks(HarnessConfig(task_spec=[name]), [str(folder)])
    return str(info.value)


MINE = SOUND.format(name="mine")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("task: [mine\n", "mine.yaml: not a task's file (while parsing a flow sequence"),
        (f"include: absent.yaml\n{MINE}", "mine.yaml: not a task's file ([Errno 2] No such file or directory"),
        (f"include: mine.yaml\n{MINE}", "mine.yaml: not a task's file (Include cycle at "),
        (MINE.replace("task: mine", "task: 7"), "mine.yaml: task: int, expected a name (text)"),
        (MINE.replace("task: mine", "task: [mine]"), "mine.yaml: task: list, expected a name (text)"),
        ("- task: mine\n", "mine.yaml: not a task's file (Expected YAML dict from "),
        (f"{MINE}tag: 3\n", "mine.yaml: not a task's file ('int' object is not iterable)"),
    ],
)
def test_a_file_that_is_no_task_is_named_with_its_reason(tmp_path: Path, text: str, expected: str):
    message = error_of(tmp_path, text)
    assert (
        message.startswith("eval_harness.task_spec: mine: no task, group or tag of this name") and expected in message
    )


@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "exit()", "import os; os._exit(0)", "raise SystemExit"])
@pytest.mark.parametrize("where", ["module", "function"])
def test_a_task_that_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, where: str):
    # A tracker that notes how the process ends puts its own function there, as wandb's does.
    end = sys.exit
    monkeypatch.setattr(sys, "exit", lambda status=None: end(status))
    # A module of its own for each case: Python keeps what it has imported.
    module = f"ends_{abs(hash((code, where)))}"
    inside = f"def text(doc):\n    {code.replace('; ', chr(10) + '    ')}\n"
    content = f"{code}\ndef text(doc):\n    return 'x'\n" if where == "module" else inside
    message = error_of(
        tmp_path, MINE.replace("doc_to_text: q", f"doc_to_text: !function {module}.text"), **{module: content}
    )
    kind = next((call for call in ("os._exit(0)", "sys.exit(0)") if call in code), "SystemExit")
    assert f"mine: a task's code ends the process: {kind}" in message and f"{module}.py, line " in message


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (
            "[{metric: acccc, aggregation: mean}]",
            "mine: metric_list: acccc: no metric of this name; did you mean `acc`",
        ),
        ("[{metric: acccc}]", "mine: metric_list: acccc: no metric of this name; did you mean `acc`"),
        ("[{metric: acc, aggregation: meen}]", "mine: metric_list: acc: no such aggregation; known are "),
        ("[{metric: acc}, {metric: bleu}]", "metric_list: bleu: a task of output_type multiple_choice has no such"),
        ("[{metric: word_perplexity}]", "word_perplexity: a task of output_type multiple_choice has no such number"),
    ],
)
def test_a_metric_without_a_number(tmp_path: Path, monkeypatch, metrics: str, expected: str):
    # lm_eval looks for unknown metrics on the Hub, with a package whose import takes half a minute.
    monkeypatch.setitem(sys.modules, "evaluate", None)
    assert expected in error_of(tmp_path, f"{MINE}metric_list: {metrics}\n")


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('touch escaped') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 'a' * 1000000000000 }}",
        "{% for i in range(1000000000) %}a{% endfor %}",
    ],
)
def test_templates_run_in_the_sandbox(tmp_path: Path, template: str):
    message = error_of(tmp_path, MINE.replace("doc_to_text: q", f"doc_to_text: {json.dumps(template)}"))
    assert "mine: a task failed: " in message and not list(tmp_path.rglob("escaped"))


def test_the_sandbox_renders_as_lm_eval(tmp_path: Path):
    """Every template of the demonstration tasks, and what differs from chat templates: white space, JSON, undefined."""
    import lm_eval.utils
    from jinja2 import UndefinedError

    templates = [
        "{% if a %}\n  {{ a }}\n  {% endif %}\n", "{{ a | tojson }}", "{{ a | regex_replace('[aeiou]', '*') }}",
        "{{ choices | join(', ') }} {{ a.strip().upper() }}", "{% for c in choices %}{{ loop.index }} {% endfor %}",
    ]  # fmt: skip
    doc = {"a": " <b> & 'ö' ", "choices": ["x", "y"]}
    expected = [lm_eval.utils.apply_template(template, doc) for template in templates]
    with tasks.task_code():
        assert [lm_eval.utils.apply_template(template, doc) for template in templates] == expected
        with pytest.raises(UndefinedError):
            lm_eval.utils.apply_template("{{ absent }}", doc)


KEYS = (
    "dataset_path", "dataset_kwargs", "test_split", "output_type", "doc_to_text", "doc_to_target", "doc_to_choice",
    "num_fewshot", "metric_list", "filter_list", "generation_kwargs", "fewshot_config", "repeats", "description",
    "target_delimiter", "should_decontaminate", "validation_split", "metadata", "tag", "include", "process_docs",
)  # fmt: skip
VALUES = ("3", "-1", "[]", "{}", "[3]", "{a: 1}", "null", "true", "'{{'", "'{{ q.zz }}'", "''", "[{}]", "1.5", "x")


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 200), marks=pytest.mark.slow)], ids=len)
def test_drawn_values_of_a_tasks_keys(tmp_path: Path, seeds):
    """Whatever a task's file has, it is loaded, or refused with its name."""
    dice = random.Random(f"task files {seeds}")
    for seed in seeds:
        lines = dict(line.split(": ", 1) for line in MINE.splitlines())
        for key in dice.sample(KEYS, dice.randrange(1, 3)):
            lines[key] = dice.choice(VALUES)
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "mine.jsonl").write_text(LINES)
        (folder / "mine.yaml").write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
        actual = discover_tasks(HarnessConfig(task_spec=["mine"], max_examples=2), [str(folder)])
        assert actual.error is None or "task_spec: " in actual.error, lines
