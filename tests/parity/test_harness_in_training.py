"""The harness between steps, and of what a run of adapters leaves behind: one model, whoever asks it.

What training logs under a step are the answers of `eval_harness` to that step's checkpoint, to its adapter beside the
base, and to the merged model.
"""

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: the extra `harness`")

from helpers.harness import TASKS, tiny_llama
from helpers.hf_folder import TEXTS

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.harness import eval_harness
from levanter.commands.harness.config import EvalHarnessConfig
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.lm import train_lm
from levanter.config import load_written
from levanter.eval.harness import tasks
from levanter.plan.target_from_name import pod_target

MESH = {"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model"}}
TEXT = "".join(word + " " for text in TEXTS for word in text.split(" ")) * 12
ASKED = ("made_letters", "made_texts")
BLOCK = {
    "task_spec": list(ASKED),
    "include_path": str(TASKS),
    "max_examples": 4,
    "log_samples": True,
    "bootstrap_iters": 10,
}


@pytest.fixture(autouse=True, scope="module")
def without_lm_evals_own():
    """Reading the 14,000 names that lm_eval has takes longer than all of this."""
    with pytest.MonkeyPatch.context() as patch:
        create = tasks._Manager._create_manager
        patch.setattr(tasks._Manager, "_create_manager", lambda self, *, defaults: create(self, defaults=False))
        yield


