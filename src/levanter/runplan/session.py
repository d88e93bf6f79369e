"""`Session`: what a process passes to a run in addition to its devices: run id, tracker, whether to print."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Recorder(Protocol):
    """Receives the metrics of a run: the part of the interface of `levanter.tracker` that runs use."""

    def log(self, metrics: Mapping[str, Any], *, step: int | None) -> None:
        """Records the metrics of a step."""
        ...

    def log_summary(self, metrics: Mapping[str, Any]) -> None:
        """Records values of the whole run."""
        ...

    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        """Records the configuration of the run."""
        ...

    def log_artifact(self, path: str, *, name: str | None = None, type: str | None = None) -> None:
        """Stores a file."""
        ...


class _Unrecorded:
    """A recorder that discards everything."""

    def log(self, metrics: Mapping[str, Any], *, step: int | None) -> None:
        # `del` marks arguments that this recorder does not use.
        del metrics, step

    def log_summary(self, metrics: Mapping[str, Any]) -> None:
        del metrics

    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        del hparams

    def log_artifact(self, path: str, *, name: str | None = None, type: str | None = None) -> None:
        del path, name, type


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a process passes to a run in addition to its devices. The default is for calls from Python.

    Attributes:
        run_id: the id of the run, the same on all processes.
        tracker: receives the metrics.
        show: whether this process prints to the terminal; only process 0 does.
        began: Unix time at which the command began; None for a call from Python, which begins with the run.
    """

    # Only for calls from Python; a command passes the id that its processes have agreed on.
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    tracker: Recorder = field(default_factory=_Unrecorded)
    show: bool = False
    began: float | None = None
