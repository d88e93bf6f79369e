"""A run resumed under a changed configuration: what makes it another run is refused and listed; the rest is said."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.attacks import Attack, judge, strike, table
from helpers.tiny_runs import Inputs

BAD = 2
MODEL = {
    "type": "llama",
    **{"max_seq_len": 16, "hidden_dim": 16, "intermediate_dim": 32},
    **{"num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
}
OPTIMIZER = {"learning_rate": 0.01, "warmup": 2, "lr_schedule": "constant"}
# Nothing here reads it.
INPUTS = Inputs(model=Path("none"), documents=Path("none"), book=Path("none"), cache=Path("none"))


def words(**changed: Any) -> Callable[[Path], list[str]]:
    """The command of the run that goes on, with blocks of its configuration changed."""

    def prepared(folder: Path) -> list[str]:
        more = {key: value for key, value in changed.items() if key not in ("data", "steps", "plan")}
        data = {**INPUTS.numbers(folder), **changed.get("data", {})}
        command = INPUTS.train_lm(folder, steps=changed.get("steps", 2), data=data, **more)[1:]
        return ["train_lm", *command, "--target", "local"] if changed.get("plan") else command

    return prepared


def refused(name: str, *says: str, command: str = "train_lm", **changed: Any) -> Attack:
    return Attack(name=name, command=command, words=words(**changed), code=BAD, says=says, seconds=60)


def allowed(name: str, *says: str, **changed: Any) -> Attack:
    never = ("was saved by a different run",)
    return Attack(name=name, command="train_lm", words=words(**changed), code=0, says=says, never=never, seconds=90)


GELU = {**MODEL, "activation_function": "gelu"}
SAYS_GELU = 'model.activation_function: "silu" when it was saved, "gelu" now'
ATTACKS = [
    refused("activation", SAYS_GELU, "resume_with_changes", "step-2", model=GELU),
    refused("epsilon", "model.layer_norm_epsilon: ", model={**MODEL, "layer_norm_epsilon": 0.001}),
    refused("rope", "model.rope: ", model={**MODEL, "rope": {"type": "default", "theta": 77.0}}),
    refused("initializer", "model.initializer_range: ", model={**MODEL, "initializer_range": 0.3}),
    refused("seed", "trainer.seed: 0 when it was saved, 7 now", trainer={"seed": 7}),
    refused("data-seed", "data_seed: null when it was saved, 7 now", data_seed=7),
    refused("shuffle", "data.shuffle: true when it was saved, false now", data={"shuffle": False}),
    refused(
        "data", "data.components.others: new",
        data={"components": {"others": {"type": "direct", "datasets": {"train": ["1 2 3 4 5 6 7 8 9 " * 40]}}}},
    ),
    refused("optimizer", "optimizer.type: ", optimizer={"type": "muon"}),
    refused("several", SAYS_GELU, "trainer.seed: ", "2 differences", model=GELU, trainer={"seed": 7}),
    refused(
        "shape-though-allowed", "shape ",
        model={**MODEL, "intermediate_dim": 48}, trainer={"resume_with_changes": True},
    ),
    refused("plan-agrees", SAYS_GELU, "step-2", command="plan", plan=True, model=GELU),
    allowed(
        "with-changes", SAYS_GELU, "done after 3 of 3 steps", model=GELU, steps=3,
        trainer={"resume_with_changes": True},
    ),
    allowed(
        "steps-and-rate", "trainer.num_train_steps: 2 when it was saved, 3 now",
        "optimizer.learning_rate: 0.01 when it was saved, 0.02 now", "done after 3 of 3 steps",
        steps=3, optimizer={**OPTIMIZER, "learning_rate": 0.02},
    ),
    allowed(
        "batch-and-mesh", "trainer.train_batch_size: 8 when it was saved, 16 now", "trainer.mesh: ",
        "done after 3 of 3 steps", steps=3, trainer={"train_batch_size": 16, "mesh": {"axes": {"data": 8}}},
    ),
]  # fmt: skip


@pytest.fixture(name="begun", scope="module")
def begun_fixture(tmp_path_factory):
    """The checkpoints of a run of two steps."""
    folder = tmp_path_factory.mktemp("begun")
    first = Attack(name="first", command="train_lm", words=words(), code=0, seconds=60)
    judge(first, strike(first, folder))
    return folder / "checkpoints"


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=["activation", "several", "shape-though-allowed"]))
def test_a_changed_run(attack, begun, tmp_path):
    shutil.copytree(begun, tmp_path / "checkpoints")
    judge(attack, strike(attack, tmp_path))
