"""`TrainerConfig`: keys and defaults, validation with full text, and its YAML."""

from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path

import pytest

from levanter.config import ConfigError, dump, load, parse_text, plain
from levanter.config.upstream.unsupported import unsupported_rows
from levanter.mesh.config import MeshConfig
from levanter.models.precision import Precision
from levanter.tracker import JsonLoggerConfig, NoopConfig, TensorboardConfig, WandbConfig
from levanter.trainer import (
    BatchSizeStage,
    CheckpointerConfig,
    CheckpointInterval,
    DistributedConfig,
    EmaModelAveragingConfig,
    ProfilerConfig,
    TrainerConfig,
    WatchConfig,
)

pytestmark = pytest.mark.quick


@dataclass(frozen=True, kw_only=True)
class Entry:
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


def trainer(text: str) -> TrainerConfig:
    indented = "".join(f"  {line}\n" for line in text.splitlines())
    return parse_text(Entry, f"trainer:\n{indented}", source="run.yaml").trainer


def refused(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        trainer(text)
    return [str(problem) for problem in caught.value.problems]


UPSTREAM_KEYS = """
    seed mp quantization model_averaging log_dir id tracker watch profiler log_jaxprs log_xla_hlo
    crash_on_nan crash_on_inf mesh use_explicit_mesh_axes train_batch_size per_device_parallelism
    per_device_eval_parallelism allow_nondivisible_batch_size num_train_steps steps_per_eval
    max_eval_batches checkpointer load_checkpoint load_checkpoint_path initialize_from
    allow_partial_checkpoint jax_config jax_compilation_cache_dir distributed require_accelerator
    shutdown_at_exit progress_watchdog xla_dump_upload
"""


OUR_KEYS = "allow_nonfinite compiler compiler_options resume_with_changes skip_nonfinite_steps trainable"


def test_the_keys_are_upstream_s():
    found = {f.name for f in fields(TrainerConfig)}
    not_carried = set(unsupported_rows(("trainer",), found))
    assert found | not_carried == {*UPSTREAM_KEYS.split(), *OUR_KEYS.split()}
    assert not found & not_carried
    # What is ours changes no result where it is not written; the compiler's options are those that were compared.
    ours = TrainerConfig()
    assert (ours.compiler, ours.compiler_options) == ("tuned", {})
    assert (ours.allow_nonfinite, ours.skip_nonfinite_steps, ours.trainable, ours.resume_with_changes) == (
        False,
        0,
        None,
        False,
    )


def test_defaults():
    config = TrainerConfig()
    assert (config.seed, config.mp, config.log_dir, config.id) == (0, "f32", Path("logs"), None)
    assert (config.train_batch_size, config.num_train_steps, config.steps_per_eval) == (512, 400_000, 1_000)
    assert (config.per_device_parallelism, config.per_device_eval_parallelism) == (-1, -1)
    assert config.require_accelerator is None
    assert config.trackers == (WandbConfig(),)
    assert config.mesh == MeshConfig()
    assert config.profiler == ProfilerConfig(enabled=False, start_step=5, num_steps=25, perfetto_link=False)
    assert config.checkpointer.save_interval == timedelta(minutes=15)
    assert config.checkpointer.keep == [CheckpointInterval(every=10_000)]
    assert config.watch == WatchConfig(watch_targets=["grads", "params"], interval=10)
    assert config.jax_config == {"jax_threefry_partitionable": True, "jax_softmax_custom_jvp": True}


FULL = """\
seed: 3
mp: p=f32,c=bfloat16
model_averaging: {type: ema, beta: 0.99}
log_dir: /tmp/logs
id: run-1
tracker:
  - {type: wandb, project: p, tags: [a, b]}
  - type: json_logger
watch: {watch_targets: grads, interval: 5}
profiler: {enabled: true, num_steps: 3}
mesh: {axes: {model: 2}, shared_mapping: {heads: null, vocab: model}, param_mapping: {embed: [replica_dcn, data]}}
train_batch_size:
  - {start: 0, value: 32}
  - {start: 1000, value: 64}
checkpointer:
  save_interval: 30m
  keep: [{every: 1000, until: 10000}, {every: 5000}]
distributed: {coordinator_address: "h:1", num_processes: 2, process_id: 1}
load_checkpoint: false
require_accelerator: true
"""


class Policy:
    """As `jmp` has it."""

    param_dtype, compute_dtype, output_dtype = "float32", "bfloat16", "float32"


def test_a_policy_is_text_that_knows_what_it_means():
    config = TrainerConfig(mp="p=f32,c=bf16")
    assert config.mp == "p=f32,c=bf16" and config.mp.precision == Precision.parse("p=f32,c=bf16")
    assert TrainerConfig(mp=Policy()).mp == "p=float32,c=bfloat16,o=float32"
    assert TrainerConfig(mp=config.mp.precision).mp.precision == config.mp.precision
    assert type(plain(config)["mp"]) is str and TrainerConfig() == TrainerConfig(mp="f32")
    with pytest.raises(TypeError, match="5 is not a precision policy: it lacks param_dtype"):
        TrainerConfig(mp=5)
    with pytest.raises(ValueError, match="mp: precision policy 'p=f32,c=bf17': 'bf17' is not a dtype"):
        TrainerConfig(mp="p=f32,c=bf17")


def test_a_full_block():
    config = trainer(FULL)
    assert config.trackers == (WandbConfig(project="p", tags=["a", "b"]), JsonLoggerConfig())
    assert config.train_batch_size == (BatchSizeStage(start=0, value=32), BatchSizeStage(start=1000, value=64))
    assert config.checkpointer.keep == [CheckpointInterval(every=1000, until=10000), CheckpointInterval(every=5000)]
    assert config.model_averaging == EmaModelAveragingConfig(beta=0.99)
    assert config.distributed == DistributedConfig(coordinator_address="h:1", num_processes=2, process_id=1)
    assert config.mesh.param_mapping == {"embed": ["replica_dcn", "data"]}
    assert parse_text(TrainerConfig, dump(config)) == config


def test_trackers_by_type_and_by_default():
    assert trainer("tracker: {type: tensorboard, logdir: x}").trackers == (TensorboardConfig(logdir="x"),)
    assert trainer("tracker: {project: p}").trackers == (WandbConfig(project="p"),)
    assert trainer("tracker: []").trackers == ()
    assert trainer("tracker: {type: noop}").trackers == (NoopConfig(),)
    assert refused("tracker: {type: wand}") == [
        "run.yaml:2: trainer.tracker.type: unknown type `wand`; did you mean `wandb`? "
        "(known: json_file, json_logger, noop, telemetry, tensorboard, trackio, wandb)"
    ]


def test_overrides_of_a_mesh():
    argv = ["--trainer.mesh.axes", '{"model": 2}', "--trainer.mesh.axes.data", "4", "--trainer.tracker.type", "noop"]
    config = load(Entry, argv).trainer
    assert config.mesh.axes == {"model": 2, "data": 4}
    assert config.trackers == (NoopConfig(),)


def test_an_old_block_becomes_a_new_one():
    config = trainer("model_axis_size: 2\ntensor_parallel_axes: [mlp, heads]\nfsdp_axis: embed\nwandb: {project: old}")
    assert config.mesh == MeshConfig(
        axes={"model": 2},
        dcn_axes={"replica_dcn": 1, "data_dcn": -1},
        shared_mapping={"mlp": "model", "heads": "model"},
        compute_mapping={"batch": ["replica_dcn", "data_dcn", "replica", "data"]},
        param_mapping={"embed": ["data_dcn", "data"]},
        split_heads="auto",
    )
    assert config.trackers == (WandbConfig(project="old"),)


def test_a_misspelt_old_key_suggests_the_old_key():
    assert refused("tensor_parallel_axis: [mlp]") == [
        "run.yaml:2: trainer.tensor_parallel_axis: unknown key; did you mean `tensor_parallel_axes`?"
    ]


def test_everything_wrong_with_a_trainer_is_listed():
    text = """\
seed: -1
mp: " "
per_device_parallelism: 0
num_train_steps: 0
max_eval_batches: 0
skip_nonfinite_steps: -1
train_batch_size: -1
per_device_eval_parallelism: -2
load_checkpoint: true
initialize_from: x
"""
    assert refused(text) == [
        "run.yaml:2: trainer.seed: must not be negative, got -1",
        "run.yaml:4: trainer.per_device_parallelism: must be at least 1, or -1, got 0",
        "run.yaml:5: trainer.num_train_steps: must be at least 1, got 0",
        "run.yaml:6: trainer.max_eval_batches: must be at least 1, got 0",
        "run.yaml:7: trainer.skip_nonfinite_steps: must not be negative, got -1",
        "run.yaml:9: trainer.per_device_eval_parallelism: must be at least 1, or -1, got -2",
    ]
    assert refused('mp: " "\nload_checkpoint: true\ninitialize_from: x\n') == [
        "run.yaml:2: trainer: mp: must name a precision policy such as f32 or p=f32,c=bfloat16, got nothing\n"
        "    load_checkpoint and initialize_from: one resumes a run, the other starts a new one; keep one"
    ]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: TrainerConfig(train_batch_size=-1),
            "train_batch_size: -1 is derived from per_device_parallelism, which is -1 too; give one of them",
        ),
        (lambda: TrainerConfig(train_batch_size=0), "train_batch_size: must be at least 1, or -1, got 0"),
        (
            lambda: TrainerConfig(
                train_batch_size=(BatchSizeStage(start=5, value=1), BatchSizeStage(start=5, value=2))
            ),
            "train_batch_size: the first stage must start at step 0\n"
            "train_batch_size[1].start: must be greater than 5, the start before it",
        ),
        (lambda: BatchSizeStage(start=0, value=0), "value: must be at least 1, got 0"),
        (
            lambda: CheckpointerConfig(save_interval=timedelta(0), keep_last_temporary_checkpoints=-1),
            "save_interval: must be positive, got 0.0\nkeep_last_temporary_checkpoints: must not be negative, got -1",
        ),
        (lambda: CheckpointerConfig(base_path=" "), "base_path: must name a file, a folder or a URL, got nothing"),
        (lambda: CheckpointInterval(every=0), "every: must be at least 1, got 0"),
        (
            lambda: CheckpointerConfig(
                keep=[
                    CheckpointInterval(every=1),
                    CheckpointInterval(every=2, until=5),
                    CheckpointInterval(every=2, until=5),
                ],
            ),
            "keep[0]: has no `until`, so the intervals after it never begin\n"
            "keep[2].until: must be greater than 5, the end of what is before it",
        ),
        (lambda: DistributedConfig(process_id=1), "process_id: needs num_processes beside it"),
        (
            lambda: DistributedConfig(process_id=2, num_processes=2),
            "process_id: must be from 0 to 1, got 2",
        ),
        (
            lambda: ProfilerConfig(start_step=-1, num_steps=0),
            "start_step: must not be negative, got -1\nnum_steps: must be at least 1, got 0",
        ),
        (lambda: WatchConfig(interval=-1), "interval: must not be negative, got -1"),
    ],
)
def test_validation(build, message: str):
    with pytest.raises(ValueError) as caught:
        build()
    assert str(caught.value) == message


def test_save_interval_may_be_off():
    assert trainer("checkpointer: {save_interval: null}").checkpointer.save_interval is None
