"""`train_lm` with a part of the model frozen: plan, checkpoints, resuming, evaluation, export."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.train_processes import write_run
from safetensors.numpy import load_file

from levanter.checkpoint import CheckpointMismatchError, UnreadableCheckpointError, checkpoint_at
from levanter.commands.model.saved_model import open_saved
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.commands.train.run import execute
from levanter.config import load
from levanter.plan.hbm_budget import hbm_budget
from levanter.runplan import Session, Target
from levanter.tracker import NoopTracker
from levanter.trainer.frozen_identity import FrozenPart

NORMS = ("--trainer.trainable", "[norm]")
DATA_8 = ("--trainer.mesh.axes", "{data: 8}")


class Logged(NoopTracker):
    """Everything that is logged, by step."""

    def __init__(self):
        self.found: dict[int, dict[str, float]] = {}

    def log(self, metrics, *, step, commit=None):
        self.found.setdefault(step, {}).update(metrics)

    def losses(self):
        return {step: each["train/loss"] for step, each in self.found.items() if "train/loss" in each}


def read(run: Path, *overrides: str) -> TrainLmConfig:
    return load(TrainLmConfig, ["--config_path", str(run), *overrides])


def describe_here(config: TrainLmConfig):
    return describe(config, Target(name="local", platform="cpu", kind="cpu", devices=8))


def train(config: TrainLmConfig, devices, *, run_id="run"):
    plan = describe_here(config).check()
    tracker = Logged()
    return execute(plan, plan.mesh.build(devices), Session(run_id=run_id, tracker=tracker)), tracker


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    """A tiny Llama as transformers writes it, float32, of 61 ids."""
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("pretrained")
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            initializer_range=0.2,
        )
    ).save_pretrained(folder)
    return folder


def from_pretrained(run: Path, pretrained: Path, *overrides: str) -> TrainLmConfig:
    begun = ("--initialize_from_hf", str(pretrained), "--use_hf_model_config", "true")
    return read(run, *begun, *overrides)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("norms"), steps=4)


@pytest.fixture(scope="module")
def trained(run_file, pretrained, devices):
    """Four steps on the norms alone, with checkpoints behind steps 2 and 4 and an export; (config, ended, logged)."""
    config = from_pretrained(
        run_file,
        pretrained,
        *NORMS,
        *DATA_8,
        *("--trainer.checkpointer.keep", "[{every: 2}]", "--hf_save_path", str(run_file.parent / "exports")),
        *("--data.num_validation_sequences", "{numbers: 8}"),
    )
    return config, *train(config, devices)


def tensors_of(folder: str | Path) -> dict[str, np.ndarray]:
    return load_file(Path(folder) / "model.safetensors")


def computing(plan) -> list[str]:
    """The names of a plan's Programs, but for those that move arrays to and from files."""
    return [program.name for program in plan.programs if not program.name.startswith(("load.", "save."))]


def test_the_plan_says_what_is_frozen(trained):
    config, _, _ = trained
    plan = describe_here(config)
    (line,) = [check.message for check in plan.checks if check.name == "trainable"]
    # Per layer two norms of 16, and the last one: of 12 arrays 3 are stacks of norms or a norm.
    assert line.startswith("3 of 12 arrays are trained, 80 of ")
    groups = plan.resident_bytes
    assert groups["norm"] == groups["gradients"] and groups["frozen attention"] > 0
    assert not {"embedding", "attention", "mlp", "head"} & groups.keys()
    budget = hbm_budget(plan)
    assert budget.groups["frozen mlp"] == groups["frozen mlp"] and "mlp" not in budget.groups
    assert budget.gradients == groups["gradients"]
    assert computing(plan) == ["init_optimizer", "digest_frozen", "train_step", "evaluate"]
    # A plan of the whole model has no such groups and Programs.
    whole = describe_here(replace(config, trainer=replace(config.trainer, trainable=None)))
    assert not [name for name in whole.resident_bytes if name.startswith("frozen")]
    assert computing(whole) == ["init_optimizer", "train_step", "evaluate"]


