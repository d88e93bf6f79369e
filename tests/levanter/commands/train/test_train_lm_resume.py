"""Where a run begins: on another mesh, from Hugging Face weights, from checkpoints of other runs; and full disks."""

import json
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.experimental.compilation_cache.compilation_cache
import numpy as np
import pytest
from helpers.initial_states import state_of
from helpers.train_processes import environment, logged, train, write_run

from haliax_ext.abstract import leaves
from levanter.checkpoint import CheckpointMismatchError, CheckpointSource, find_checkpoints
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.commands.train.run import execute
from levanter.commands.train.run_dirs import MissingResumeError, RunDirs, find_resume
from levanter.config import load
from levanter.runplan import Session, Target
from levanter.tracker import NoopTracker

MESHES = {
    8: ("--trainer.mesh.axes", "{data: 8}"),
    4: ("--trainer.mesh.axes", "{data: 2, model: 4}"),
    1: ("--trainer.mesh.axes", "{data: 1}"),
}


def target(devices=8):
    return Target(name="local", platform="cpu", kind="cpu", devices=devices)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", autouse=True)
def compiled_once(cache):
    """What is compiled here is compiled once, for whatever many plans."""
    options = {
        "jax_compilation_cache_dir": str(cache),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


class Losses(NoopTracker):
    def __init__(self):
        self.found = {}

    def log(self, metrics, *, step, commit=None):
        if "train/loss" in metrics:
            self.found[step] = dict(metrics)


def read(run: Path, *overrides: str) -> TrainLmConfig:
    return load(TrainLmConfig, ["--config_path", str(run), *overrides])


def run_here(config: TrainLmConfig, devices, *, run_id="run"):
    plan = describe(config, target(len(devices))).check()
    tracker = Losses()
    done = execute(plan, plan.mesh.build(devices), Session(run_id=run_id, tracker=tracker))
    return done, tracker.found


def values_of(state) -> dict[str, np.ndarray]:
    return {leaf.path: np.asarray(x) for leaf, x in zip(leaves(state), jax.tree.leaves(state), strict=True)}


@pytest.fixture(scope="module")
def begun(tmp_path_factory, devices):
    """A run of four steps on data 8, with a checkpoint behind each two."""
    folder = tmp_path_factory.mktemp("begun")
    run = write_run(folder, steps=4)
    config = read(run, "--trainer.checkpointer.keep", "[{every: 2}]", *MESHES[8])
    done, found = run_here(config, devices)
    return folder, config, done, found


@pytest.mark.slow
def test_a_state_is_the_same_on_every_mesh(begun, devices):
    folder, _, done, _ = begun
    saved = CheckpointSource(done.checkpoint)
    whole = {
        name: saved.read(name, tuple(slice(0, size) for size in info.shape)) for name, info in saved.tensors.items()
    }
    rows = []
    for count, overrides in MESHES.items():
        # Sixty-one ids are as many rows on one device, and sixty-four where four cut them.
        plan = describe(read(folder / "run.yaml", *overrides), target(2 * count if count == 4 else count))
        mesh = plan.mesh.build(devices[: plan.mesh.size])
        state = state_of(plan, mesh, done.checkpoint)
        rows.append(plan.work.Vocab.size)
        for path, value in values_of(state).items():
            assert value[tuple(slice(0, size) for size in whole[path].shape)].tobytes() == whole[path].tobytes(), path
    assert rows == [61, 64, 61]


def test_what_a_run_goes_on_behind(begun, tmp_path, devices):
    folder, config, _, found = begun
    base = str(folder / "checkpoints/run")

    def resume(**changes):
        new = {"checkpointer": replace(config.trainer.checkpointer, base_path=str(tmp_path)), **changes}
        changed = replace(config, trainer=replace(config.trainer, **new))
        return find_resume(changed, RunDirs.of(changed, "other"))

    assert resume() is None
    assert resume(load_checkpoint_path=base).step == 4
    assert resume(load_checkpoint_path=f"{base}/step-2").step == 2
    assert resume(initialize_from=base, load_checkpoint=False).step == 4
    assert resume(load_checkpoint_path=base, load_checkpoint=False) is None
    with pytest.raises(MissingResumeError):
        resume(load_checkpoint=True)
    # Its own comes first; told not to, it begins anew.
    own = RunDirs.of(config, "run")
    assert find_resume(replace(config, trainer=replace(config.trainer, load_checkpoint_path="/nowhere")), own).step == 4
    assert find_resume(replace(config, trainer=replace(config.trainer, load_checkpoint=False)), own) is None

    # Behind step 2 of the other run, in a folder of its own: steps 2 and 3 are those of the other.
    trainer = replace(config.trainer, initialize_from=f"{base}/step-2")
    trainer = replace(trainer, checkpointer=replace(trainer.checkpointer, base_path=str(tmp_path / "checkpoints")))
    went_on, again = run_here(replace(config, trainer=trainer), devices, run_id="other")
    assert {step: again[step]["train/loss"] for step in again} == {step: found[step]["train/loss"] for step in (2, 3)}
    assert went_on.checkpoint.path == str(tmp_path / "checkpoints/other/step-4")


def test_it_goes_on_with_positions_cut(begun, tmp_path, devices):
    """Context 2 × model 2 × data 2, in a zigzag ring; test_train_lm_context.py has runs that are killed."""
    folder, _, _, found = begun
    cut = ("--trainer.mesh.axes", "{data: 2, context: 2, model: 2}", "--trainer.mesh.compute_mapping.position=context")
    ring = ("--trainer.mesh.attention_mapping=ring", "--trainer.checkpointer.base_path", str(tmp_path))
    behind = ("--trainer.initialize_from", str(folder / "checkpoints/run/step-2"))
    _, again = run_here(read(folder / "run.yaml", *cut, *ring, *behind), devices, run_id="cut")
    assert list(again) == [2, 3]
    for step, metrics in again.items():
        assert metrics["train/loss"] == pytest.approx(found[step]["train/loss"], rel=1e-5)


def test_a_run_begins_with_another_ones_parameters_and_statistics(begun, devices):
    folder, config, done, _ = begun
    base = str(folder / "checkpoints/run")
    saved = CheckpointSource(done.checkpoint)

    def begin(**changes):
        plan = describe(replace(config, **changes), target())
        return values_of(state_of(plan, plan.mesh.build(devices)))

    def saved_value(name):
        return saved.read(name, tuple(slice(0, size) for size in saved.tensors[name].shape))

    fresh = begin()
    everything = begin(initialize_from_checkpoint_path=base)
    parameters = begin(initialize_model_from_checkpoint_path=base)
    for name in saved.tensors:
        if name.startswith("model."):
            assert everything[name].tobytes() == parameters[name].tobytes() == saved_value(name).tobytes(), name
            continue
        # Steps, random bits and the schedule begin anew; Adam's averages, and how many steps they are of, do not.
        kept = name.startswith("optimizer.1.")
        assert everything[name].tobytes() == (saved_value(name) if kept else fresh[name]).tobytes(), name
        assert parameters[name].tobytes() == fresh[name].tobytes(), name
    assert int(everything["step"]) == 0 == int(everything["optimizer.3.count"])
    assert int(everything["optimizer.1.count"]) == 4
    with pytest.raises(
        ValueError,
        match=r"trainer\.initialize_from: a run begins from one of them only",
    ):
        read(folder / "run.yaml", "--trainer.initialize_from", base, "--initialize_from_checkpoint_path", base)


def test_what_does_not_fit_is_told_by_leaf(begun, devices):
    folder, *_ = begun
    base = str(folder / "checkpoints/run")
    other = read(
        folder / "run.yaml", *MESHES[8], "--initialize_from_checkpoint_path", base, "--optimizer.type", "adafactor"
    )
    plan = describe(other, target())
    with pytest.raises(CheckpointMismatchError) as caught:
        state_of(plan, plan.mesh.build(devices))
    assert "unexpected  optimizer.1.mu." in str(caught.value)
    assert "use initialize_model_from_checkpoint_path to take only the parameters" in str(caught.value)


def test_training_begins_with_the_loss_of_transformers(tmp_path, devices):
    import torch
    import transformers

    torch.manual_seed(1)
    written = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        initializer_range=0.2,
    )
    theirs = transformers.LlamaForCausalLM(written)
    theirs.save_pretrained(tmp_path / "hf")
    overrides = ("--initialize_from_hf", str(tmp_path / "hf"), "--trainer.num_train_steps", "1", *MESHES[4])
    run = write_run(tmp_path / "run", steps=4)
    with pytest.raises(ValueError, match=r"intermediate_dim.*32.*24") as caught:
        describe(read(run, *overrides), target())
    assert "num_kv_heads" in str(caught.value)
    overrides = (*overrides[:4], "--use_hf_model_config", "true", "--data.shuffle", "false")
    config = read(run, *overrides, "--trainer.mesh.axes", "{data: 4, model: 2}")
    plan = describe(config, target()).check()
    assert (plan.work.model.intermediate_dim, plan.work.model.num_kv_heads) == (24, 2)
    assert plan.work.Vocab.size == 62
    done, found = run_here(config, devices)

    # In order, rows are the text's ids, sixteen by sixteen.
    tokens = torch.tensor([n * n % 61 for n in range(8 * 16)]).reshape(8, 16)
    with torch.no_grad():
        logits = theirs(tokens).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 61), tokens[:, 1:].reshape(-1))
    assert found[0]["train/loss"] == pytest.approx(float(expected), rel=1e-5)
    # The checkpoint says which model it is, without any block.
    assert done.checkpoint.metadata["model"]["intermediate_dim"] == 24


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_with_fewer_devices_cut_otherwise(tmp_path, cache):
    """Data 8, then data 2 × model 4, then one device: the losses are those of data 8 all along."""
    straight = write_run(tmp_path / "straight", steps=30)
    constant = ("--optimizer.lr_schedule", "constant")
    train(straight, *MESHES[8], *constant, devices=8, cache=cache)
    expected = {step: value for step, (value,) in logged(tmp_path / "straight").items()}
    run = write_run(tmp_path / "moved", steps=30)
    keep = ("--trainer.checkpointer.keep", "[{every: 10}]")
    for steps, devices, count in ((10, 8, 8), (20, 8, 4), (30, 1, 1)):
        # The learning rate of a step must not depend on how many there are.
        until = ("--trainer.num_train_steps", str(steps), *constant)
        said = train(run, *MESHES[count], *keep, *until, devices=devices, cache=cache)
        if steps > 10:
            assert f"resuming from the checkpoint of step {steps - 10} " in said
    found = logged(tmp_path / "moved")
    assert list(found) == list(range(30))
    for step, (value,) in found.items():
        assert value == pytest.approx(expected[step], rel=1e-5), step


