"""Instruments of a training run (metrics, watchdog, profiler, NaN guard) and the facts that are logged once.

This module assembles them from the configuration and the plan; `trainer` has the individual parts.
"""

import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from levanter.checkpoint import CheckpointRef
from levanter.commands.train.task import Running
from levanter.commands.train.work import TrainPlan, TrainWork
from levanter.config import plain
from levanter.models.precision import Precision
from levanter.runplan import Recorder
from levanter.trainer.metrics import Peak, StepSize, Track, peak_flops
from levanter.trainer.nan_guard import Guard
from levanter.trainer.profile import Profile
from levanter.trainer.state import StatePlan
from levanter.trainer.watch import Watch
from levanter.trainer.watchdog import Watchdog

logger = logging.getLogger(__name__)

PACKAGES = ("jax", "jaxlib", "libtpu", "optax", "equinox", "marin-haliax", "orbax-checkpoint", "numpy", "levanter")
_REPORTED_VERSIONS = ("python", "jax", "libtpu", "levanter", "git_commit")


@dataclass(frozen=True, kw_only=True)
class Instruments:
    """The instruments of a run.

    Attributes:
        track: logs every step.
        watch: statistics that are computed inside steps; None for none.
        watchdog: reports where a run hangs.
        profile: of some steps; None for none.
        tracker: where metrics go.
    """

    track: Track
    watch: Watch | None
    watchdog: Watchdog
    profile: Profile | None
    tracker: Recorder

    @contextmanager
    def running(self, first: int) -> Iterator[None]:
        """Active while the loop runs, from step `first` on; logs the summary afterwards."""
        assert self.track.peak is not None
        logger.info("devices: %s", self.track.peak)
        self.tracker.log_summary(self.track.peak.summary)
        # The summary is logged even if the loop raises. The watchdog encloses the profiler, whose start and stop may
        # hang too.
        try:
            with self.watchdog:
                if self.profile is None:
                    yield
                    return
                with self.profile:
                    self.profile.begin(first)
                    yield
        finally:
            self.tracker.log_summary(self.track.summary)

    def watched(self, step: int) -> bool:
        """Whether the values watched in a step are fetched."""
        return self.watch is not None and self.watch.due(step)


def build_instruments(
    running: Running, size_of: Callable[[int], StepSize], numbers: Callable[[int], Mapping[str, float]]
) -> Instruments:
    """Assembles a run's instruments.

    Args:
        running: the run.
        size_of: the work of a step, by its number.
        numbers: step → metrics of the task.
    """
    plan, mesh, session = running.plan, running.mesh, running.session
    work: TrainWork = plan.work
    trainer = work.config.trainer
    folder = Path(trainer.log_dir) / session.run_id
    watch = Watch.of(trainer.watch)
    return Instruments(
        track=Track(
            tracker=session.tracker,
            size_of=size_of,
            steps=running.stop,
            tokens=running.tokens(running.first),
            peak=device_peak(plan, mesh),
            # Only the devices of this process: others report no memory statistics here.
            devices=[device for device in mesh.devices.flat if device.process_index == jax.process_index()],
            names={} if watch is None else watched_names(watch, work.state, work.state_plan),
            # A count of 0 makes the metric appear from the first step on; None leaves it out where no step can be
            # skipped.
            skipped=0 if trainer.skip_nonfinite_steps or work.config.optimizer.outliers is not None else None,
            more=numbers,
        ),
        watch=watch,
        watchdog=Watchdog(file=folder / f"stacks-{jax.process_index()}.txt", limits=trainer.progress_watchdog),
        profile=None if not trainer.profiler.enabled else _profile(plan, folder, session.tracker),
        tracker=session.tracker,
    )


def watched_names(watch: Watch, state: Any, plan: StatePlan) -> dict[str, tuple[str, ...]]:
    """The names of the watched statistics, from the abstract state."""
    moved = plan.moved_by_gradients(state.model)
    return watch.names(grads=moved, params=moved, updates=moved, opt_state=state.optimizer)


