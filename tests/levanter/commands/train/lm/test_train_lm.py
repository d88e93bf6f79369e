"""The description of training runs: the configurations we ship, on the pods they are for, without a device."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from haliax_ext.abstract import with_arrays
from haliax_ext.errors import ShardingError
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.config import load, load_written
from levanter.data import next_tokens
from levanter.plan.target_from_name import pod_target
from levanter.runplan import RunRefused, Target
from levanter.trainer.batch_plan import BatchError

CONFIGS = Path(__file__).parents[5] / "config/train"
GIB = 1 << 30


def read(name: str, *overrides: str) -> TrainLmConfig:
    return load(TrainLmConfig, ["--config_path", str(CONFIGS / f"{name}.yaml"), *overrides])


def plan_of(name: str, pod: str, *overrides: str):
    return describe(read(name, *overrides), pod_target(pod))


def parameters(layers, embed, mlp, heads, kv_heads, vocab, head_size=128) -> int:
    attention = 2 * embed * head_size * (heads + kv_heads)
    return layers * (attention + 3 * embed * mlp + 2 * embed) + 2 * vocab * embed + embed


SEVEN = parameters(32, 4096, 11008, 32, 32, 32000)
THIRTEEN = parameters(40, 5120, 13824, 40, 40, 32000)
SEVENTY = parameters(80, 8192, 28672, 64, 8, 32000)
EIGHT = parameters(32, 4096, 14336, 32, 8, 128256)
SMALL = parameters(24, 1536, 4096, 12, 12, 32768)


@pytest.mark.parametrize(
    ("name", "pod", "count", "chips", "rows_a_device"),
    [
        ("llama2_7b_v4-32", "v4-32", SEVEN, 16, 16),
        ("llama2_13b_v4-64", "v4-64", THIRTEEN, 32, 8),
        ("llama2_70b_v4-256", "v4-256", SEVENTY, 128, 16),
        ("llama2_70b_v4-256_seq2048", "v4-256", SEVENTY, 128, 8),
        ("llama3_8b_v6e-128", "v6e-128", EIGHT, 128, 1),
        ("llama_0.78b_64k_v6e-8", "v6e-8", SMALL, 8, 1),
    ],
)
def test_shipped_configurations(name, pod, count, chips, rows_a_device):
    plan = plan_of(name, pod)
    assert plan.exit_code == 0, [str(e) for e in plan.errors]
    assert plan.mesh.size == chips
    assert plan.sharding.by_path.keys() >= {"model.lm_head.weight", "step", "key"}
    parameters_there = plan.work.state_plan.parameters
    assert parameters_there.total_bytes == 4 * count
    # All but the norms is cut over every chip; the norms over `data`.
    norms = plan.resident_bytes["norm"]
    cut = (4 * count - norms * plan.mesh.shape["data"]) // chips
    assert parameters_there.bytes_per_device == cut + norms
    assert plan.resident_bytes["optimizer"] == 2 * (cut + norms) + 8
    (stage,) = plan.work.batches
    assert stage.plan.per_device == rows_a_device
    assert [p.name for p in plan.programs] == ["init_state", "train_step"]


@pytest.mark.parametrize("model", [1, 2, 4])
def test_a_wider_model_axis_accumulates_more(model):
    plan = plan_of("llama_0.78b_64k_v6e-8", "v6e-8", f"--trainer.mesh.axes.model={model}")
    (stage,) = plan.work.batches
    assert stage.plan.accumulation == model
    assert stage.plan.tokens == 524_288
    # The same shards of parameters and statistics, however the chips are arranged (norms aside).
    assert plan.work.state_plan.parameters.bytes_per_device == pytest.approx(4 * SMALL / 8, rel=2e-3)


def test_twelve_heads_do_not_divide_by_eight():
    with pytest.raises(ShardingError, match=r"12 attention heads .* cannot be sharded over model 8"):
        plan_of("llama_0.78b_64k_v6e-8", "v6e-8", "--trainer.mesh.axes.model=8")


def test_as_published_everything_is_whole_on_every_chip():
    plan = plan_of("llama_0.78b_64k_v6e-8_as_published", "v6e-8")
    assert plan.work.state_plan.parameters.bytes_per_device == 4 * SMALL
    # Weights, both moments and gradients.
    assert sum(plan.resident_bytes.values()) == pytest.approx(16 * SMALL, rel=1e-6)
    (logits,) = [p for p in plan.activations.leaves if p.leaf.path.startswith("logits")]
    assert logits.bytes_per_device == 65_536 * 32_768 * 4


def test_four_replicated_shards_leave_too_much_on_a_chip():
    narrow = plan_of("llama3_8b_v6e-128_embed4", "v6e-128")
    wide = plan_of("llama3_8b_v6e-128", "v6e-128")
    # Weights, two moments and gradients, in float32, over 4 and over 128 chips.
    assert sum(narrow.resident_bytes.values()) == pytest.approx(16 * EIGHT / 4, rel=1e-3)
    assert sum(wide.resident_bytes.values()) == pytest.approx(16 * EIGHT / 128, rel=1e-3)
    assert narrow.sharding.bytes_per_device == pytest.approx(12 * EIGHT / 4, rel=1e-3)


TINY = """
data: {tokenizer: passthrough, vocab_size: 131}
model: {type: llama, max_seq_len: 16, hidden_dim: 32, intermediate_dim: 48, num_layers: 2, num_heads: 4,
        num_kv_heads: 2, cross_entropy_block_size: 8}
optimizer: {learning_rate: 0.01, warmup: 0, lr_schedule: constant}
trainer:
  require_accelerator: false
  tracker: {type: noop}
  num_train_steps: 10
  train_batch_size: [{start: 0, value: 8}, {start: 5, value: 16}]
  per_device_parallelism: 2
  mesh: {axes: {data: 4, model: 2}, shared_mapping: {vocab: model}}
