"""Nothing unplanned compiles: what JAX compiles in real runs is in their plans by name, but for a few scalars.

What must be planned has an argument of more than 64 KiB. The arrays of these runs are a thousandth of real ones, so it
is 64 bytes here.
"""

import math
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.compilations import Heard, heard_in
from helpers.processes import TESTS, run_together
from safetensors.numpy import load_file

from levanter.checkpoint import CheckpointSource, latest
from levanter.commands.catalog import ENTRY_POINTS

# Real processes on a machine that has other things to do.
pytestmark = pytest.mark.timeout(1800)

LARGE = 64


def heard(folder: Path, count: int, command: list[str], inputs) -> list[Heard]:
    """Runs a command of `tiny_runs` as some processes; what was compiled and planned in each.

    One process is this one, which has then forgotten what it compiled before.
    """
    module, *argv = command
    if count == 1:
        jax.clear_caches()
        # These programs compile for longer than they run.
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            code, here = heard_in(ENTRY_POINTS[module.rsplit(".", 1)[1]].load(), argv)
        finally:
            jax.config.update("jax_disable_most_optimizations", False)
            jax.clear_caches()
        assert code == 0
        return [here]
    out = folder / "heard"
    script = str(TESTS / "helpers" / "compilations.py")
    listening = [script, str(out), module.rsplit(".", 1)[1], *argv]
    run_together(folder, count, listening, devices=8 // count, cache=inputs.cache)
    return [Heard.read(folder / f"heard.{number}") for number in range(count)]


def check(found: list[Heard], *, unused: set[str] = frozenset()) -> None:
    """Every process compiles the same Programs of its plan, each once, and nothing else of any size."""
    for each in found:
        assert len(set(each.planned)) == len(each.planned), "two Programs of one name"
        assert [c for c in each.unplanned if c.largest > LARGE] == []
        assert Counter(each.names) == Counter(set(each.planned) - unused)
        assert each.names == found[0].names


def names(found: list[Heard], prefix: str) -> list[str]:
    return [name for name in found[0].names if name.startswith(prefix)]


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_eval_lm(tmp_path, inputs, count):
    found = heard(tmp_path, count, inputs.eval_lm(tmp_path), inputs)
    check(found)
    assert names(found, "score") == ["score"]
    # Whoever has all the files in one place reads every leaf straight into its shards.
    assert (names(found, "load.") == []) == (count == 1)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_eval_lm_with_weights_that_become_integers(tmp_path, inputs, count):
    found = heard(tmp_path, count, [*inputs.eval_lm(tmp_path), "--quantize", "int8"], inputs)
    check(found)
    assert names(found, "score") == ["score"]
    # Every projection and the head.
    assert len(names(found, "load.derive.")) == 8


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_eval_careless_lm(tmp_path, inputs, count):
    found = heard(tmp_path, count, inputs.eval_careless_lm(tmp_path), inputs)
    check(found)
    assert names(found, "score") == ["score"]


GENERATES = {
    "f32": ([], {}),
    "int8, pages": (
        ["--trainer.mp", "bfloat16", "--quantize", "int8"],
        {"cache_dtype": "int8", "allocation": "paged", "page_size": 4, "pages": 64},
    ),
    "bf16, pages": (["--trainer.mp", "bfloat16"], {"allocation": "paged", "page_size": 4, "pages": 64}),
    "bf16, several tokens a call": (["--trainer.mp", "bfloat16"], {"steps": 4}),
}
"""Ways to generate text: words of the command line, and of `inference`. The first is in `make test`."""


@pytest.mark.parametrize(
    ("how", "count"),
    [
        pytest.param(how, count, marks=() if count == 1 and how == next(iter(GENERATES)) else pytest.mark.slow)
        for how in GENERATES
        for count in (1, 2)
    ],
)
def test_generate(tmp_path, inputs, count, how):
    """Nothing is compiled once the Programs are: requests of every kind, rows that come and go, shared pages."""
    words, inference = GENERATES[how]
    found = heard(tmp_path, count, [*inputs.generate(tmp_path, **inference), *words], inputs)
    check(found)
    assert [name for name in names(found, "") if not name.startswith("load.")] == [
        "start_rows",
        "prefill_4x8",
        "decode_4",
    ]
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 7


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_train_lm_saves_evaluates_exports_and_goes_on(tmp_path, inputs, count):
    def train(steps: int, attempt: str) -> list[Heard]:
        command = inputs.train_lm(
            tmp_path,
            steps=steps,
            hf_save_path=str(tmp_path / "hf"),
            hf_save_steps=2,
            data={**inputs.numbers(tmp_path), "num_validation_sequences": {"numbers": 4}},
            trainer={"steps_per_eval": 2},
        )
        return heard(tmp_path / attempt, count, command, inputs)

    begun = train(3, "begun")
    check(begun)
    assert names(begun, "init") == ["init_state"] and names(begun, "evaluate") == ["evaluate"]
    # 12 tensors a layer and the embedding: those of one shape, cut alike, share a Program.
    taken = names(begun, "save.cut" if count == 1 else "save.gather")
    assert 0 < len(taken) < 12
    check(train(5, "resumed"), unused={"init_state"})
    assert {path.name for path in (tmp_path / "hf" / "run").iterdir()} == {f"step-{n}" for n in (2, 3, 4, 5)}

    (tmp_path / "one").mkdir()
    words = ["--checkpoint_path", str(tmp_path / "checkpoints" / "run"), "--output_dir", str(tmp_path / "one" / "hf")]
    (alone,) = heard(tmp_path / "one", 1, ["levanter.main.export_lm_to_hf", *words], inputs)
    assert alone.planned == () and [c for c in alone.compiled if c.largest > LARGE] == []


REPLICATED = {"axes": {"data": 8}, "param_mapping": {"embed": None}}
"""Every device holds every parameter, and of two processes each holds them all."""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_train_lm_whose_parameters_are_replicated_saves_parts_and_goes_on(tmp_path, inputs, count):
    model = {
        "type": "llama",
        **{"max_seq_len": 16, "hidden_dim": 256, "intermediate_dim": 512},
        **{"num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
    }

    def train(steps: int, attempt: str) -> list[Heard]:
        command = inputs.train_lm(tmp_path, steps=steps, model=model, trainer={"mesh": REPLICATED})
        return heard(tmp_path / attempt, count, command, inputs)

    begun = train(2, "begun")
    check(begun)
    assert names(begun, "save.") == ["save.parts"]
    check(train(4, "resumed"), unused={"init_state"})
    # Each device wrote its own part of a matrix.
    ref = latest(str(tmp_path / "checkpoints" / "run"))
    source = CheckpointSource(ref, prefix="model.")
    matrix = next(name for name, found in source.tensors.items() if math.prod(found.shape) == 256 * 512)
    assert math.prod(source._stored(matrix).chunk_layout.read_chunk.shape) == 256 * 512 // 8


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_train_lm_from_weights_of_which_a_part_is_frozen(tmp_path, inputs, count):
    def train(steps: int, attempt: str) -> list[Heard]:
        command = inputs.train_lm(
            tmp_path,
            steps=steps,
            train_seq_len=16,
            model={"type": "llama", "max_seq_len": 16},
            initialize_from_hf=str(inputs.model),
            use_hf_model_config=True,
            hf_save_path=str(tmp_path / "hf"),
            trainer={"trainable": ["norm", "attention"]},
        )
        return heard(tmp_path / attempt, count, command, inputs)

    check(train(2, "begun"))
    check(train(4, "resumed"), unused={"init_optimizer"})
    given, exported = (load_file(folder / "model.safetensors") for folder in (inputs.model, tmp_path / "hf/run/step-4"))
    assert given.keys() == exported.keys()
    same = {name for name, x in given.items() if (x.astype(np.float32) == exported[name]).all()}
    assert same == {name for name in given if not ("norm" in name or "self_attn" in name)}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_train_lm_of_adapters_saves_their_files_and_goes_on(tmp_path, inputs, count):
    def train(steps: int, attempt: str) -> list[Heard]:
        command = inputs.train_lm(
            tmp_path,
            steps=steps,
            train_seq_len=16,
            model={"type": "llama", "max_seq_len": 16},
            initialize_from_hf=str(inputs.model),
            use_hf_model_config=True,
            adapter={"type": "lora", "r": 4},
            peft_save_path=str(tmp_path / "adapters"),
        )
        return heard(tmp_path / attempt, count, command, inputs)

    check(train(2, "begun"))
    check(train(4, "resumed"), unused={"init_adapters"})
    found = load_file(tmp_path / "adapters" / "run" / "step-4" / "adapter_model.safetensors")
    assert found and all(x.any() for x in found.values())
