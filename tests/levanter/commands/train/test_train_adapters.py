"""`train_lm` with `adapter: {type: lora}`: plan, checkpoints, resuming, the files that it saves, what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.train_processes import write_run
from safetensors.numpy import load_file, save_file

from haliax_ext.abstract import leaves
from levanter.checkpoint import CheckpointMismatchError, UnreadableCheckpointError, checkpoint_at
from levanter.commands.model.saved_model import open_saved
from levanter.commands.train.config_diff import ChangedRunError
from levanter.commands.train.lm import lora_lm
from levanter.commands.train.lm.lora_config import LoraLmConfig
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.commands.train.run import execute
from levanter.config import ConfigError, load
from levanter.plan.hbm_budget import hbm_budget
from levanter.runplan import Session, Target
from levanter.tracker import NoopTracker
from levanter.trainer.frozen_identity import FrozenPart

LORA = ("--adapter", "{type: lora, r: 4, alpha: 8, zero_init_b: true, a_init_mode: peft}")
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
def trained(tmp_path_factory, pretrained, devices):
    """Four steps of adapters, with checkpoints behind steps 2 and 4, and their files; (config, ended, logged)."""
    run = write_run(tmp_path_factory.mktemp("adapters"), steps=4)
    config = from_pretrained(
        run,
        pretrained,
        *LORA,
        *DATA_8,
        *("--trainer.checkpointer.keep", "[{every: 2}]", "--peft_save_path", str(run.parent / "adapters")),
        *("--data.num_validation_sequences", "{numbers: 8}"),
    )
    return config, *train(config, devices)


RANK, LAYERS = 4, 2
COUNT = LAYERS * RANK * ((16 + 16) * 2 + (16 + 8) * 2 + (16 + 24) * 3)


def test_the_plan_says_what_is_trained(trained):
    config, _, _ = trained
    plan = describe_here(config)
    (line,) = [check.message for check in plan.checks if check.name == "adapter"]
    assert line.startswith(f"7 adapters are trained, {COUNT:,} parameters beside ")
    groups = plan.resident_bytes
    # Of each pair, the factor with `embed` is cut 8 ways, as the matrix is; the other one has nothing that is.
    whole_sides = 16 + 8 + 8 + 16 + 3 * 24
    assert groups["adapters"] == groups["gradients"] == 4 * LAYERS * RANK * (7 * 16 // 8 + whole_sides)
    assert not {"embedding", "attention", "mlp", "head", "norm"} & groups.keys()
    budget = hbm_budget(plan)
    assert budget.groups["frozen mlp"] == groups["frozen mlp"] and budget.groups["adapters"] == groups["adapters"]
    assert budget.gradients == groups["gradients"]
    own = [program.name for program in plan.programs if not program.name.startswith(("load.", "save."))]
    assert own == ["init_adapters", "digest_frozen", "train_step", "evaluate"]
    # Of a full step's products, a frozen matrix spares the one that makes its gradient, and factors add theirs.
    whole = describe_here(replace(config, adapter=None, peft_save_path=None))
    (full,), (lora,) = ([each for each in p.workloads if each.program == "train_step"] for p in (whole, plan))
    matrices = LAYERS * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) + 61 * 16
    assert lora.flops_full - full.flops_full == lora.tokens * (6 * COUNT - 2 * matrices)


def test_the_base_may_be_held_in_another_dtype_and_the_factors_whole(trained):
    config, _, _ = trained
    trainer = replace(config.trainer, mp="p=f32,c=bfloat16")
    narrow = describe_here(replace(config, trainer=trainer))
    assert {leaf.dtype.name for leaf in leaves(narrow.work.frozen)} == {"bfloat16"}
    lora = replace(config.adapter, base_dtype="float32", placement="whole")
    plan = describe_here(replace(config, trainer=trainer, adapter=lora))
    assert {leaf.dtype.name for leaf in leaves(plan.work.frozen)} == {"float32"}
    assert plan.resident_bytes["frozen mlp"] == 2 * narrow.resident_bytes["frozen mlp"]
    assert plan.resident_bytes["adapters"] == plan.resident_bytes["gradients"] == 4 * COUNT


def test_a_checkpoint_holds_adapters_and_names_their_base(trained, pretrained):
    _, ended, _ = trained
    ref = ended.checkpoint
    own = {path for path in ref.leaves if path.startswith("model.")}
    assert len(own) == 14 and all(path.startswith("model.pairs.transformer.layers.stacked.") for path in own)
    part = FrozenPart.of(ref)
    assert part.origin == str(pretrained) and len(part.digests) == 12 and part.patterns == ()
    assert part.adapters["transformer.layers.stacked.mlp.up_proj"] == RANK
    assert all(re.fullmatch("[0-9a-f]{8}", digest) for digest in part.digests.values())
    arrays = sum(np.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in ref.leaves.values())
    assert 3 * COUNT * 4 <= arrays <= 3 * COUNT * 4 + 64
    with pytest.raises(UnreadableCheckpointError, match=r"contains only adapters; .* came from"):
        open_saved(ref.path)


def factors_of(folder: str | Path) -> dict[str, np.ndarray]:
    return load_file(Path(folder) / "adapter_model.safetensors")


def test_what_is_saved_is_an_adapter_of_peft(trained, pretrained):
    _, ended, logged = trained
    said = json.loads((Path(ended.exported) / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(pretrained) and said["r"] == RANK and said["lora_alpha"] == 8
    assert said["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    found = factors_of(ended.exported)
    assert sum(x.size for x in found.values()) == COUNT and len(found) == 2 * 7 * LAYERS
    assert all(x.any() for name, x in found.items()), "both factors have been trained"
    _torch_agrees(pretrained, found, logged)


def _torch_agrees(pretrained: Path, found, logged) -> None:
    """The loss on the validation set, by torch with merged weights, is what the run logged at its end."""
    torch = pytest.importorskip("torch")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
    ids = torch.arange(20)[None] % 61
    with torch.no_grad():
        before = model(ids).logits
        for name in {each.removesuffix(".weight").rsplit(".", 1)[0] for each in found}:
            module = model.get_submodule(name.removeprefix("base_model.model."))
            module.weight += 2.0 * torch.from_numpy(found[f"{name}.lora_B.weight"] @ found[f"{name}.lora_A.weight"])
        after = model(ids).logits
    assert (after - before).abs().max() > 1e-3
    assert logged.found[3]["eval/loss"] < 10


@pytest.mark.slow
def test_the_loss_begins_as_the_model_s(trained, tmp_path, devices):
    config, _, logged = trained
    trainer = replace(config.trainer, num_train_steps=1)
    trainer = replace(trainer, checkpointer=replace(trainer.checkpointer, base_path=str(tmp_path)))
    _, whole = train(replace(config, trainer=trainer, adapter=None, peft_save_path=None), devices)
    assert whole.losses()[0] == pytest.approx(logged.losses()[0], rel=1e-6)


def test_a_run_that_is_resumed_takes_the_same_steps_bit_for_bit(trained, tmp_path, devices):
    config, ended, logged = trained
    saved = checkpoint_at(str(Path(ended.checkpoint.path).parent / "step-2"))
    trainer = replace(config.trainer, load_checkpoint_path=saved.path)
    trainer = replace(trainer, checkpointer=replace(trainer.checkpointer, base_path=str(tmp_path)))
    changed = replace(config, trainer=trainer, peft_save_path=str(tmp_path / "adapters"))
    again, found = train(changed, devices)
    assert found.losses() == {step: logged.losses()[step] for step in (2, 3)}
    assert found.found[3]["eval/loss"] == logged.found[3]["eval/loss"]
    for name, value in factors_of(ended.exported).items():
        assert value.tobytes() == factors_of(again.exported)[name].tobytes(), name
    # On another mesh it goes on too.
    trainer = replace(trainer, checkpointer=replace(trainer.checkpointer, base_path=str(tmp_path / "other")))
    mesh = replace(trainer.mesh, axes={"data": 4, "model": 2})
    _, moved = train(replace(changed, trainer=replace(trainer, mesh=mesh), peft_save_path=None), devices)
    assert moved.losses() == pytest.approx(found.losses(), rel=1e-5)


def dequantized(pretrained: Path, folder: Path) -> Path:
    """The model with what int8 makes of its projections: a scale for each row, 127 steps on either side."""
    folder.mkdir()
    for file in pretrained.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    for name, x in weights.items():
        if "proj" in name or "lm_head" in name:
            scale = np.abs(x).max(axis=1, keepdims=True) * np.float32(1 / 127)
            weights[name] = (np.round(x * (1 / scale)) * scale).astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_a_base_of_integers(trained, pretrained, tmp_path, devices):
    """The losses are those of adapters of the model that the integers stand for; it resumes, with dropout too."""
    config, _, _ = trained

    def run(name: str, base: Path, steps: int = 3, resumed: str | None = None, **lora):
        trainer = replace(config.trainer, num_train_steps=steps, load_checkpoint_path=resumed)
        checkpoints = replace(trainer.checkpointer, base_path=str(tmp_path / name))
        trainer = replace(trainer, checkpointer=checkpoints)
        adapter = replace(config.adapter, **lora)
        own = replace(config, trainer=trainer, adapter=adapter, peft_save_path=None, initialize_from_hf=str(base))
        return own, *train(own, devices)

    integers, ended, found = run("integers", pretrained, base_dtype="int8")
    plan = describe_here(integers)
    held = {leaf.path: leaf.dtype.name for leaf in leaves(plan.work.frozen)}
    assert (
        sum(name == "int8" for name in held.values()) == 8 and held["embeddings.token_embeddings.weight"] == "float32"
    )
    whole = describe_here(config).resident_bytes["frozen mlp"]
    assert plan.resident_bytes["frozen mlp"] < 0.7 * whole
    _, _, twin = run("twin", dequantized(pretrained, tmp_path / "base"))
    assert found.losses() == pytest.approx(twin.losses(), rel=1e-5)
    assert FrozenPart.of(ended.checkpoint).dtype == "float32"
    _, dropped, other = run("dropout", pretrained, base_dtype="int8", dropout=0.3)
    assert other.losses()[0] == pytest.approx(found.losses()[0], rel=1e-6), "B is 0 yet"
    assert abs(other.losses()[2] - found.losses()[2]) > 1e-6
    saved = str(Path(dropped.checkpoint.path).parent / "step-2")
    _, _, again = run("again", pretrained, resumed=saved, base_dtype="int8", dropout=0.3)
    assert again.losses() == {2: other.losses()[2]}


def _elsewhere(config, ended, base: Path, **changes):
    trainer = replace(config.trainer, load_checkpoint_path=str(Path(ended.checkpoint.path).parent / "step-2"))
    trainer = replace(trainer, checkpointer=replace(trainer.checkpointer, base_path=str(base)))
    return replace(config, trainer=trainer, peft_save_path=None, **changes)


def test_another_base_is_refused(trained, pretrained, tmp_path, devices):
    config, ended, logged = trained
    for file in pretrained.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    # Another folder with the same weights is the same base; one number more in one of them is another.
    moved = _elsewhere(config, ended, tmp_path / "checkpoints", initialize_from_hf=str(tmp_path))
    _, found = train(moved, devices)
    assert found.losses() == {step: logged.losses()[step] for step in (2, 3)}
    changed = load_file(tmp_path / "model.safetensors")
    changed["lm_head.weight"] = changed["lm_head.weight"] + np.float32(0.001)
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointMismatchError) as caught:
        train(_elsewhere(moved, ended, tmp_path / "others"), devices)
    assert "1 of 12 differ (lm_head.weight); they came from " in str(caught.value)
    assert str(tmp_path) in str(caught.value) and str(pretrained) in str(caught.value)


def test_other_adapters_are_refused(trained, tmp_path):
    config, ended, _ = trained

    def refused(expected, **changes):
        other = replace(config, peft_save_path=None, **changes)
        trainer = replace(other.trainer, id="run", resume_with_changes=expected is CheckpointMismatchError)
        checkpointer = replace(trainer.checkpointer, base_path=str(Path(ended.checkpoint.path).parent.parent))
        other = replace(other, trainer=replace(trainer, checkpointer=checkpointer))
        found = [check for check in describe_here(other).checks if isinstance(check.error, expected)]
        assert found
        return "\n".join(check.message for check in found)

    assert "adapter: " in refused(ChangedRunError, adapter=replace(config.adapter, alpha=9.0))
    rank = refused(CheckpointMismatchError, adapter=replace(config.adapter, r=3))
    assert "mlp.up_proj: rank 4 when it was saved, 3 now" in rank
    fewer = refused(CheckpointMismatchError, adapter=replace(config.adapter, target_modules=["up_proj"]))
    assert "self_attn.q_proj: rank 4 when it was saved, none now" in fewer
    none = refused(CheckpointMismatchError, adapter=None)
    assert "is of a run that trained adapters, and this run trains none" in none


@pytest.mark.slow
def test_a_base_may_be_made_from_the_seed_or_come_from_a_checkpoint(tmp_path, devices):
    keep = ("--trainer.checkpointer.keep", "[{every: 1}]")
    whole, _ = train(read(write_run(tmp_path / "whole", steps=2), *DATA_8, *keep), devices)
    config = read(write_run(tmp_path / "seed", steps=2), *DATA_8, *keep, *LORA)
    names = [program.name for program in describe_here(config).programs]
    assert names[:3] == ["init_frozen", "init_adapters", "digest_frozen"]
    ended, logged = train(config, devices)
    assert FrozenPart.of(ended.checkpoint).origin == "trainer.seed 0"
    path = ("--initialize_model_from_checkpoint_path", whole.checkpoint.path)
    begun, found = train(read(write_run(tmp_path / "begun", steps=2), *DATA_8, *keep, *LORA, *path), devices)
    assert FrozenPart.of(begun.checkpoint).origin == whole.checkpoint.path
    assert found.losses()[0] < logged.losses()[0]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("--hf_save_path", "x"), "hf_save_path: exports a whole model"),
        (("--trainer.trainable", "[norm]"), "trainer.trainable: the run trains an adapter"),
        (("--initialize_from_checkpoint_path", "x"), "initialize_from_checkpoint_path: its optimizer state"),
        (("--adapter.r", "0"), "r"),
        (("--adapter.dropout", "1.0"), "dropout: 1 leaves nothing of what A is multiplied by"),
        (
            ("--adapter.base_dtype", "int8"),
            "adapter.base_dtype: weights are quantized to int8 while a checkpoint is read",
        ),
        (("--adapter.zero_init_b", "false"), "neither factor would begin as 0"),
        (("--adapter.use_dora", "true"), "use_dora"),
        (
            ("--adapter.target_modules", "[q_porj]"),
            "adapter.target_modules: 'q_porj' names no projection; did you mean",
        ),
        (("--adapter.r", "100"), "rank 100 of transformer.layers.stacked.self_attn.q_proj is above 16"),
        (("--adapter.type", "dora"), "dora"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, overrides, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        describe_here(read(write_run(tmp_path, steps=2), *DATA_8, *LORA, *overrides))


def test_merged_weights_want_files_to_merge_into(tmp_path):
    with pytest.raises(ValueError, match="merged_hf_save_path: adapters are merged into the files of a Hugging Face"):
        read(write_run(tmp_path, steps=2), *LORA, "--merged_hf_save_path", "x")
    both = ("--merged_hf_save_path", "x", "--peft_save_path", "x", "--initialize_from_hf", "y")
    with pytest.raises(ValueError, match="they must be different folders"):
        read(tmp_path / "run.yaml", *LORA, *both)


def test_adapter_files_want_an_adapter(tmp_path):
    with pytest.raises(ValueError, match="peft_save_path: saves adapters, and the run trains none"):
        read(write_run(tmp_path, steps=2), "--peft_save_path", "x")
    # `none` is no adapter, whichever way it is written.
    assert read(write_run(tmp_path / "none", steps=2), "--adapter", "{type: none}").lora is None


UPSTREAM = """
initialize_from_hf: {model}
{length}: 16
lora: {{r: 4, alpha: 8.0, target_modules: [q_proj, v_proj]}}
peft_save_path: {folder}/adapters
merged_hf_save_path: {folder}/merged
hf_save_steps: 2
trust_remote_code: true
data:
  tokenizer: passthrough
  vocab_size: 61
  cache_dir: null
  components:
    numbers: {{type: direct, datasets: {{train: ["{text}"]}}}}
