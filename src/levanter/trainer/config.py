"""`TrainerConfig`: the block `trainer:` of every entry point.

Training and evaluation share one block; an entry point uses the fields that it needs. Nothing here touches a device:
the mesh is text until `levanter.mesh` resolves it, precision policies are text until `levanter.models` parses them. Old
spellings are translated in `levanter.config.upstream` before this class is constructed.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from levanter.config.validators import Count, PathText, PositiveInt, PositiveOrAll, Ranged, Seed
from levanter.distributed.initialize import DistributedConfig
from levanter.hardware.compiler import CompilerMode
from levanter.io.names import name_problem
from levanter.mesh.config import MeshConfig
from levanter.models.precision import PolicyText
from levanter.tracker import TrackerConfig, WandbConfig
from levanter.trainer.config_blocks import (
    BatchSizeStage,
    CheckpointerConfig,
    ModelAveragingConfig,
    ProfilerConfig,
    ProgressWatchdogConfig,
    WatchConfig,
    refuse,
)

_OPTION_NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)
JAX_CONFIG = {"jax_threefry_partitionable": True, "jax_softmax_custom_jvp": True}


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Ranged):
    """How a run uses its devices, and everything around the model and the data.

    Attributes:
        seed: the seed of model initialization, data order and training.
        mp: the precision policy: `f32`, `bfloat16`, `p=f32,c=bfloat16`, `params=…,compute=…,output=…`.
        model_averaging: a running average of the parameters, kept in addition to them; null for none.
        log_dir: the folder of logs, profiles and artifacts.
        id: the id of the run; null takes `$RUN_ID`, the tracker's id, or a random one that all hosts share.
        tracker: metric trackers: one or a list.
        watch: norms and histograms of gradients and parameters.
        profiler: a JAX profile of some train steps.
        progress_watchdog: time limits of the training loop; none by default.
        crash_on_nan: whether a NaN loss ends the run.
        crash_on_inf: whether an infinite loss ends the run.
        allow_nonfinite: whether checkpoint weights with NaN or infinite values are accepted; otherwise they are
            refused.
        skip_nonfinite_steps: how many consecutive steps with a non-finite loss or gradient are skipped before the run
            ends; 0 for none.
        mesh: the device mesh and the mappings of logical axes to mesh axes.
        train_batch_size: sequences a step over all devices, or a list of stages {start, value}; -1 derives it from
            per_device_parallelism.
        per_device_parallelism: sequences per device in one forward and backward pass; -1 for the device's whole share
            of the batch.
        per_device_eval_parallelism: sequences per device in one evaluation batch; -1 for the training value.
        allow_nondivisible_batch_size: whether a batch that is not divisible by the devices is padded.
        num_train_steps: steps of the whole run.
        trainable: the parameters that are trained: groups (`embedding`, `attention`, `mlp`, `head`, `norm`) and path
            patterns (`**.self_attn`), of which one must match; the others are frozen. null trains everything.
        steps_per_eval: steps between two evaluations.
        max_eval_batches: batches of one evaluation; null for all.
        checkpointer: where and how often checkpoints are saved.
        load_checkpoint: whether the run resumes; null resumes if there is a checkpoint.
        load_checkpoint_path: the checkpoint to resume from; null for the run's own folder.
        initialize_from: a checkpoint of another run to resume from, if the run has none of its own.
        resume_with_changes: whether a run resumes from its checkpoint although its architecture, data, seed or
            optimizer type changed; the shapes of all arrays must still match.
        allow_partial_checkpoint: whether parameters that a checkpoint lacks are initialized instead.
        jax_config: options for `jax.config`.
        jax_compilation_cache_dir: a folder or URL of JAX's persistent compilation cache; true for the default folder in
            the user's cache, false for none; null is true on accelerators and false on CPUs.
        compiler: XLA options of the Programs: `tuned` for the measured options of this kind of TPU, Program and layout
            (docs/preflight/compiler-options.md), or `default` for none; the plan lists them.
        compiler_options: further XLA options by name, which override those of `compiler`, for train steps, scoring and
            generation; options of another platform are skipped. The compiler refuses unknown names.
        distributed: how the processes of the job find each other.
        require_accelerator: whether a run without TPU or GPU is refused; null allows it.
    """

    seed: Seed = 0
    mp: str = "f32"
    model_averaging: ModelAveragingConfig | None = None

    log_dir: Path = Path("logs/")
    id: str | None = None
    tracker: TrackerConfig | tuple[TrackerConfig, ...] = field(default_factory=WandbConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    progress_watchdog: ProgressWatchdogConfig = field(default_factory=ProgressWatchdogConfig)
    crash_on_nan: bool = True
    crash_on_inf: bool = True
    allow_nonfinite: bool = False
    skip_nonfinite_steps: Count = 0

    mesh: MeshConfig = field(default_factory=MeshConfig)

    train_batch_size: PositiveOrAll | tuple[BatchSizeStage, ...] = 512
    per_device_parallelism: PositiveOrAll = -1
    per_device_eval_parallelism: PositiveOrAll = -1
    allow_nondivisible_batch_size: bool = False
    num_train_steps: PositiveInt = 400_000
    trainable: tuple[str, ...] | None = None
    steps_per_eval: PositiveInt = 1_000
    max_eval_batches: PositiveInt | None = None

    checkpointer: CheckpointerConfig = field(default_factory=CheckpointerConfig)
    load_checkpoint: bool | None = None
    load_checkpoint_path: PathText | None = None
    initialize_from: PathText | None = None
    resume_with_changes: bool = False
    allow_partial_checkpoint: bool = False

    jax_config: dict[str, bool | int | float | str] = field(default_factory=lambda: dict(JAX_CONFIG))
    jax_compilation_cache_dir: PathText | bool | None = None
    compiler: CompilerMode = "tuned"
    compiler_options: dict[str, bool | int | float | str] = field(default_factory=dict[str, bool | int | float | str])
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    require_accelerator: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # Python callers may pass a `Precision` or a policy of `jmp`; the field of the frozen class holds its text.
        object.__setattr__(self, "mp", PolicyText.of(self.mp))
        refuse(self._problems())

    def _problems(self) -> Iterable[str]:
        if self.id is not None and (problem := name_problem(self.id)) is not None:
            yield f"id: {problem}"
        if not self.mp.strip():
            yield "mp: must name a precision policy such as f32 or p=f32,c=bfloat16, got nothing"
        else:
            try:
                PolicyText.of(self.mp).check()
            except ValueError as error:
                yield f"mp: {error}"
        yield from self._batch_problems()
        for name in self.compiler_options:
            if not _OPTION_NAME.fullmatch(name):
                # The likely mistake is a flag as on a command line: `--xla_option=value`.
                bare = re.sub(r"\W+", "_", name.strip("- ").partition("=")[0]) or "xla_…"
                yield f"compiler_options: {name!r} is not the name of an option; expected it bare, like {bare}"
        if self.load_checkpoint and self.initialize_from is not None:
            yield "load_checkpoint and initialize_from: one resumes a run, the other starts a new one; keep one"

    def _batch_problems(self) -> Iterable[str]:
        # Whether the sizes divide by the devices is checked once the mesh is known (`plan_batches`).
        size = self.train_batch_size
        if isinstance(size, int):
            if size == -1 and self.per_device_parallelism == -1:
                yield "train_batch_size: -1 is derived from per_device_parallelism, which is -1 too; give one of them"
            return
        if not size or size[0].start != 0:
            yield "train_batch_size: the first stage must start at step 0"
        # All problems are yielded, not only the first, so that one error lists them together.
        for i, stage in enumerate(size):
            if i and stage.start <= size[i - 1].start:
                yield f"train_batch_size[{i}].start: must be greater than {size[i - 1].start}, the start before it"

    @property
    def trackers(self) -> tuple[TrackerConfig, ...]:
        """The trackers as a tuple, whether one or several were given."""
        return (self.tracker,) if isinstance(self.tracker, TrackerConfig) else self.tracker