def test_a_checkpoint_holds_what_is_trained_and_names_the_rest(trained, pretrained):
    _, ended, _ = trained
    ref = ended.checkpoint
    own = {path for path in ref.leaves if path.startswith("model.")}
    assert len(own) == 3 and all("norm" in path for path in own)
    part = FrozenPart.of(ref)
    assert part.patterns == ("norm",) and part.origin == str(pretrained) and len(part.digests) == 9
    assert all(re.fullmatch("[0-9a-f]{8}", digest) for digest in part.digests.values())
    # 80 parameters and twice as many statistics, in float32, and some counters. The files' own tables are larger than
    # that here, and yet there is no room for the 23 KB that are frozen.
    arrays = sum(np.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in ref.leaves.values())
    assert 3 * 80 * 4 <= arrays <= 3 * 80 * 4 + 64
    whole = sum(each.nbytes for each in tensors_of(pretrained).values())
    values = [file for file in Path(ref.arrays_path).rglob("d/*") if file.is_file()]
    assert values and sum(file.stat().st_size for file in values) < whole / 2
    with pytest.raises(UnreadableCheckpointError, match=r"only the trained part .* \(norm\); the 9 frozen .* came"):
        open_saved(ref.path)


def test_an_export_is_the_whole_model(trained, pretrained):
    _, ended, _ = trained
    before, after = tensors_of(pretrained), tensors_of(ended.exported)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert np.array_equal(value, after[name]) == ("norm" not in name), name


def test_a_run_that_is_resumed_takes_the_same_steps_bit_for_bit(trained, tmp_path, devices):
    config, ended, logged = trained
    saved = checkpoint_at(str(Path(ended.checkpoint.path).parent / "step-2"))
    trainer = replace(config.trainer, load_checkpoint_path=saved.path)
    trainer = replace(trainer, checkpointer=replace(trainer.checkpointer, base_path=str(tmp_path)))
    changed = replace(config, trainer=trainer, hf_save_path=str(tmp_path / "exports"))
    again, found = train(changed, devices)
    assert found.losses() == {step: logged.losses()[step] for step in (2, 3)}
    assert found.found[3]["eval/loss"] == logged.found[3]["eval/loss"]
    for name, value in tensors_of(ended.exported).items():
        assert value.tobytes() == tensors_of(again.exported)[name].tobytes(), name
    # On another mesh it goes on too: the frozen part is known to be the same.
    trainer = replace(trainer, checkpointer=replace(trainer.checkpointer, base_path=str(tmp_path / "other")))
    mesh = replace(trainer.mesh, axes={"data": 4, "model": 2})
    _, moved = train(replace(changed, trainer=replace(trainer, mesh=mesh), hf_save_path=None), devices)
    assert moved.losses() == pytest.approx(found.losses(), rel=1e-5)


def test_the_loss_is_that_of_the_whole_model(trained, tmp_path, devices):
    """The first step's loss does not know what is trained."""
    config, _, logged = trained
    trainer = replace(config.trainer, trainable=None, num_train_steps=1)
    trainer = replace(trainer, checkpointer=replace(trainer.checkpointer, base_path=str(tmp_path)))
    _, whole = train(replace(config, trainer=trainer, hf_save_path=None), devices)
    assert whole.losses()[0] == pytest.approx(logged.losses()[0], rel=1e-6)
    # Norms begin at 1, and the others count for nothing.
    assert logged.found[0]["params/norm/total"] == pytest.approx(80**0.5) != whole.found[0]["params/norm/total"]


