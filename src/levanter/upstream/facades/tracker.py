"""A global tracker for a whole script, as in earlier generations.

    levanter.initialize(config)
    levanter.tracker.log({"loss": 2.0}, step=1)

Here a tracker is an argument; these functions keep a global one for scripts that do not pass it around. Until one is
set, metrics are dropped.
"""

import atexit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, cast

from levanter.config import plain
from levanter.tracker import NoopTracker, Tracker


class _Global:
    tracker: Tracker = NoopTracker()


def set_global_tracker(tracker: Tracker) -> None:
    """Sets the script's tracker; it is finished at exit, if the script does not do so."""
    _Global.tracker = tracker
    # Unfinished runs would stay open on the tracker's server.
    atexit.register(tracker.finish)


@contextmanager
def current_tracker(tracker: Tracker | None = None) -> Iterator[Tracker]:
    """The script's tracker; with an argument, that tracker becomes the script's until the block ends."""
    before = _Global.tracker
    if tracker is not None:
        _Global.tracker = tracker
    try:
        yield _Global.tracker
    finally:
        _Global.tracker = before


def log(metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None) -> None:
    """Records metrics of a step."""
    _Global.tracker.log(metrics, step=step, commit=commit)


def log_summary(metrics: Mapping[str, Any]) -> None:
    """Records single values of the whole run."""
    _Global.tracker.log_summary(metrics)


def log_hyperparameters(hparams: object) -> None:
    """Records a configuration: a mapping or a dataclass."""
    _Global.tracker.log_hyperparameters(plain(hparams) if is_dataclass(hparams) else cast("Mapping[str, Any]", hparams))


def get_tracker(name: str) -> Tracker:
    """The script's tracker with a name, such as `wandb`.

    Raises:
        KeyError: there is no tracker with that name.
    """
    # A composite tracker holds several in `trackers`.
    for one in (_Global.tracker, *getattr(_Global.tracker, "trackers", ())):
        if one.name == name:
            return one
    raise KeyError(f"the script has no tracker named {name!r}")
