"""Adapters that cannot be: of what is asked for, and of what is in the files. Each is one error, exit code 2."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.adapted_models import write_adapter
from helpers.adapter_runs import tiny_llama
from helpers.attacks import Attack, judge, strike
from helpers.train_processes import write_run
from safetensors.numpy import load_file, save_file

BAD = 2
BEGINS = {"type": "lora", "r": 4, "alpha": 8, "zero_init_b": True, "a_init_mode": "peft"}
STARTS = ("training:", "loading weights")
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """A tiny Llama, one whose head is its table, and an adapter of q of the first."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("bases")
    rng, factors = np.random.default_rng(0), {}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.q_proj"
        for which, shape in (("A", (4, 16)), ("B", (16, 4))):
            factors[f"{name}.lora_{which}"] = rng.standard_normal(shape).astype(np.float32)
    return {
        "plain": tiny_llama(folder / "plain"),
        "tied": tiny_llama(folder / "tied", tie_word_embeddings=True),
        "other": tiny_llama(folder / "other", hidden_size=32),
        "adapter": write_adapter(folder / "adapter", factors, r=4, lora_alpha=8, target_modules=["q_proj"]),
    }


def training(folder: Path, bases: dict[str, Path], *more: str, base: str = "plain", **adapter: object) -> list[str]:
    """A run with an adapter."""
    run = write_run(folder / "run", steps=2)
    begun = ["--initialize_from_hf", str(bases[base]), "--use_hf_model_config", "true"]
    asked = {key: value for key, value in {**BEGINS, **adapter}.items() if value is not None}
    block = ["--adapter", json.dumps(asked)] if adapter.get("type", "lora") else []
    return ["--config_path", str(run), *begun, *block, "--trainer.mesh.axes", "{data: 8}", *more]


def asked(says: str | tuple[str, ...], *more: str, **adapter: object):
    return partial(training, **{"base": "plain", **adapter}), more, (says,) if isinstance(says, str) else says


ASKED = {
    "r 0": asked("adapter.r: must be at least 1, got 0", r=0),
    "r above a side": asked("adapter.r: rank 17 of transformer.layers.stacked.self_attn.k_proj is above 8", r=17),
    "alpha 0": asked("adapter.alpha: must be positive, got 0", alpha=0),
    "no target": asked("adapter.target_modules is empty, so nothing would be trained", target_modules=[]),
    "all excluded": asked(
        "adapter: no projection is left that would get an adapter",
        exclude_modules=["self_attn", "mlp", "lm_head"],
    ),
    "a bias": asked("'q_proj.bias' is a bias, which gets no adapter", target_modules=["q_proj.bias"]),
    "a norm": asked(
        "'input_layernorm' is no projection, and gets no adapter; adapter.modules_to_save: [input_layernorm]",
        target_modules=["input_layernorm"],
    ),
    "a table": asked("adapter.modules_to_save: [embed_tokens] trains it whole", target_modules=["embed_tokens"]),
    "a tied head": asked(
        "'lm_head' is the output head, which is the embedding table in this model (tied weights): with an adapter one "
        "matrix would have two meanings; adapter.modules_to_save: [embed_tokens] trains it whole",
        base="tied",
        target_modules=["lm_head"],
    ),
    "a tied head, whole": asked(
        "adapter.modules_to_save: 'lm_head' is the output head, which is the embedding table in this model",
        base="tied",
        modules_to_save=["lm_head"],
    ),
    "both factors 0": asked("both factors would begin as 0", a_init_mode="zero"),
    "neither factor 0": asked("neither factor would begin as 0", zero_init_b=False),
    "two at once": asked(
        ("'porj' names no projection", "'nrm' names no projection", "rank 99 of "),
        target_modules=["porj", "nrm", "q_proj"],
        r=99,
    ),
    "peft_save_path without": asked(
        "peft_save_path: saves adapters, and the run trains none", "--peft_save_path", "x", type=None
    ),
    "merged_hf_save_path without": asked(
        "merged_hf_save_path: saves adapters, and the run trains none", "--merged_hf_save_path", "x", type=None
    ),
    "hf_save_path with": asked("hf_save_path: exports a whole model, and the run trains", "--hf_save_path", "x"),
    "int8 and whole": asked(
        "adapter.modules_to_save: lm_head.weight would be 8-bit integers",
        base_dtype="int8",
        modules_to_save=["lm_head"],
    ),
}  # fmt: skip