FULL = """
import resource, signal, sys
from levanter.commands.train.lm.train_lm import TrainLmConfig, main
from levanter.commands.cli.errors import run_entry_point
from levanter.checkpoint import Checkpointer

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
complete = Checkpointer._complete

def then_full(self, ref):
    complete(self, ref)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))

Checkpointer._complete = then_full
sys.exit(run_entry_point(TrainLmConfig, main))
"""


@pytest.mark.slow
def test_a_disk_that_is_full_ends_the_run_and_loses_nothing(tmp_path, cache):
    """Behind the first checkpoint the kernel refuses files of more than 2,000 bytes, as on a full disk."""
    run = write_run(tmp_path / "run", steps=30)
    keep = ("--trainer.checkpointer.keep", "[{every: 10}]")
    command = [sys.executable, "-c", FULL, "--config_path", str(run), *keep, "--trainer.tracker", "{type: noop}"]
    done = subprocess.run(command, env=environment(2, cache), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2, done.stderr[-4000:]
    base = tmp_path / "run/checkpoints/run"
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(
        rf"error: {base}/step-20: the checkpoint of step 20 was not written: File too large; the last complete one is "
        rf"of step 10 \({base}/step-10\); it takes [\d.]+ [KM]iB",
        line,
    )
    assert "Traceback" not in done.stderr
    assert [ref.step for ref in find_checkpoints(str(base))] == [10]
    # With room again, it goes on.
    assert "resuming from the checkpoint of step 10" in train(run, *keep, cache=cache)
    assert [ref.step for ref in find_checkpoints(str(base))] == [10, 20, 30]


def test_a_place_where_nothing_can_be_written_is_told_before_the_first_step(tmp_path, devices):
    run = write_run(tmp_path / "run", steps=4)
    (tmp_path / "file").write_text("")
    config = read(run, *MESHES[8], "--trainer.checkpointer.base_path", str(tmp_path / "file/checkpoints"))
    plan = describe(config, target())
    from levanter.checkpoint import CheckpointSaveError

    with pytest.raises((CheckpointSaveError, ValueError), match=r"file"):
        execute(plan.check(), plan.mesh.build(devices), Session(run_id="run"))


MEMORY = """
import sys, os, gc, statistics
from pathlib import Path
from levanter.commands.train.lm.train_lm import TrainLmConfig, main
from levanter.commands.cli.errors import run_entry_point
from levanter.checkpoint import Checkpointer

sizes, retire = [], Checkpointer._retire

def then_measured(self, newest):
    retire(self, newest)
    gc.collect()
    sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"))

Checkpointer._retire = then_measured
code = run_entry_point(TrainLmConfig, main)
print("sizes", [size >> 10 for size in sizes])
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc/self/statm")
def test_memory_is_flat_over_fifty_saves_of_a_run(tmp_path, cache):
    """A state of 9 MiB, saved as often as it can be; a leak of a fiftieth of it in each would be seen."""
    run = write_run(tmp_path / "run", steps=230)
    model = ("--model.hidden_dim", "128", "--model.intermediate_dim", "512", "--model.num_layers", "3")
    keep = ("--trainer.checkpointer.save_interval", "1ms", "--trainer.checkpointer.keep", "[]")
    command = [sys.executable, "-c", MEMORY, "--config_path", str(run), *model, *keep]
    done = subprocess.run(command, env=environment(2, cache), capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    sizes = json.loads(done.stdout.split("sizes ")[1])
    assert len(sizes) >= 110
    # The first fifty fill the allocators' pools.
    early, late = statistics.median(sizes[50:60]), statistics.median(sizes[100:110])
    sys.stdout.write(f"KiB resident behind each save: {sizes}")
    assert abs(late - early) < 9 << 10, sizes
