"""Numbers that are none: in weights they are refused with count and place, in results the run ends with exit code 1."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers.attacks import Attack, judge, strike, table
from helpers.hf_folder import CONFIG, tensors, write_folder
from helpers.tiny_runs import Inputs, make_inputs

BAD, INTERNAL = 2, 1
DOWN = "model.layers.1.mlp.down_proj.weight"


def weights(damage: Callable[[dict[str, np.ndarray]], None], dtype=ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    found = {
        name: (each if "norm" in name else 0.1 * each).astype(dtype) for name, each in tensors(dtype=np.float32).items()
    }
    damage(found)
    return found


def some_nan(found: dict[str, np.ndarray]) -> None:
    found[DOWN][3, 4:6] = np.nan
    found["model.norm.weight"][7] = -np.inf


def too_large(found: dict[str, np.ndarray]) -> None:
    found[DOWN][3, 4] = 1e30


def overflowing(found: dict[str, np.ndarray]) -> None:
    """Finite weights whose products are not, even in f32."""
    for name in (DOWN, "model.layers.1.mlp.up_proj.weight"):
        found[name][...] = 3e38


def inputs(folder: Path, damage: Callable[[dict[str, np.ndarray]], None], dtype=ml_dtypes.bfloat16) -> Inputs:
    made = make_inputs(folder)
    config = {**CONFIG, "torch_dtype": np.dtype(dtype).name}
    return replace(made, model=write_folder(folder / "damaged", config=config, weights=weights(damage, dtype)))


def evaluation(damage, dtype=ml_dtypes.bfloat16, **trainer):
    return lambda folder: inputs(folder, damage, dtype).eval_lm(folder / "run", **trainer)[1:]


def memorization(damage, **trainer):
    def words(folder: Path) -> list[str]:
        command = inputs(folder, damage).eval_careless_lm(folder / "run")[1:]
        return [*command, *(f"--trainer.{key}={value}" for key, value in trainer.items())]

    return words


def page(damage, **trainer):
    def words(folder: Path) -> list[str]:
        command = inputs(folder, damage).viz_logprobs(folder / "run")[1:]
        return [*command, *(f"--trainer.{key}={value}" for key, value in trainer.items())]

    return words


def training(damage):
    def words(folder: Path) -> list[str]:
        model = inputs(folder, damage).model
        own = {
            "hf_checkpoint": str(model),
            "data": {"components": {"docs": {"source": {"train_urls": [str(folder / "docs.jsonl")]}}},
                     "cache_dir": str(folder / "cache")},
            "train_seq_len": 16,
            "trainer": {"train_batch_size": 8, "num_train_steps": 2, "tracker": {"type": "noop"},
                        "log_dir": str(folder / "logs"), "checkpointer": {"base_path": str(folder / "checkpoints")}},
        }  # fmt: skip
        (folder / "train.yaml").write_text(json.dumps(own))
        return ["--config_path", str(folder / "train.yaml")]

    return words


def configured(**keys):
    def words(folder: Path) -> list[str]:
        made = make_inputs(folder)
        path = made.model / "config.json"
        path.write_text(json.dumps({**CONFIG, **keys}))
        return made.eval_lm(folder / "run")[1:]

    return words


FOUND = ("3 weights in 2 arrays are not finite", DOWN, "2 NaN", "allow_nonfinite")
ATTACKS = [
    Attack(name="nan-weights", command="eval_lm", words=evaluation(some_nan), code=BAD, says=FOUND),
    Attack(name="nan-weights-f32", command="eval_lm", words=evaluation(some_nan, np.float32), code=BAD, says=FOUND),
    Attack(name="nan-weights-f16", command="eval_lm", words=evaluation(some_nan, np.float16), code=BAD, says=FOUND),
    Attack(name="nan-weights-allowed", command="eval_lm", words=evaluation(some_nan, allow_nonfinite=True),
           code=INTERNAL, says=("continuing with them", "the loss is not finite", "token 2 of row 1 of docs", "docs")),
    Attack(name="too-large-for-f16", command="eval_lm", words=evaluation(too_large, np.float32, mp="f16"), code=BAD,
           says=("1 weights in 1 arrays", "1 too large for the dtype they are loaded in")),
    Attack(name="overflow", command="eval_lm", words=evaluation(overflowing), code=INTERNAL,
           says=("the loss is not finite", "token 2 of row 1 of docs", "wider compute dtype")),
    Attack(name="memorization", command="eval_careless_lm", words=memorization(some_nan), code=BAD, says=FOUND),
    Attack(name="memorization-allowed", command="eval_careless_lm",
           words=memorization(some_nan, allow_nonfinite="true"), code=INTERNAL, never=("must be at most 0",),
           says=("log-probabilities are not finite", "token 1 of the suffix of window 1")),
    Attack(name="page", command="viz_logprobs", words=page(overflowing), code=INTERNAL,
           says=("log-probabilities are not finite", "of docs")),
    Attack(name="training", command="train_lm", words=training(some_nan), code=BAD, says=FOUND),
    Attack(name="epsilon-nan", command="eval_lm", words=configured(rms_norm_eps=float("nan")), code=BAD,
           says=("rms_norm_eps",)),
    Attack(name="epsilon-negative", command="eval_lm", words=configured(rms_norm_eps=-1.0), code=BAD,
           says=("rms_norm_eps",)),
    Attack(name="theta-infinite", command="eval_lm", words=configured(rope_theta=float("inf")), code=BAD,
           says=("rope_theta",)),
]  # fmt: skip


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=("nan-weights", "overflow", "epsilon-nan")))
def test_numbers_that_are_none(attack, tmp_path):
    judge(attack, strike(attack, tmp_path))
    if attack.name == "overflow":
        # The numbers have been written all the same, as far as there are any.
        assert json.loads((tmp_path / "run" / "out.json").read_text())["overall"]["micro"]["loss"] == "NaN"