def document(folder: Path, base: Path, *, steps: int = 3, **changes) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "docs.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    trainer = {
        **{"mp": "f32", "tracker": {"type": "json_file", "output_path": str(folder / "tracker")}, "id": "run"},
        **{"mesh": MESH, "num_train_steps": steps, "train_batch_size": 8, "log_dir": str(folder / "logs")},
        "watch": {"interval": 0},
        "checkpointer": {"base_path": str(folder / "checkpoints")},
    }
    config = {
        "hf_checkpoint": str(base),
        "train_seq_len": 24,
        "data": {"components": {"docs": {"source": {"train_urls": [str(folder / "docs.jsonl")]}}}, "cache_dir": None},
        "optimizer": {"learning_rate": 0.02, "warmup": 0},
        "eval_harness": BLOCK,
        "eval_harness_steps": 2,
        "trainer": trainer,
        **changes,
    }
    (folder / "run.json").write_text(json.dumps(config))
    return ["--config_path", str(folder / "run.json")]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The folder of a run of adapters that is over, and its base."""
    folder = tmp_path_factory.mktemp("asked")
    tiny_llama(folder / "base")
    adapter = {"type": "lora", "r": 4, "alpha": 8, "zero_init_b": True, "a_init_mode": "peft"}
    saves = {"peft_save_path": str(folder / "adapters"), "merged_hf_save_path": str(folder / "merged")}
    # Rows of the run have 24 tokens; the tasks are asked in those of the model.
    block = {**BLOCK, "max_length": 128}
    words = document(folder, folder / "base", adapter=adapter, eval_harness=block, **saves)
    assert run_entry_point(TrainLmConfig, train_lm.main, words) == 0
    return folder


def answers(folder: Path) -> dict[str, list]:
    """Every answer of a run, by task and document."""
    found = {}
    for path in folder.glob("samples_*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.name.removeprefix("samples_").split("_2")[0]] = [line["resps"] for line in lines]
    return found


def numbers(found: dict[str, list]) -> list[float]:
    """Their log-probabilities in order."""
    flat = [each[0] for task in sorted(found) for resps in found[task] for each in resps]
    return [float(each[0] if isinstance(each, list) else each) for each in flat]


def logged(folder: Path) -> dict[int, dict[str, float]]:
    """What the tracker heard of the harness, by step."""
    found: dict[int, dict[str, float]] = {}
    for line in (folder / "tracker" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        mine = {key: value for key, value in row.get("metrics", {}).items() if key.startswith("lm_eval/")}
        if mine:
            found[row["step"]] = mine
    return found


def asked_alone(made: Path, out: Path, **model: str) -> dict[str, list]:
    config = {
        **model,
        "eval_harness": {**BLOCK, "max_length": 128},
        "output_path": str(out / "out"),
        "trainer": {"mp": "f32", "tracker": [], "mesh": MESH},
    }
    out.mkdir(parents=True)
    (out / "harness.json").write_text(json.dumps(config))
    assert run_entry_point(EvalHarnessConfig, eval_harness.main, ["--config_path", str(out / "harness.json")]) == 0
    return answers(out / "out")


def test_steps_say_what_their_checkpoint_says(made, tmp_path):
    """The checkpoint of adapters, the adapter beside its base, and the merged model too."""
    steps = {path.name for path in (made / "logs" / "run" / "harness").iterdir()}
    assert steps == {"step-2", "step-3"}
    by_steps = answers(made / "logs" / "run" / "harness" / "step-3")
    assert by_steps.keys() == set(ASKED) and len(numbers(by_steps)) == 4 * 4 + 4
    ways = {
        "checkpoint": {"checkpoint_path": str(made / "checkpoints" / "run")},
        "adapter": {
            "hf_checkpoint": str(made / "base"),
            "adapter_path": str(made / "adapters" / "run" / "step-3"),
        },
        "merged": {"hf_checkpoint": str(made / "merged" / "run" / "step-3")},
    }
    for way, model in ways.items():
        found = asked_alone(made, tmp_path / way, **model)
        assert numbers(found) == pytest.approx(numbers(by_steps), abs=1e-4, rel=1e-6), way
    base = asked_alone(made, tmp_path / "base", hf_checkpoint=str(made / "base"))
    apart = max(abs(a - b) for a, b in zip(numbers(base), numbers(by_steps), strict=True))
    assert apart > 0.1, "the adapter must matter for this to say anything"


def test_trackers_hear_lm_evals_names(made):
    found = logged(made)
    # Numbers of steps are those of the last step taken, from 0.
    assert found.keys() == {1, 2}
    for metrics in found.values():
        assert {"lm_eval/made_letters/acc", "lm_eval/made_letters/acc_stderr", "lm_eval/averages/macro_avg_acc"} <= set(
            metrics
        )
    (results,) = (made / "logs" / "run" / "harness" / "step-2").glob("results_*.json")
    told = json.loads(results.read_text())
    assert told["results"]["made_letters"]["acc,none"] == found[1]["lm_eval/made_letters/acc"]
    assert told["model_name"] == "run, step 2" and told["levanter"]["requests"]["loglikelihood"] == 16


@pytest.mark.slow
def test_a_resumed_run_asks_on(tmp_path):
    """Whole weights this time: what is asked behind a resumption is what is asked without one."""
    base = tiny_llama(tmp_path / "base")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_entry_point(TrainLmConfig, train_lm.main, document(whole, base, steps=4)) == 0
    words = document(parts, base, steps=4)
    stopped = [*words, "--trainer.num_train_steps", "2", "--trainer.resume_with_changes", "true"]
    assert run_entry_point(TrainLmConfig, train_lm.main, stopped) == 0
    again = [*words, "--trainer.resume_with_changes", "true"]
    assert run_entry_point(TrainLmConfig, train_lm.main, again) == 0
    assert logged(parts).keys() == logged(whole).keys() == {1, 3}
    for step in (2, 4):
        one, other = (answers(each / "logs" / "run" / "harness" / f"step-{step}") for each in (whole, parts))
        assert one.keys() == set(ASKED) and all(math.isfinite(each) for each in numbers(one))
        if step == 2:
            # Behind it the schedule of a run of two steps and that of one of four differ.
            assert [len(each) for each in one.values()] == [len(each) for each in other.values()]


@pytest.mark.slow
def test_texts_between_steps_are_those_of_the_export(tmp_path):
    """A task that generates: every text is that of `eval_harness` over the exported model, one engine for all."""
    base = tiny_llama(tmp_path / "base")
    block = {**BLOCK, "task_spec": ["made_sums", "made_letters"], "max_length": 64}
    changes = {"hf_save_path": str(tmp_path / "exports"), "hf_save_steps": 2, "eval_harness": block}
    sampling = {"temperature": 0.0, "max_tokens": 8}
    samples = {"sample_prompts": ["the cat"], "sample_every": 2, "generation": {"sampling": sampling}}
    words = document(tmp_path / "run", base, steps=2, **changes, **samples)
    assert run_entry_point(TrainLmConfig, train_lm.main, words) == 0
    by_step = answers(tmp_path / "run" / "logs" / "run" / "harness" / "step-2")
    assert by_step.keys() == {"made_sums", "made_letters"}
    assert any(text for resps in by_step["made_sums"] for text in resps[0]), "empty texts say nothing"
    alone = {
        "hf_checkpoint": str(tmp_path / "exports" / "run" / "step-2"),
        "eval_harness": block,
        "output_path": str(tmp_path / "out"),
        "trainer": {"mp": "f32", "tracker": [], "mesh": MESH},
    }
    (tmp_path / "harness.json").write_text(json.dumps(alone))
    assert run_entry_point(EvalHarnessConfig, eval_harness.main, ["--config_path", str(tmp_path / "harness.json")]) == 0
    exported = answers(tmp_path / "out")
    assert exported["made_sums"] == by_step["made_sums"]
    of_letters = [{"made_letters": found["made_letters"]} for found in (exported, by_step)]
    assert numbers(of_letters[0]) == pytest.approx(numbers(of_letters[1]), abs=1e-4, rel=1e-6)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (
            {"task_spec": ["made_leters"]},
            "made_leters: no task, group or tag of this name; did you mean `made_letters`",
        ),
        (
            {"apply_chat_template": True, "max_length": 4, "task_spec": ["made_endings"]},
            "made_endings, document 0: the",
        ),
        ({"include_path": "/not/here"}, "include_path: /not/here: no such folder"),
    ],
)
def test_bad_input_is_said_before_a_step(tmp_path, capsys, block: dict, said: str):
    base = tiny_llama(tmp_path / "base")
    words = document(tmp_path / "run", base, eval_harness={**BLOCK, **block})
    assert run_entry_point(TrainLmConfig, train_lm.main, words) == 2
    told = capsys.readouterr()
    assert said in told.err and "Traceback" not in told.err and "loading weights" not in told.out


def test_its_programs_are_in_the_plan(tmp_path):
    base = tiny_llama(tmp_path / "base")
    loaded = load_written(TrainLmConfig, document(tmp_path / "run", base))
    plan = train_lm.describe(loaded.config, pod_target("v4-16"), written=loaded.written)
    assert not plan.errors
    scores = [program.name for program in plan.computing if program.name.startswith("score_")]
    assert scores and len(scores) <= 6
    states = plan.work.state_plan
    beside = states.resident.bytes_per_device - states.parameters.bytes_per_device
    assert {plan.coresident_bytes[name] for name in scores} == {beside}
    runs = {each.program: each.executions for each in plan.workloads if each.program in scores}
    assert runs.keys() == set(scores) and sum(runs.values()) >= 2
