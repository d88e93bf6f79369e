"""The nested blocks of `trainer:`: checkpoints, profiler, watching, averaging, batch size stages.

These classes only hold configuration; the packages that implement the features take them as arguments.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import draccus

from levanter.config.validators import (
    Count,
    Decay,
    Duration,
    PathText,
    PositiveDuration,
    PositiveFloat,
    PositiveInt,
    Ranged,
)

WatchTarget = Literal["grads", "params", "opt_state", "updates"]


def refuse(problems: Iterable[str]) -> None:
    """Raises one `ValueError` that lists all problems, if there are any."""
    listed = list(problems)
    if listed:
        raise ValueError("\n".join(listed))


@dataclass(frozen=True, kw_only=True)
class CheckpointInterval(Ranged):
    """An interval of permanent checkpoints, until a step (without end if `until` is null).

    Attributes:
        every: steps between two permanent checkpoints.
        until: the step up to which this interval applies.
    """

    every: PositiveInt
    until: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointDebugConfig(Ranged):
    """Diagnostics of slow or memory-hungry saves.

    Attributes:
        enabled: whether diagnostics are logged.
        log_interval: seconds between two lines while a save runs.
        dump_stacks_after: seconds after which all Python stacks are logged.
        tracemalloc_frames: frames recorded for each allocation.
        top_allocations: how many of the largest allocations are logged.
        force_gc_before_serialize: whether garbage is collected before a save.
        flush_logs: whether logs are flushed after each line.
    """

    enabled: bool = False
    log_interval: PositiveFloat = 60.0
    dump_stacks_after: PositiveFloat | None = None
    tracemalloc_frames: PositiveInt = 25
    top_allocations: Count = 8
    force_gc_before_serialize: bool = True
    flush_logs: bool = True


@dataclass(frozen=True, kw_only=True)
class CheckpointerConfig(Ranged):
    """Where and how often checkpoints are saved.

    Attributes:
        base_path: the folder or URL of all checkpoints.
        save_interval: time between two temporary checkpoints; null for none.
        keep: which checkpoints are permanent, by step; each interval but the last needs `until`.
        append_run_id_to_base_path: whether each run has its own folder below `base_path`.
        delete_old_temp_checkpoints: whether temporary checkpoints of earlier attempts are deleted.
        temporary_base_path: the folder or URL of temporary checkpoints; null for `base_path`.
        keep_last_temporary_checkpoints: how many temporary checkpoints are kept.
        debug: diagnostics of saving.
    """

    base_path: PathText = "checkpoints/"
    save_interval: PositiveDuration | None = timedelta(minutes=15)
    keep: list[CheckpointInterval] = field(default_factory=lambda: [CheckpointInterval(every=10_000)])
    append_run_id_to_base_path: bool = True
    delete_old_temp_checkpoints: bool = True
    temporary_base_path: PathText | None = None
    keep_last_temporary_checkpoints: Count = 1
    debug: CheckpointDebugConfig = field(default_factory=CheckpointDebugConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(self._problems())

    def _problems(self) -> Iterable[str]:
        previous = 0
        for i, interval in enumerate(self.keep):
            if interval.until is None:
                # Only the last interval may be open-ended.
                if i + 1 < len(self.keep):
                    yield f"keep[{i}]: has no `until`, so the intervals after it never begin"
            elif interval.until <= previous:
                yield f"keep[{i}].until: must be greater than {previous}, the end of what is before it"
            else:
                previous = interval.until


@dataclass(frozen=True, kw_only=True)
class ProfileOptionsConfig(Ranged):
    """Options of the JAX profiler; null keeps JAX's default.

    Attributes:
        host_tracer_level: how much of the host is traced (0 to 3).
        python_tracer_level: whether Python calls are traced (0 or 1).
        device_tracer_level: how much of the device is traced.
        enable_hlo_proto: whether compiled programs are saved with the trace.
        include_dataset_ops: whether operations of the data set are traced.
        advanced_configuration: further options by JAX's own names.
    """

    host_tracer_level: Count | None = None
    python_tracer_level: Count | None = None
    device_tracer_level: Count | None = None
    enable_hlo_proto: bool = False
    include_dataset_ops: bool | None = None
    advanced_configuration: dict[str, bool | int | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig(Ranged):
    """A profile of some steps.

    Attributes:
        enabled: whether steps are profiled.
        start_step: the first profiled step.
        num_steps: the number of profiled steps.
        perfetto_link: whether the run waits for the trace to be opened through a link.
        create_perfetto_trace: whether a file for the Perfetto viewer is written beside the profile.
        process_index: the process that is profiled; null for all of them.
        profile_options: options of the JAX profiler.
    """

    enabled: bool = False
    start_step: Count = 5
    num_steps: PositiveInt = 25
    perfetto_link: bool = False
    create_perfetto_trace: bool = False
    process_index: Count | None = None
    profile_options: ProfileOptionsConfig = field(default_factory=ProfileOptionsConfig)


@dataclass(frozen=True, kw_only=True)
class ProgressWatchdogConfig(Ranged):
    """Time limits of the training loop; a run that passes one writes its stacks and ends with exit code 5.

    Attributes:
        step_timeout: the longest time that one step may take; null for no limit.
        process_timeout: the longest time without progress (the end of a step, the start or end of an evaluation or a
            checkpoint); null for no limit.
        startup_timeout: the longest time from the start of the loop to the end of its first step, which compiles; null
            for no limit.
        startup_grace_period: the time from the end of the first step in which `step_timeout` and `process_timeout` do
            not apply.
        diagnostic_timeout: the longest time that writing the stacks may take; null for 30 seconds.
    """

    step_timeout: PositiveDuration | None = None
    process_timeout: PositiveDuration | None = None
    startup_timeout: PositiveDuration | None = None
    startup_grace_period: Duration = timedelta(hours=1)
    diagnostic_timeout: PositiveDuration | None = None


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Ranged):
    """Norms and histograms of gradients and parameters, computed inside the step.

    Attributes:
        watch_targets: the trees that are watched: one of grads, params, opt_state, updates, or a list.
        include_norms: whether the norm of the whole tree is logged.
        include_per_parameter_norms: whether the norm of each parameter is logged.
        include_histograms: whether histograms are logged (slow).
        split_scan_layers: whether stacked layers are logged one by one.
        interval: steps between two logs; 0 turns watching off.
    """

    watch_targets: WatchTarget | list[WatchTarget] = field(default_factory=lambda: ["grads", "params"])
    include_norms: bool = True
    include_per_parameter_norms: bool = True
    include_histograms: bool = False
    split_scan_layers: bool = True
    interval: Count = 10


@dataclass(frozen=True, kw_only=True)
class ModelAveragingConfig(Ranged, draccus.ChoiceRegistry):
    """The base of all ways to average parameters over steps."""


@ModelAveragingConfig.register_subclass("ema")
@dataclass(frozen=True, kw_only=True)
class EmaModelAveragingConfig(ModelAveragingConfig):
    """An exponential moving average.

    Attributes:
        beta: the weight of the average; the new parameters have 1 - beta.
    """

    beta: Decay = 0.999


@ModelAveragingConfig.register_subclass("ema_decay_sqrt")
@dataclass(frozen=True, kw_only=True)
class EmaDecaySqrtConfig(ModelAveragingConfig):
    """The weighted mean of the parameters of all steps; steps of a final phase have the largest weights.

    Attributes:
        beta: each step before `switch_step` has the weight 1 - beta.
        switch_step: the first step of the phase, in which the weight is 1 - sqrt(x), x the fraction that has passed.
        decay_steps: the length of the phase in steps; after it the average no longer changes.
    """

    beta: Decay = 0.999
    switch_step: Count = 100_000
    decay_steps: PositiveInt = 100_000


@dataclass(frozen=True, kw_only=True)
class BatchSizeStage(Ranged):
    """A batch size from a step on.

    Attributes:
        start: the first step with this size.
        value: the size.
    """

    start: Count
    value: PositiveInt
