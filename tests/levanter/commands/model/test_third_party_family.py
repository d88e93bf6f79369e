"""A model family that is in a package only: every command as its users run it, with no line of the family in `src`.

The package is `tests/fixtures/heron`, with the metadata that an installer writes, on PYTHONPATH; a second one beside it
cannot be imported, and nobody minds. What is right is computed by NumPy (`helpers.heron`).
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.heron import CONFIG, logprobs, with_packages, write_heron
from helpers.hf_folder import TEXTS, byte_level_tokenizer
from helpers.train_processes import environment, logged
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[4]
TEXT = "\n".join(TEXTS) * 12
LENGTH = 48


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a checkpoint, a text, and the compiled programs of the processes."""
    where = tmp_path_factory.mktemp("heron")
    write_heron(where / "model")
    (where / "text.txt").write_text(TEXT)
    return where


def command(place: Path, name: str, document: dict, *words: str, expected: int = 0) -> str:
    """Runs a command and gives what it printed."""
    path = place / f"{re.sub(r'[^a-z_]', '', name)}.json"
    path.write_text(json.dumps(document))
    entry, *more = name.split()
    done = subprocess.run(
        [sys.executable, "-m", f"levanter.main.{entry}", *more, "--config_path", str(path), *words],
        env=environment(4, place / "compiled") | {"PYTHONPATH": with_packages("heron", "egret")["PYTHONPATH"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == expected, done.stdout
    return done.stdout


def data(place: Path, split: str) -> dict:
    return {"components": {"text": {"source": {f"{split}_urls": [str(place / "text.txt")]}}}}


TRAINER = {"mp": "f32", "mesh": {"axes": {"data": -1, "model": 2}}}


def evaluation(place: Path, model: Path) -> dict:
    return {
        "hf_checkpoint": str(model),
        "max_eval_length": LENGTH,
        "data": data(place, "validation"),
        "trainer": TRAINER | {"tracker": {"type": "noop"}, "log_dir": str(place / "logs")},
        "output_path": str(model.parent / f"{model.name}.loss.json"),
    }


def training(place: Path, name: str, **more) -> dict:
    trainer = TRAINER | {
        "id": name,
        "tracker": {"type": "json_file", "output_path": str(place / name / "logged")},
        "log_dir": str(place / name / "logs"),
        "train_batch_size": 4,
        "checkpointer": {"base_path": str(place / name / "checkpoints"), "append_run_id_to_base_path": False},
    }
    found = data(place, "train") | {"cache_dir": str(place / "cache"), "shuffle": False}
    return {"data": found, "trainer": trainer, **more}


def mean_loss(weights) -> float:
    """Of the text's tokens, scored in rows that share one token with the next, so that each but the first counts."""
    ids = [1, *byte_level_tokenizer().encode(TEXT, add_special_tokens=False).ids, 2]
    found = [logprobs(weights, ids[start : start + LENGTH]) for start in range(0, len(ids) - 1, LENGTH - 1)]
    return -float(np.mean(np.concatenate(found)))


def evaluated(place: Path, model: Path) -> float:
    document = evaluation(place, model)
    command(place, "eval_lm", document)
    return json.loads(Path(document["output_path"]).read_text())["sets"]["text"]["loss"]


def test_it_evaluates_trains_exports_and_comes_back(place):
    weights = load_file(place / "model" / "model.safetensors")
    assert evaluated(place, place / "model") == pytest.approx(mean_loss(weights), abs=2e-4)

    trained = training(place, "trained", hf_checkpoint=str(place / "model"), optimizer={"learning_rate": 0.01})
    command(place, "train_lm", trained, "--trainer.num_train_steps", "4")
    losses = [first for first, *_ in logged(place / "trained").values()]
    ids = [1, *byte_level_tokenizer().encode(TEXT, add_special_tokens=False).ids, 2]
    rows = [ids[n * LENGTH : (n + 1) * LENGTH] for n in range(4)]
    assert losses[0] == pytest.approx(-np.mean([logprobs(weights, row) for row in rows]), abs=2e-4)
    assert len(losses) == 4 and losses[-1] < losses[0]

    exported = place / "exported"
    saved = {"checkpoint_path": str(place / "trained" / "checkpoints"), "output_dir": str(exported)}
    command(place, "export_lm_to_hf", saved)
    written = json.loads((exported / "config.json").read_text())
    assert {name: written[name] for name in CONFIG if name != "torch_dtype"} == {
        name: value for name, value in CONFIG.items() if name != "torch_dtype"
    }
    after = load_file(exported / "model.safetensors")
    assert {name: each.shape for name, each in after.items()} == {name: each.shape for name, each in weights.items()}
    assert all((after[name] != weights[name]).any() for name in weights)
    # What is read out of the export is what training had: the family's two directions are each other's inverse.
    assert evaluated(place, exported) == pytest.approx(mean_loss(after), abs=2e-4)

    still = {"learning_rate": 0.0, "weight_decay": 0.0}
    command(
        place,
        "train_lm",
        training(place, "untouched", hf_checkpoint=str(exported), optimizer=still),
        "--trainer.num_train_steps",
        "1",
    )
    again = {"checkpoint_path": str(place / "untouched" / "checkpoints"), "output_dir": str(place / "again")}
    command(place, "export_lm_to_hf", again)
    back = load_file(place / "again" / "model.safetensors")
    assert back.keys() == after.keys()
    assert all(back[name].tobytes() == after[name].tobytes() for name in after)
    assert json.loads((place / "again" / "config.json").read_text()) == written


def planned(place: Path, target: str) -> dict:
    """The verdict of `plan`, whose Programs a worker process compiled, from its own reading of the configuration."""
    path = place / f"{target}.json"
    command(place, "plan eval_lm", evaluation(place, place / "model"), "--target", target, "--json", str(path))
    (verdict,) = json.loads(path.read_text())["verdicts"]
    return verdict


def test_the_compile_worker_finds_it(place):
    verdict = planned(place, "local")
    assert verdict["exit_code"] == 0 and verdict["bytes"]["source"] == "compiled", verdict


@pytest.mark.aot
def test_the_compile_worker_finds_it_for_a_pod(place):
    verdict = planned(place, "v5e-4")
    assert verdict["exit_code"] == 0 and verdict["bytes"]["source"] == "compiled", verdict


@pytest.mark.slow
def test_training_from_nothing_by_its_type(place):
    model = {"type": "heron", "num_layers": 1, "calm": 0.25, "max_seq_len": 32}
    document = training(place, "scratch", model=model)
    document["data"] |= {"tokenizer": str(place / "model")}
    said = command(place, "train_lm", document, "--trainer.num_train_steps", "2", "--model.plumage", "2")
    assert len(logged(place / "scratch")) == 2, said


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("hern", "did you mean `heron`"),
        ("egret", "comes from the package egret-models 0.1 (egret.family:EGRET), which cannot be imported"),
    ],
)
def test_what_cannot_be_had_is_bad_input(place, kind, message):
    said = command(place, "train_lm", training(place, "refused", model={"type": kind}), expected=2)
    assert message in said and "Traceback" not in said