def row(name: str, bases: dict[str, Path]) -> Attack:
    words, more, says = ASKED[name]
    return Attack(
        name=name,
        command="train_lm",
        words=lambda folder: words(folder, bases, *more),
        code=BAD,
        says=says,
        never=STARTS,
    )


QUICK = ("r above a side", "a tied head", "two at once")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ASKED])
def test_what_is_asked_for(name, bases, tmp_path):
    attack = row(name, bases)
    judge(attack, strike(attack, tmp_path))


def tensors(change: Callable[[dict[str, np.ndarray]], object]):
    """A change to the tensors of an adapter's folder."""

    def made(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        found = load_file(file)
        change(found)
        save_file(found, file, metadata={"format": "pt"})

    return made


def document(**keys: object):
    def made(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return made


def cut(name: str, size: int):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def doubled(found: dict[str, np.ndarray]) -> None:
    for name, x in list(found.items()):
        found[name] = np.concatenate([x, x], axis=1 if "lora_A" in name else 0)


FILES = {
    "another shape": (tensors(doubled), "does not go with the model"),
    "another rank": (document(r=8), "rank 4, but adapter_config.json says 8"),
    "another family": (
        tensors(lambda t: t.update({key.replace("self_attn.q_proj", "attn.c_attn"): t.pop(key) for key in list(t)})),
        "does not go with the model",
    ),
    "left over": (tensors(lambda t: t.update({"base_model.model.v_head.weight": np.zeros(3, np.float32)})),
                  "v_head.weight"),
    "a layer is missing": (tensors(lambda t: [t.pop(key) for key in list(t) if "layers.1" in key]), "has no adapter"),
    "a copy is missing": (document(modules_to_save=["embed_tokens"]),
                          "modules_to_save: 'embed_tokens', and it has no tensor of a module of that name"),
    "a copy of another shape": (
        tensors(lambda t: t.update({"base_model.model.model.embed_tokens.weight": np.zeros((77, 16), np.float32)})),
        "its vocabulary was resized from 61",
    ),
    "not finite": (tensors(lambda t: t[f"{Q}.lora_A.weight"].__setitem__((0, 0), np.nan)), "not finite"),
    "config cut": (cut("adapter_config.json", 30), "adapter_config.json"),
    "weights cut": (cut("adapter_model.safetensors", 700), "adapter_model.safetensors"),
    "alpha 0": (document(lora_alpha=0), "lora_alpha must be above 0 and at most 1e6, got 0"),
    "dora": (document(use_dora=True), "use_dora: True is not implemented"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
    "a model": (lambda folder: ((folder / "adapter_config.json").unlink(), (folder / "config.json").write_text("{}")),
                "it is a model and not an adapter"),
}  # fmt: skip
TAKEN = {
    "export_lm_to_hf": lambda folder, bases, adapter: [
        "--hf_checkpoint", str(bases["plain"]), "--adapter_path", str(adapter),
        "--output_dir", str(folder / "out"), "--save_tokenizer", "false",
    ],
    "train_lm": lambda folder, bases, adapter: training(
        folder, bases, target_modules=["q_proj"], initialize_from=str(adapter)
    ),
    "eval_lm": lambda folder, bases, adapter: [
        "--hf_checkpoint", str(bases["plain"]), "--adapter_path", str(adapter), "--trainer.mesh.axes", "{data: 8}",
        "--data", '{tokenizer: passthrough, vocab_size: 61, cache_dir: null, components: {n: {type: direct, datasets: '
        '{validation: ["1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17"]}}}}', "--max_eval_length", "16",
        "--trainer.per_device_eval_parallelism", "1",
    ],
}  # fmt: skip
CASES = [(command, name) for command in TAKEN for name in FILES]
QUICK_FILES = (("export_lm_to_hf", "left over"), ("train_lm", "another rank"))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        pytest.param(*case, id=" ".join(case), marks=() if case in QUICK_FILES else (pytest.mark.slow,))
        for case in CASES
    ],
)
def test_what_is_in_the_files(command, name, bases, tmp_path):
    change, says = FILES[name]
    adapter = tmp_path / "adapter"
    shutil.copytree(bases["adapter"], adapter)
    change(adapter)
    attack = Attack(
        name=name, command=command, words=lambda folder: TAKEN[command](folder, bases, adapter), code=BAD, says=(says,)
    )
    judge(attack, strike(attack, tmp_path))
    assert not (tmp_path / "out").exists()
