"""What a run of adapters leaves behind, in every command that takes a model: a checkpoint, a folder of peft, merged.

The three are one model: its checkpoint as `checkpoint_path`, its base with `adapter_path`, and its merged twin.
"""

import json
import re
import shutil
import urllib.request
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers.hf_folder import CONFIG, TEXTS, tensors, write_folder
from helpers.served import listening, loaded
from safetensors.numpy import load_file, save_file

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.evaluate import eval_lm, viz_logprobs
from levanter.commands.evaluate.gap import run
from levanter.commands.evaluate.gap.config import PerplexityGapConfig
from levanter.commands.export import export_lm_to_hf
from levanter.commands.generate import generate
from levanter.commands.memorize import eval_careless_lm
from levanter.commands.serve.serve import model_names
from levanter.commands.train.lm import train_lm
from levanter.memorization.results import FULL, BookResult

TRAINER = {"mp": "f32", "tracker": {"type": "noop"}, "per_device_eval_parallelism": 1}
MESH = {"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model"}}
TEXT = "".join(word + " " for text in TEXTS for word in text.split(" ")) * 6
WAYS = ("checkpoint", "adapter", "merged", "base")


def write(path: Path, document) -> list[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return ["--config_path", str(path)]


def train(folder: Path, **changes) -> None:
    document = {
        "hf_checkpoint": str(folder / "base"),
        "train_seq_len": 24,
        "adapter": {"type": "lora", "r": 4, "alpha": 8, "zero_init_b": True, "a_init_mode": "peft"},
        "data": {"components": {"docs": {"source": {"train_urls": [str(folder / "docs.jsonl")]}}}, "cache_dir": None},
        "optimizer": {"learning_rate": 0.02, "warmup": 0},
        "peft_save_path": str(folder / "adapters"),
        "merged_hf_save_path": str(folder / "merged"),
        "trainer": {
            **{"mp": "f32", "tracker": {"type": "noop"}, "id": "run", "mesh": MESH},
            **{"num_train_steps": 3, "train_batch_size": 8, "log_dir": str(folder / "logs")},
            "checkpointer": {"base_path": str(folder / "checkpoints")},
        },
        **changes,
    }
    words = write(folder / "train.json", document)
    assert run_entry_point(train_lm.TrainLmConfig, train_lm.main, words) == 0


BEGINS = {"type": "lora", "r": 4, "alpha": 8, "zero_init_b": True, "a_init_mode": "peft"}
WHOLE = {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["embed_tokens", "norm"]}
TRAINED = {"factors": BEGINS, "copies": {**BEGINS, **WHOLE}}


@pytest.fixture(scope="module", params=["factors", pytest.param("copies", marks=pytest.mark.slow)])
def made(request, tmp_path_factory):
    """The folder of a run that is over, with all that it wrote, and its base."""
    folder = tmp_path_factory.mktemp("adapters")
    weights = {
        name: (x if "norm" in name else 0.3 * x).astype(np.float32)
        for name, x in tensors(CONFIG, dtype=ml_dtypes.bfloat16).items()
    }
    write_folder(folder / "base", config={**CONFIG, "torch_dtype": "float32"}, weights=weights)
    (folder / "docs.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    (folder / "book.txt").write_text(TEXT)
    train(folder, adapter=TRAINED[request.param])
    return folder


def model_words(made: Path, way: str) -> dict[str, str]:
    """The keys that name the model."""
    return {
        "checkpoint": {"checkpoint_path": str(made / "checkpoints" / "run")},
        "adapter": {"hf_checkpoint": str(made / "base"), "adapter_path": str(made / "adapters" / "run" / "step-3")},
        "merged": {"hf_checkpoint": str(made / "merged" / "run" / "step-3")},
        "base": {"hf_checkpoint": str(made / "base")},
    }[way]


def evaluated(made: Path, out: Path, way: str) -> float:
    document = {
        **model_words(made, way),
        "max_eval_length": 48,
        "output_path": str(out / "eval.json"),
        "data": {"components": {"docs": {"source": {"validation_urls": [str(made / "docs.jsonl")]}}}},
        "trainer": {**TRAINER, "mesh": MESH},
    }
    assert run_entry_point(eval_lm.EvalLmConfig, eval_lm.main, write(out / "eval.yaml", document)) == 0
    return json.loads((out / "eval.json").read_text())["sets"]["docs"]["loss"]


def test_evaluation(made, tmp_path, capsys):
    found = {way: evaluated(made, tmp_path / way, way) for way in WAYS}
    for way in ("checkpoint", "adapter"):
        assert found[way] == pytest.approx(found["merged"], abs=1e-4), way
    assert abs(found["base"] - found["merged"]) > 0.1, "the adapter must matter for this to say anything"
    assert "with the adapters of" in capsys.readouterr().out


def shown(made: Path, out: Path, way: str) -> str:
    document = {
        **model_words(made, way),
        "max_eval_length": 48,
        "path": str(out / "page.html"),
        "data": {"components": {"docs": {"source": {"validation_urls": [str(made / "docs.jsonl")]}}}},
        "trainer": {**TRAINER, "mesh": MESH},
    }
    assert run_entry_point(viz_logprobs.VizLmConfig, viz_logprobs.main, write(out / "viz.yaml", document)) == 0
    return (out / "page.html").read_text()


@pytest.mark.slow
def test_pages_of_log_probabilities(made, tmp_path):
    numbers = {}
    for way in WAYS:
        found = re.findall(r"(-?\d+\.\d\d) nats, p ", shown(made, tmp_path / way, way))
        numbers[way] = np.array([float(each) for each in found])
    for way in ("checkpoint", "adapter"):
        # Two digits are shown.
        np.testing.assert_allclose(numbers[way], numbers["merged"], atol=0.0101)
    assert np.abs(numbers["base"] - numbers["merged"]).max() > 0.1


@pytest.mark.slow
def test_gaps_between_them(made, tmp_path):
    """Each beside its merged twin, on the same bytes."""
    for way in ("checkpoint", "adapter", "base"):
        (tmp_path / way).mkdir()
        document = {
            "model_a": model_words(made, way),
            "model_b": model_words(made, "merged"),
            "datasets": {"docs": {"source": {"validation_urls": [str(made / "docs.jsonl")]}}},
            **{"max_eval_length": 48, "output_path": str(tmp_path / way / "out"), "trainer": {**TRAINER, "mesh": MESH}},
        }
        words = write(tmp_path / way / "gap.yaml", document)
        assert run_entry_point(PerplexityGapConfig, run.main, words) == 0
        (row,) = json.loads((tmp_path / way / "out" / "summary.json").read_text())["datasets"]
        assert (abs(row["gap_bpb"]) < 1e-4) == (way != "base"), (way, row)


def memorized(made: Path, out: Path, way: str) -> BookResult:
    document = {
        **model_words(made, way),
        **{"book_title": "A Small Book", "txt_path": str(made / "book.txt"), "output_base_path": str(out / "book")},
        **{"chunk_size": 20, "prompt_tokens": 12, "token_mode": True, "cursor_inc_tokens": 4, "eval_batch_size": 8},
        "trainer": {"mp": "f32", "tracker": {"type": "noop"}, "mesh": MESH},
    }
    words = write(out / "memorize.yaml", document)
    assert run_entry_point(eval_careless_lm.EvalCarelessLmConfig, eval_careless_lm.main, words) == 0
    return BookResult.read(str(out / "book"))


@pytest.mark.slow
def test_memorization(made, tmp_path):
    found = {way: memorized(made, tmp_path / way, way) for way in WAYS}
    for way in ("checkpoint", "adapter"):
        np.testing.assert_allclose(found[way].log_pz(FULL), found["merged"].log_pz(FULL), atol=1e-4, rtol=1e-5)
    assert np.abs(found["base"].log_pz(FULL) - found["merged"].log_pz(FULL)).max() > 0.1


def generated(made: Path, out: Path, way: str) -> list[dict]:
    out.mkdir(parents=True)
    lines = [
        {"prompt": "the cat sat", "temperature": 0, "max_tokens": 12, "logprobs": 1, "ignore_eos": True},
        {"prompt": "def f(x):", "temperature": 0, "max_tokens": 12, "logprobs": 1, "ignore_eos": True},
    ]
    (out / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    document = {
        **model_words(made, way),
        **{"input_path": str(out / "prompts.jsonl"), "output_path": str(out / "answers.jsonl")},
        "inference": {"max_rows": 4, "prefill_chunk": 8},
        "trainer": {"mp": "f32", "tracker": {"type": "noop"}, "mesh": MESH},
    }
    words = write(out / "generate.yaml", document)
    assert run_entry_point(generate.GenerateConfig, generate.main, words) == 0
    return [json.loads(line)["choices"][0] for line in (out / "answers.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_texts(made, tmp_path):
    found = {way: generated(made, tmp_path / way, way) for way in WAYS}
    for way in ("checkpoint", "adapter"):
        for own, twin in zip(found[way], found["merged"], strict=True):
            assert own["tokens"] == twin["tokens"] and len(twin["tokens"]) == 12
            np.testing.assert_allclose(own["logprobs"], twin["logprobs"], atol=1e-4)
    others = zip(found["base"], found["merged"], strict=True)
    assert any(np.abs(np.subtract(a["logprobs"], b["logprobs"])).max() > 0.1 for a, b in others)


def served(made: Path, scratch: Path, way: str) -> tuple[str, list[float]]:
    """The text and the log-probabilities that a server answers with."""
    asked = {"prompt": "the cat sat", "temperature": 0, "max_tokens": 12, "logprobs": 1, "ignore_eos": True}
    scratch.mkdir()
    keys = {"hf_checkpoint": None, **model_words(made, way)}
    with loaded(made / "base", scratch, **keys) as model, listening(model) as server:
        document = json.dumps({"model": model_names(model.plan.work)[0], **asked}).encode()
        request = urllib.request.Request(
            f"{server.url}/v1/completions", data=document, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=100) as answer:
            (choice,) = json.loads(answer.read())["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


@pytest.mark.slow
def test_a_server(made, tmp_path):
    found = {way: served(made, tmp_path / way, way) for way in WAYS}
    for way in ("checkpoint", "adapter"):
        assert found[way][0] == found["merged"][0] and len(found["merged"][1]) == 12
        np.testing.assert_allclose(found[way][1], found["merged"][1], atol=1e-4)
    assert np.abs(np.subtract(found["base"][1], found["merged"][1])).max() > 0.1


def test_a_checkpoint_of_adapters_is_exported_merged(made, tmp_path):
    words = ["--checkpoint_path", str(made / "checkpoints" / "run"), "--output_dir", str(tmp_path / "out")]
    assert run_entry_point(export_lm_to_hf.ConvertLmConfig, export_lm_to_hf.main, words) == 0
    found, twin = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "out", made / "merged" / "run" / "step-3")
    )
    assert found.keys() == twin.keys()
    for name, x in twin.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


@pytest.fixture
def replaceable(made, tmp_path):
    """The base, to be changed; it is afterwards what it was."""
    shutil.copytree(made / "base", tmp_path / "before")
    yield made / "base"
    shutil.rmtree(made / "base", ignore_errors=True)
    shutil.copytree(tmp_path / "before", made / "base")


def test_another_base_is_refused(made, replaceable, tmp_path, capsys):
    """The folder that the checkpoint names holds another model by now."""

    def said() -> str:
        document = {
            **model_words(made, "checkpoint"),
            "max_eval_length": 48,
            "data": {"components": {"docs": {"source": {"validation_urls": [str(made / "docs.jsonl")]}}}},
            "trainer": {**TRAINER, "mesh": MESH, "log_dir": str(tmp_path)},
        }
        assert run_entry_point(eval_lm.EvalLmConfig, eval_lm.main, write(tmp_path / "eval.yaml", document)) == 2
        return capsys.readouterr().err

    # Of the same shape: its norms are others.
    weights = load_file(replaceable / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * np.float32(1.01)
    save_file(weights, replaceable / "model.safetensors", metadata={"format": "pt"})
    message = said()
    assert "its adapters were trained on another model: 1 of the " in message
    assert "(transformer.norm.weight); the one that they were trained on came from" in message
    words = [
        *("--checkpoint_path", str(made / "checkpoints" / "run"), "--output_dir", str(tmp_path / "out")),
        *("--dtype", "float32"),
    ]
    assert run_entry_point(export_lm_to_hf.ConvertLmConfig, export_lm_to_hf.main, words) == 2
    assert "its adapters were trained on another model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    # Of another architecture.
    config = json.loads((replaceable / "config.json").read_text())
    (replaceable / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    assert "rope" in said()
    # None.
    shutil.rmtree(replaceable)
    assert str(replaceable) in said()


def test_two_adapters_are_refused(made, tmp_path, capsys):
    document = {
        **model_words(made, "checkpoint"),
        "adapter_path": str(made / "adapters" / "run" / "step-3"),
        "data": {"components": {"docs": {"source": {"validation_urls": [str(made / "docs.jsonl")]}}}},
        "trainer": {**TRAINER, "mesh": MESH, "log_dir": str(tmp_path)},
    }
    assert run_entry_point(eval_lm.EvalLmConfig, eval_lm.main, write(tmp_path / "eval.yaml", document)) == 2
    assert "contains adapters, and a model can have only one set of them" in capsys.readouterr().err
