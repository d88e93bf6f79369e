"""Nothing unplanned compiles: what JAX compiles in real runs is in their plans by name, but for a few scalars.

What must be planned has an argument of more than 64 KiB. The arrays of these runs are a thousandth of real ones, so it
is 64 bytes here.
"""

from collections import Counter
from pathlib import Path

import pytest
from helpers.compilations import Heard
from helpers.processes import TESTS, run_together

# Real processes on a machine that has other things to do.
pytestmark = pytest.mark.timeout(1800)

LARGE = 64


def heard(folder: Path, count: int, command: list[str], inputs) -> list[Heard]:
    """Runs a command of `tiny_runs` as some processes; what was compiled and planned in each."""
    module, *argv = command
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


@pytest.mark.parametrize("count", [1, 2])
def test_eval_lm(tmp_path, inputs, count):
    found = heard(tmp_path, count, inputs.eval_lm(tmp_path), inputs)
    check(found)
    assert names(found, "score") == ["score"]
    # Whoever has all the files in one place reads every leaf straight into its shards.
    assert (names(found, "load.") == []) == (count == 1)


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_eval_careless_lm(tmp_path, inputs, count):
    found = heard(tmp_path, count, inputs.eval_careless_lm(tmp_path), inputs)
    check(found)
    assert names(found, "score") == ["score"]


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