def device_peak(plan: TrainPlan, mesh: Mesh) -> Peak:
    """The peak performance of a run's devices in its compute dtype."""
    kind, precision = plan.target.kind, _matmuls(plan.work.precision)
    return Peak(kind=kind, devices=mesh.devices.size, flops_per_device=peak_flops(kind, precision))


def _matmuls(precision: Precision) -> Any:
    """`levanter.hardware`'s name for the products of a precision policy."""
    # Operands of 16 bits are multiplied in bf16 passes whatever precision is requested.
    if np.dtype(precision.compute).itemsize < 4:
        return "bf16"
    # JAX's names: `high` is three bf16 passes, `highest` six (float32).
    return {"default": "bf16", "high": "high", "highest": "f32"}[precision.matmul]


def _profile(plan: TrainPlan, folder: Path, tracker: Recorder) -> Profile:
    def done(where: Path) -> None:
        tracker.log_artifact(str(where), name="profile", type="jax_profile")

    return Profile(config=plan.work.config.trainer.profiler, folder=folder / "profiler", done=done)


def build_nan_guard(plan: TrainPlan, last_checkpoint: Callable[[], str]) -> Guard:
    """The guard that skips steps or ends the run if losses or gradients are not finite."""
    trainer = plan.work.config.trainer
    return Guard(
        nan=trainer.crash_on_nan,
        inf=trainer.crash_on_inf,
        in_a_row=trainer.skip_nonfinite_steps,
        last_checkpoint=last_checkpoint,
    )


def run_facts(plan: TrainPlan) -> Mapping[str, Any]:
    """The facts that a run logs once: its resolved configuration, a summary of its plan, and package versions."""
    work: TrainWork = plan.work
    # The stored total of bytes over the item size is the number of elements.
    parameters = [planned.leaf for planned in work.state_plan.parameters.leaves]
    return {
        "config": plain(work.config),
        "mesh": str(plan.mesh),
        "plan": {
            "target": f"{plan.target.devices} × {plan.target.kind} on {plan.target.hosts} hosts",
            "mappings": {name: str(getattr(plan.sharding.mappings, name)) for name in ("params", "compute")},
            "bytes_per_device": dict(plan.resident_bytes or {}),
            "batches": [{"start": stage.start, "plan": str(stage.plan)} for stage in work.batches],
            "parameters": sum(leaf.nbytes // leaf.dtype.itemsize for leaf in parameters),
            "programs": [program.name for program in plan.computing],
            "checks": [f"{check.name}: {check.message}" for check in plan.checks],
        },
        "versions": versions(),
    }


def report_facts(plan: TrainPlan, *, checkpoint: CheckpointRef | None, exported: str | None) -> dict[str, str]:
    """The facts of a run that its report lists, by name.

    Args:
        plan: of the run.
        checkpoint: the last complete one.
        exported: folder of the export of the final state.
    """
    logged = run_facts(plan)
    planned = logged["plan"]
    facts = {
        "devices": planned["target"],
        "mesh": logged["mesh"],
        "parameters": f"{planned['parameters']:,}",
        "batch": "; ".join(f"from step {stage['start']:,}: {_size(stage['plan'])}" for stage in planned["batches"]),
        "checkpoint": "none" if checkpoint is None else checkpoint.path,
        "export": "none" if exported is None else exported,
    }
    return facts | {name: version for name, version in logged["versions"].items() if name in _REPORTED_VERSIONS}


def _size(batch: str) -> str:
    """The rows and tokens of a batch's description, without how it is divided."""
    return batch.partition(":")[0]


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect a run's results, if they are installed."""
    result = {"python": platform.python_version()}
    # Each of these packages can change results to the last bit; those that are not installed are left out.
    for name in PACKAGES:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if "GIT_COMMIT" in os.environ:
        result["git_commit"] = os.environ["GIT_COMMIT"]
    return result