optimizer: {{learning_rate: 0.01, warmup: 0}}
trainer:
  id: run
  log_dir: "{folder}/logs"
  num_train_steps: 2
  train_batch_size: 8
  checkpointer: {{base_path: "{folder}/checkpoints", keep: []}}
  {mesh}
"""
GENERATIONS = {
    "2025": ("max_train_length", "model_axis_size: 2\n  tensor_parallel_axes: [mlp, heads]"),
    "2026": ("train_seq_len", "mesh: {axes: {data: 4, model: 2}}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["2025", "2026"])
def test_upstream_s_lora_lm_runs(generation, pretrained, tmp_path, devices):
    length, mesh = GENERATIONS[generation]
    text = " ".join(str(n * n % 61) for n in range(600))
    path = tmp_path / "lora.yaml"
    path.write_text(UPSTREAM.format(model=pretrained, folder=tmp_path, text=text, length=length, mesh=mesh))
    config = load(LoraLmConfig, ["--config_path", str(path)])
    plan = lora_lm.describe(config, Target(name="local", platform="cpu", kind="cpu", devices=8)).check()
    assert plan.entry_point == "lora_lm" and plan.mesh.shape["model"] == 2
    ended = lora_lm.ENTRY_POINT.execute(plan, plan.mesh.build(devices), Session(run_id="run", tracker=NoopTracker()))
    assert ended.taken == 2
    found = factors_of(ended.exported)
    assert len(found) == 2 * 2 * LAYERS and all("_proj.lora_" in name for name in found)
    assert all(x.any() for x in found.values()), "A begins as 0, as upstream's, and is trained"
    merged, base = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "merged" / "run" / "step-2", pretrained)
    )
    assert merged.keys() == base.keys()
    for name, x in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (found.get(f"{module}.lora_{which}.weight") for which in "AB")
        assert (a is not None) == name.endswith(("q_proj.weight", "v_proj.weight"))
        np.testing.assert_allclose(merged[name], x if a is None else x + 8 / 4 * (b @ a), atol=1e-6, err_msg=name)


def test_a_key_of_other_commands_is_pointed_at():
    with pytest.raises(ConfigError, match="unknown key; here it is `initialize_from_hf`"):
        load(LoraLmConfig, ["--hf_checkpoint", "acme/llama"])


def test_defaults_are_upstream_s():
    config = LoraLmConfig(initialize_from_hf="acme/llama")
    assert (config.train_seq_len, config.hf_save_steps, config.trust_remote_code) == (4096, 1000, False)
    lora = config.lora
    assert (lora.target_modules, lora.r, lora.alpha, lora.dropout) == (None, 8, 8.0, 0.0)
    assert (lora.zero_init_b, lora.a_init_mode, lora.exclude_modules) == (False, "zero", None)
