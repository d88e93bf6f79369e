"""A family whose layers differ in weights, through the commands: every mesh, a stop, an export, the plan.

The family is a package's (`helpers.two_kinds`): attention in every second layer, convolutions with other axes and
other tensors between them. Nothing in `src/` knows of it.
"""

import json
import os
import re
import signal
from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers.initial_states import state_of
from helpers.saved_run import logits
from helpers.train_processes import write_run
from helpers.two_kinds import installed, numpy_logits
from safetensors.numpy import load_file

from haliax_ext.abstract import leaves
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.commands.train.run import execute
from levanter.config import load
from levanter.plan.layout_memory import LayoutSubject
from levanter.plan.suggestions import tensor_axes
from levanter.runplan import Session, Target
from levanter.tracker import NoopTracker

MODEL = (
    "{type: two_kinds, max_seq_len: 16, hidden_dim: 32, intermediate_dim: 32, num_layers: 4, num_heads: 8, "
    "num_kv_heads: 8, channels: 16, pattern: FC, initializer_range: 0.2, attn_backend: reference}"
)
MESHES = {"1": (1, 1), "data 8": (8, 1), "model 8": (1, 8), "data 4 × model 2": (4, 2)}


@pytest.fixture(scope="module", autouse=True)
def family(tmp_path_factory):
    with installed(tmp_path_factory.mktemp("site")):
        yield


def config_of(folder, *overrides: str, data: int = 4, model: int = 2, steps: int = 4) -> TrainLmConfig:
    path = write_run(folder, steps=steps)
    text = re.sub(r"model: \{type: llama.*?\}\n", f"model: {MODEL}\n", path.read_text(), flags=re.DOTALL)
    mesh = f"{{axes: {{data: {data}, model: {model}}}, shared_mapping: {{vocab: model, channel: model}}}}"
    path.write_text(re.sub(r"mesh: \{axes.*", f"mesh: {mesh}", text))
    return load(TrainLmConfig, ["--config_path", str(path), "--optimizer.lr_schedule", "constant", *overrides])


def described(config: TrainLmConfig):
    axes = config.trainer.mesh.axes
    target = Target(name="local", platform="cpu", kind="cpu", devices=axes["data"] * axes["model"])
    return describe(config, target).check()


def test_suggestions_divide_the_axes_that_the_kinds_of_layer_name(tmp_path):
    """A refusal proposes to cut `channel` too, which nothing in the plan's code knows of."""
    plan = described(config_of(tmp_path))
    found = tensor_axes(LayoutSubject(plan=plan, program=plan.computing[-1], hbm_bytes=1))
    assert found[:2] == ("heads", "vocab") and set(found) == {"heads", "vocab", "mlp", "channel"}


class Losses(NoopTracker):
    """The loss of each step; tells the process to stop once it knows that of `last`."""

    def __init__(self, last: int | None):
        self.found, self.last = {}, last

    def log(self, metrics, *, step, commit=None):
        if "train/loss" in metrics:
            self.found[step] = metrics["train/loss"]
            if step == self.last:
                os.kill(os.getpid(), signal.SIGTERM)


def run(plan, devices, *, run_id="run", last=None):
    """What `execute` says, the loss of each step, and the arrays of the last checkpoint's state by path."""
    tracker, mesh = Losses(last), plan.mesh.build(devices[: plan.mesh.size])
    done = execute(plan, mesh, Session(run_id=run_id, tracker=tracker))
    state = state_of(plan, mesh, done.checkpoint)
    arrays = {leaf.path: np.asarray(x) for leaf, x in zip(leaves(state), jax.tree.leaves(state), strict=True)}
    return done, tracker.found, arrays


@pytest.fixture(scope="module")
def straight(tmp_path_factory, devices):
    """Four steps on data 4 × model 2, with a checkpoint and an export behind the last."""
    folder = tmp_path_factory.mktemp("straight")
    plan = described(config_of(folder, "--hf_save_path", str(folder / "hf"), "--hf_save_steps", "4"))
    return folder, plan, run(plan, devices)


@pytest.mark.parametrize("name", ["1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("data 8", "model 8"))])
def test_every_mesh_takes_the_same_steps(name, straight, tmp_path, devices):
    _, _, (_, expected, arrays) = straight
    data, model = MESHES[name]
    plan = described(config_of(tmp_path, data=data, model=model))
    _, found, own = run(plan, devices)
    assert list(found) == list(expected) == [0, 1, 2, 3]
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-5), step
    assert expected[3] < expected[0]
    # A mesh's own rows pad the vocabulary.
    for path, array in arrays.items():
        both = tuple(slice(0, min(pair)) for pair in zip(array.shape, own[path].shape, strict=True))
        np.testing.assert_allclose(own[path][both], array[both], atol=2e-5, rtol=1e-3, err_msg=path)


def test_a_run_that_stops_goes_on_as_if_it_had_not(straight, devices):
    _, plan, (_, expected, arrays) = straight
    # Numbers come a step behind: told at step 0, it stops behind step 1.
    stopped, before, _ = run(plan, devices, run_id="stopped", last=0)
    assert stopped.preempted and stopped.taken == 2
    done, found, own = run(plan, devices, run_id="stopped")
    assert list(before) == [0, 1] and before | found == expected and done.taken == 4
    assert own.keys() == arrays.keys()
    for path, array in arrays.items():
        assert own[path].tobytes() == array.tobytes(), path


def test_what_is_exported_is_imported_bit_for_bit(straight, tmp_path, devices):
    folder, plan, (_, _, arrays) = straight
    exported = folder / "hf/run/step-4"
    tensors = load_file(exported / "model.safetensors")
    own = [{name.split(".")[3] for name in tensors if name.startswith(f"model.layers.{n}.")} for n in range(4)]
    assert [names & {"conv", "self_attn"} for names in own] == [{"self_attn"}, {"conv"}] * 2
    document = json.loads((exported / "config.json").read_text())
    assert document["layer_types"] == ["full_attention", "convolution"] * 2
    again = described(
        config_of(tmp_path, "--initialize_from_hf", str(exported), "--use_hf_model_config", "true", data=2, model=4)
    )
    state = state_of(again, again.mesh.build(devices))
    for leaf, x in zip(leaves(state.model), jax.tree.leaves(state.model), strict=True):
        # Rows that only pad the vocabulary are not exported.
        own = tuple(slice(0, 61 if name == "vocab" else size) for name, size in leaf.axes)
        assert np.asarray(x)[own].tobytes() == arrays[f"model.{leaf.path}"][own].tobytes(), leaf.path
    # And the tensors mean what they say, to a loop over layers in NumPy.
    ids = np.random.default_rng(0).integers(0, 61, (2, 16))
    values = {path.removeprefix("model."): x for path, x in arrays.items() if path.startswith("model.")}
    found = logits(replace(plan.work.model, vocab_size=61), values, ids)
    np.testing.assert_allclose(found, numpy_logits(plan.work.model, tensors, ids), atol=2e-4)


def test_the_plan_says_how_many_layers_are_compiled(straight):
    _, plan, _ = straight
    said = next(check for check in plan.checks if check.name == "layers")
    assert (said.status, said.message) == (
        "ok",
        "4 layers of 2 kinds, scanned as 2 periods of 2: 2 are compiled",
    )
    cut = {leaf.leaf.path: dict(zip(leaf.leaf.names, leaf.mesh_axes, strict=True)) for leaf in plan.activations.leaves}
    assert cut["channels"]["channel"] == ("model",) and cut["queries"]["kv_head"] == ("model",)
