"""`eval_harness` as several processes: the answers of one, bit for bit; whoever is killed or fails ends all of them."""

import json
import re
import time

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: the extra `harness`")

from helpers.harness import TASKS, tiny_llama
from helpers.processes import Run, check_named, run_together
from helpers.tiny_runs import SECONDS, TIMEOUTS

# Real processes on a machine that has other things to do.
pytestmark = pytest.mark.timeout(1800)

TASK_NAMES = "made_letters,made_texts"


def command_in(folder, model, *words: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "hf_checkpoint": str(model),
        "include_path": str(TASKS),
        "output_path": str(folder / "out"),
        "eval_harness": {"log_samples": True},
        "limit": 6,
        "trainer": {
            "mp": "f32",
            "tracker": [],
            "mesh": {"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model"}},
            "distributed": TIMEOUTS,
        },
    }
    (folder / "harness.yaml").write_text(json.dumps(config))
    return ["levanter.main.eval_harness", "--config_path", str(folder / "harness.yaml"), *words]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"))


def answers(folder) -> dict:
    """Every answer, as its file has it, and what was asked."""
    (results,) = (folder / "out").glob("results_*.json")
    asked = json.loads(results.read_text())["levanter"]
    lines = {}
    for path in (folder / "out").glob("samples_*.jsonl"):
        task = path.name.removeprefix("samples_").split("_2")[0]
        lines[task] = [json.loads(line)["resps"] for line in path.read_text().splitlines()]
    return {"samples": lines, "digest": asked["request_digest"], "requests": asked["requests"]}


def as_processes(folder, model, inputs, count: int, *words: str) -> dict:
    outputs = run_together(folder, count, command_in(folder, model, *words), devices=8 // count, cache=inputs.cache)
    assert "made_letters" in outputs[0]
    assert all("made_letters" not in output for output in outputs[1:])
    return answers(folder)


@pytest.mark.slow
def test_two_processes_answer_what_one_does(tmp_path, inputs, model):
    one = as_processes(tmp_path / "one", model, inputs, 1, "--tasks", TASK_NAMES)
    assert one["requests"] == {"loglikelihood": 24, "loglikelihood_rolling": 6}
    assert as_processes(tmp_path / "two", model, inputs, 2, "--tasks", TASK_NAMES) == one


@pytest.mark.slow
def test_four_processes_answer_what_one_does(tmp_path, inputs, model):
    one = as_processes(tmp_path / "one", model, inputs, 1, "--tasks", "made")
    assert one["requests"].keys() == {"loglikelihood", "loglikelihood_rolling", "generate_until"}
    assert as_processes(tmp_path / "four", model, inputs, 4, "--tasks", "made") == one


@pytest.mark.slow
def test_other_meshes_answer_the_same(tmp_path, inputs, model):
    one = as_processes(tmp_path / "one", model, inputs, 1, "--tasks", TASK_NAMES)
    mesh = "{axes: {data: 8, model: 1}}"
    other = as_processes(tmp_path / "other", model, inputs, 2, "--tasks", TASK_NAMES, "--trainer.mesh", mesh)
    for task, documents in one["samples"].items():
        for mine, theirs in zip(documents, other["samples"][task], strict=True):
            for a, b in zip(mine, theirs, strict=True):
                (x, *flags), (y, *others) = (each[0] if isinstance(each[0], list) else each for each in (a, b))
                # Or the last digit of a float32, where a text is long.
                assert float(x) == pytest.approx(float(y), abs=1e-5, rel=1e-7) and flags == others


@pytest.mark.slow
def test_training_asks_as_one_process_does(tmp_path, inputs, model):
    found = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / "docs.jsonl").write_text(json.dumps({"text": "the cat sat on the mat, " * 200}) + "\n")
        mesh = {"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model"}}
        config = {
            "hf_checkpoint": str(model),
            "train_seq_len": 32,
            "data": {
                "components": {"docs": {"source": {"train_urls": [str(folder / "docs.jsonl")]}}},
                "cache_dir": None,
            },
            "eval_harness": {
                **{"task_spec": ["made_letters", "made_texts"], "include_path": str(TASKS)},
                **{"max_examples": 3, "log_samples": True},
            },
            "eval_harness_steps": 1,
            "trainer": {
                **{"mp": "f32", "tracker": [], "mesh": mesh, "id": "run", "num_train_steps": 2, "train_batch_size": 8},
                **{"log_dir": str(folder / "logs"), "watch": {"interval": 0}, "distributed": TIMEOUTS},
                "checkpointer": {"base_path": str(folder / "checkpoints")},
            },
        }
        (folder / "train.yaml").write_text(json.dumps(config))
        command = ["levanter.main.train_lm", "--config_path", str(folder / "train.yaml")]
        outputs = run_together(folder / "run", count, command, devices=8 // count, cache=inputs.cache)
        assert "made_letters" in outputs[0] and all("made_letters" not in each for each in outputs[1:])
        found.append({})
        for path in sorted((folder / "logs" / "run" / "harness").rglob("samples_*.jsonl")):
            lines = [json.loads(line)["resps"] for line in path.read_text().splitlines()]
            asked = path.name.split("_2")[0]
            found[-1][path.parent.name, asked] = [float(re.findall(r"-?\d+\.\d+", str(each))[0]) for each in lines]
    assert found[0].keys() == found[1].keys() and len(found[0]) == 4
    # Gradients are summed in another order: the last digit of a float32.
    for key, values in found[0].items():
        assert found[1][key] == pytest.approx(values, abs=1e-5), key


@pytest.mark.slow
def test_a_task_that_raises_ends_every_process(tmp_path, inputs, model):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "documents.jsonl").write_text('{"q": "the cat", "a": 0}\n{"q": "a dog", "a": 1}\n')
    (folder / "broken.py").write_text("def results(doc, found):\n    raise KeyError('nothing')\n")
    (folder / "raises.yaml").write_text(
        "task: raises\ndataset_path: json\ndataset_kwargs: {data_files: {test: documents.jsonl}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: q\ndoc_to_target: a\ndoc_to_choice: [' x', ' y']\n"
        "process_results: !function broken.results\n"
    )
    command = command_in(tmp_path, model, "--include_path", str(folder), "--tasks", "raises")
    with Run(tmp_path / "run", 2, command, devices=4, cache=inputs.cache) as run:
        ended = run.wait()
    assert [each.code for each in ended] == [2, 2]
    assert "error: a task failed: KeyError: 'nothing'" in ended[0].output
    assert not list((tmp_path / "out").glob("results_*"))


@pytest.mark.slow
def test_an_unknown_task_ends_every_process(tmp_path, inputs, model):
    command = command_in(tmp_path, model, "--tasks", "made_leters")
    outputs = run_together(tmp_path / "run", 4, command, devices=2, cache=inputs.cache, code=2)
    assert sum(output.count("did you mean `made_letters`") for output in outputs) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_who_is_killed_is_named(tmp_path, inputs, model, victim: int):
    command = command_in(tmp_path, model, "--tasks", "made_texts", "--limit", "60")
    with Run(tmp_path / "run", 2, command, devices=4, cache=inputs.cache) as run:
        run.wait_for(0, "loading weights: done")
        killed = run.kill(victim)
        ended = run.wait()
    if ended[victim].code == -9:
        check_named(ended, victim)
        assert max(each.at for each in ended) - killed < SECONDS + 5
    assert time.monotonic() > killed
