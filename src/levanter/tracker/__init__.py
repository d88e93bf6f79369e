"""Trackers: where a run's metrics go (see `base`)."""

from collections.abc import Sequence

from levanter.tracker.base import Metrics as Metrics
from levanter.tracker.base import MetricsTable as MetricsTable
from levanter.tracker.base import NoopConfig as NoopConfig
from levanter.tracker.base import NoopTracker as NoopTracker
from levanter.tracker.base import TelemetryConfig as TelemetryConfig
from levanter.tracker.base import Tracker as Tracker
from levanter.tracker.base import TrackerConfig as TrackerConfig
from levanter.tracker.composite import CompositeTracker as CompositeTracker
from levanter.tracker.json_file import JsonFileTrackerConfig as JsonFileTrackerConfig
from levanter.tracker.json_logger import JsonLoggerConfig as JsonLoggerConfig
from levanter.tracker.tensorboard import TensorboardConfig as TensorboardConfig
from levanter.tracker.trackio import TrackioConfig as TrackioConfig
from levanter.tracker.wandb import WandbConfig as WandbConfig


def start_trackers(
    configs: TrackerConfig | Sequence[TrackerConfig], *, run_id: str | None, process_index: int
) -> Tracker:
    """Starts the trackers of a run: all of them on process 0, none elsewhere.

    Args:
        configs: one block or several.
        run_id: the run's id, the same on every process; a resumed run continues under it.
        process_index: the index of this process in the job.

    Raises:
        ValueError: a tracker's package is not installed, or its settings contradict the environment.
    """
    # Metrics are the same on every process; several writers would log every step several times.
    if process_index != 0:
        return NoopTracker()
    blocks = (configs,) if isinstance(configs, TrackerConfig) else tuple(configs)
    started: list[Tracker] = []
    try:
        for block in blocks:
            started.append(block.init(run_id))
    # The trackers that did start are closed, so that no run stays open at a service.
    except ValueError:
        CompositeTracker(started).finish()
        raise
    if not started:
        return NoopTracker()
    return started[0] if len(started) == 1 else CompositeTracker(started)
