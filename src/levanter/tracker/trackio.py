"""trackio, the Hugging Face tracker (optional: `pip install trackio`)."""

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from levanter.base.bounded_json import Json
from levanter.config.validators import NonNegativeFloat, PositiveInt
from levanter.io.names import name_problem
from levanter.tracker.background import BackgroundTracker
from levanter.tracker.base import Metrics, NoopTracker, Tracker, TrackerConfig, as_plain

logger = logging.getLogger(__name__)


class TrackioRun(Protocol):
    """The part of `trackio.init`'s result that the tracker uses."""

    config: dict[str, Any]

    def log(self, metrics: dict[str, Json], step: int | None = None) -> None:
        """Records metrics of a step."""
        ...

    def finish(self) -> None:
        """Ends the run."""
        ...


class TrackioTracker(Tracker):
    """Tracks into one trackio run."""

    name = "trackio"

    def __init__(self, run: TrackioRun):
        self.run = run
        self._finished = False
        self._warned = False

    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        self.run.config.update(as_plain(hparams))

    def log(self, metrics: Metrics, *, step: int | None, commit: bool | None = None) -> None:
        del commit
        self.run.log(as_plain(metrics), step=step)

    def log_summary(self, metrics: Metrics) -> None:
        # trackio has no summary: the values appear as those of the last step, under a prefix.
        self.run.log({f"summary/{name}": value for name, value in as_plain(metrics).items()})

    def log_artifact(self, path: str, *, name: str | None = None, type: str | None = None) -> None:
        del name, type
        if not self._warned:
            logger.warning("trackio: files are not uploaded (%s)", path)
            self._warned = True

    def finish(self) -> None:
        if not self._finished:
            self._finished = True
            self.run.finish()


@TrackerConfig.register_subclass("trackio")
@dataclass(frozen=True, kw_only=True)
class TrackioConfig(TrackerConfig):
    """Where and how to track with trackio; keys as upstream.

    Attributes:
        project: the project of the run.
        name: the run's name; default its id.
        space_id: a space of the Hub that shows the run.
        dataset_id: a data set of the Hub that stores it.
        config: further values to record with the run.
        mode: `online`, `offline` (a local database only) or `disabled`.
        resume: how an existing run is resumed: `allow`, `must` or `never`; `auto` is `allow` for a run with a name or
            an id, else `never`.
        background: whether a background thread sends the metrics.
        background_max_queue_size: the largest number of calls queued for that thread.
        background_finish_timeout: how many seconds the run waits for that thread when it ends.
    """

    project: str = "levanter"
    name: str | None = None
    space_id: str | None = None
    dataset_id: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    mode: Literal["online", "offline", "disabled"] | None = None
    resume: Literal["auto", "allow", "must", "never"] = "allow"
    background: bool = True
    background_max_queue_size: PositiveInt = 10_000
    background_finish_timeout: NonNegativeFloat = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # trackio uses it as a file name.
        if (problem := name_problem(self.project)) is not None:
            raise ValueError(f"project: {problem}")

    def init(self, run_id: str | None) -> Tracker:
        if self.mode == "disabled":
            return NoopTracker()
        try:
            trackio = importlib.import_module("trackio")
        except ModuleNotFoundError as error:
            raise ValueError("tracker `trackio` needs the package trackio: pip install trackio") from error
        offline = self.mode == "offline"
        name = self.name or run_id
        # A run that is started again has the id of its first attempt; without one there is nothing to resume.
        automatic = "never" if name is None else "allow"
        run = trackio.init(
            project=self.project,
            name=name,
            # Without a space trackio writes to a local database only, which is what offline means here.
            space_id=None if offline else self.space_id,
            dataset_id=None if offline else self.dataset_id,
            config=dict(self.config),
            resume=automatic if self.resume == "auto" else self.resume,
        )
        tracker = TrackioTracker(run)
        if not self.background:
            return tracker
        return BackgroundTracker(
            tracker, max_queue_size=self.background_max_queue_size, finish_timeout=self.background_finish_timeout
        )
