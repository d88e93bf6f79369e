"""`CompositeTracker`: several trackers as one (`tracker:` given as a list)."""

from collections.abc import Mapping, Sequence
from typing import Any

from levanter.tracker.base import Metrics, Tracker


class CompositeTracker(Tracker):
    """Passes every call on to each of its trackers, in order.

    An error in one does not keep a call from reaching the others; all errors are raised together afterwards.
    """

    name = "composite"

    def __init__(self, trackers: Sequence[Tracker]):
        self.trackers = tuple(trackers)

    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        self._call_all("log_hyperparameters", hparams)

    def log(self, metrics: Metrics, *, step: int | None, commit: bool | None = None) -> None:
        self._call_all("log", metrics, step=step, commit=commit)

    def log_summary(self, metrics: Metrics) -> None:
        self._call_all("log_summary", metrics)

    def log_artifact(self, path: str, *, name: str | None = None, type: str | None = None) -> None:
        self._call_all("log_artifact", path, name=name, type=type)

    def finish(self) -> None:
        self._call_all("finish")

    def _call_all(self, method: str, *args: object, **kwargs: object) -> None:
        errors: list[Exception] = []
        for tracker in self.trackers:
            try:
                getattr(tracker, method)(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 — raised below, once the others have been called
                error.add_note(f"in tracker {tracker.name}, {method}")
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ExceptionGroup(f"{len(errors)} trackers failed in {method}", errors)