def test_another_partition_is_refused(trained, devices):
    config, ended, _ = trained
    base = str(Path(ended.checkpoint.path).parent)

    def refused(**changes):
        trainer = replace(config.trainer, id="other", load_checkpoint_path=base, **changes)
        plan = describe_here(replace(config, trainer=trainer))
        (check,) = [check for check in plan.checks if check.name == "checkpoint"]
        with pytest.raises(CheckpointMismatchError) as caught:
            train(replace(config, trainer=replace(trainer, id=None)), devices, run_id="other")
        assert str(caught.value) == check.message
        return check.message

    everything = refused(trainable=None)
    assert "is of a run that trained norm (trainer.trainable), and this run trains everything: " in everything
    assert "9 are frozen there and trained here (embeddings.token_embeddings.weight, lm_head.weight, " in everything
    assert "→ trainer.trainable: ['norm'] resumes it" in everything
    more = refused(trainable=("norm", "head"))
    assert "1 are frozen there and trained here (lm_head.weight)" in more
    other = refused(trainable=("head",))
    assert "3 are trained there and frozen here (transformer.layers.stacked.input_layernorm.weight, " in other


def test_other_frozen_weights_are_refused(trained, pretrained, tmp_path, devices):
    config, ended, _ = trained
    # Another folder with the same weights is the same base; one number more in one of them is another.
    for file in pretrained.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    trainer = replace(config.trainer, load_checkpoint_path=str(Path(ended.checkpoint.path).parent / "step-2"))
    trainer = replace(trainer, checkpointer=replace(trainer.checkpointer, base_path=str(tmp_path / "checkpoints")))
    moved = replace(config, initialize_from_hf=str(tmp_path), trainer=trainer, hf_save_path=None)
    train(moved, devices)
    from safetensors.numpy import save_file

    changed = tensors_of(tmp_path)
    changed["lm_head.weight"] = changed["lm_head.weight"] + np.float32(0.001)
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    trainer = replace(trainer, checkpointer=replace(trainer.checkpointer, base_path=str(tmp_path / "others")))
    with pytest.raises(CheckpointMismatchError) as caught:
        train(replace(moved, trainer=trainer), devices)
    assert "1 of 9 differ (lm_head.weight); they came from " in str(caught.value)
    assert str(tmp_path) in str(caught.value) and str(pretrained) in str(caught.value)


@pytest.mark.slow
def test_what_is_frozen_may_be_made_from_the_seed_or_come_from_a_checkpoint(tmp_path, devices):
    run = write_run(tmp_path / "whole", steps=2)
    keep = ("--trainer.checkpointer.keep", "[{every: 1}]")
    whole, _ = train(read(run, *DATA_8, *keep), devices)
    # The state before the first step is that of a run that trains everything.
    frozen = read(write_run(tmp_path / "frozen", steps=2), *DATA_8, *keep, *NORMS)
    ended, logged = train(frozen, devices)
    plan = describe_here(frozen)
    assert computing(plan)[:3] == ["init_state", "init_frozen", "digest_frozen"]
    assert FrozenPart.of(ended.checkpoint).origin == "trainer.seed 0"
    resumed, again = train(_behind(frozen, ended, tmp_path / "again"), devices)
    assert again.losses()[1] == logged.losses()[1] and resumed.taken == 2
    # From a checkpoint: what it has is taken for both parts, and is there again when the run goes on.
    path = ("--initialize_model_from_checkpoint_path", whole.checkpoint.path)
    begun = read(write_run(tmp_path / "begun", steps=2), *DATA_8, *keep, *NORMS, *path)
    ended, found = train(begun, devices)
    assert FrozenPart.of(ended.checkpoint).origin == whole.checkpoint.path
    assert found.losses()[0] < logged.losses()[0]
    _, again = train(_behind(begun, ended, tmp_path / "begun again"), devices)
    assert again.losses()[1] == found.losses()[1]


def _behind(config: TrainLmConfig, ended, base: Path) -> TrainLmConfig:
    """The run that goes on behind another one's first step."""
    trainer = replace(config.trainer, load_checkpoint_path=str(Path(ended.checkpoint.path).parent / "step-1"))
    return replace(config, trainer=replace(trainer, checkpointer=replace(trainer.checkpointer, base_path=str(base))))


def test_a_pattern_that_matches_nothing_is_refused(run_file, pretrained):
    with pytest.raises(ValueError, match=r"trainer\.trainable\[1\] '\*\*\.qproj' .* did you mean \*\*\.q_proj"):
        describe_here(from_pretrained(run_file, pretrained, "--trainer.trainable", "[norm, '**.qproj']"))