"""
LOCAL = Target(name="local", platform="cpu", kind="cpu", devices=8)


def tiny(tmp_path, *overrides: str) -> TrainLmConfig:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return load(TrainLmConfig, ["--config_path", str(path), *overrides])


def test_its_programs_run(tmp_path, devices):
    plan = describe(tiny(tmp_path), LOCAL).check()
    assert [p.name for p in plan.programs] == ["init_state", "train_step", "train_step_from_5"]
    assert plan.work.Vocab.size == 132 and plan.work.model.vocab_size == 131
    mesh = plan.mesh.build(devices)
    state = plan.program("init_state").jit(mesh)(jax.random.PRNGKey(0))
    program = plan.program("train_step")
    batch = program.input("batch").value
    rng = np.random.default_rng(0)
    shape = batch.tokens.array.shape
    # A sequence that repeats itself can be learned.
    tokens = np.tile(rng.integers(0, 131, (1, shape[1])), (shape[0], 1)).astype(np.int32)
    values = {
        "tokens": tokens,
        "targets": next_tokens(tokens),
        "loss_weights": np.ones(shape, np.float32),
        "segment_ids": np.zeros(shape, np.int32),
    }
    step, losses = program.jit(mesh), []
    for _ in range(8):
        state, metrics = step(state, None, with_arrays(batch, values))
        losses.append(float(metrics.loss))
    # The entry that was added to divide the vocabulary is no part of the distribution.
    assert losses[0] == pytest.approx(np.log(131), rel=0.05)
    assert losses[-1] < 0.6 * losses[0]
    assert int(state.step) == 8


def test_a_batch_that_does_not_divide_is_refused(tmp_path):
    with pytest.raises(BatchError, match="nearest: 8 or 16"):
        describe(tiny(tmp_path, "--trainer.train_batch_size", "12"), LOCAL)


def test_what_changes_the_step_and_is_not_built_is_an_error_of_the_plan(tmp_path):
    asked = ("--trainer.quantization", "{int8: true}", "--log_entropy", "true", "--trainer.log_jaxprs", "true")
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    loaded = load_written(TrainLmConfig, ["--config_path", str(path), *asked])
    plan = describe(loaded.config, LOCAL, written=loaded.written)
    assert plan.exit_code == 2
    assert [str(e) for e in plan.errors] == [
        "log_entropy: not supported yet; set it to false",
        "trainer.quantization: not supported yet, and it would change the results; set it to null",
    ]
    assert any(c.status == "note" and "trainer.log_jaxprs: no effect" in c.message for c in plan.checks)


def test_a_checkpoint_that_is_not_here_is_not_checked(tmp_path):
    plan = describe(tiny(tmp_path, "--initialize_from_hf", "nobody/nothing"), LOCAL)
    assert plan.exit_code == 0
    assert [c.name for c in plan.checks if c.status == "unchecked"] == ["weights"]
    assert plan.programs[0].name == "init_optimizer"
    # Reading is planned from what a checkpoint of this architecture holds, in bfloat16; the weights are f32 here.
    assert plan.load is not None
    assert 2 * plan.load.source_bytes == plan.work.state_plan.parameters.total_bytes
    with pytest.raises(RunRefused, match="nobody/nothing"):
        plan.check()


def test_validation_text_that_is_not_here_is_planned(tmp_path):
    """Text that only the pod can read: its evaluation's Program is a part of the plan, and a run does not begin."""
    source = "{type: url, train_urls: ['s3://b/t.jsonl'], validation_urls: ['s3://b/v.jsonl']}"
    words = ("--data.components", f"{{web: {{source: {source}}}}}", "--trainer.train_batch_size", "16")
    plan = describe(tiny(tmp_path, *words), LOCAL)
    assert plan.exit_code == 0 and "validation" in [c.name for c in plan.checks if c.status == "unchecked"]
    assert [p.name for p in plan.programs] == ["init_state", "train_step", "evaluate"]
    assert plan.program("evaluate").input("tokens").value.array.shape == (8, 16)
    with pytest.raises(RunRefused, match=r"v\.jsonl|s3://"):
        plan.check()


def test_the_vocabulary_is_known_by_name_where_the_tokenizer_is_not_here(tmp_path):
    def check_of(*overrides):
        plan = describe(tiny(tmp_path, "--data.vocab_size", "null", *overrides), LOCAL)
        assert [c.name for c in plan.checks if c.status == "unchecked"] == ["tokenizer"]
        return next(c for c in plan.checks if c.name == "vocabulary")

    check = check_of("--data.tokenizer", "meta-llama/Llama-3.1-8B")
    assert check.message.startswith("128256 ids, the known size of meta-llama/Llama-3.1-8B")
    assert check_of("--data.tokenizer", "NousResearch/Llama-2-7b-hf").message.startswith("32000 ids")
    with pytest.raises(ValueError, match=r"set model\.vocab_size"):
        check_of("--data.tokenizer", "nobody/knows")


def test_contradictions_are_refused(tmp_path):
    with pytest.raises(ValueError, match="keep one") as caught:
        tiny(tmp_path, "--initialize_from_hf", "a/b", "--initialize_from_checkpoint_path", "c", "--train_seq_len", "1")
    assert "train_seq_len must be at least 2" in str(caught.value)


def test_the_command_prints_the_plan_before_it_looks_at_the_text(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    command = [sys.executable, "-m", "levanter.main.train_lm", "--config_path", str(tmp_path / "tiny.yaml")]
    done = subprocess.run(
        [*command, "--trainer.checkpointer.base_path", str(tmp_path / "checkpoints")],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "init_state → train_step" in done.stdout
    assert "error: data.components: " in done.stderr
