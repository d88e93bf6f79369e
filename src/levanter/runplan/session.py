"""`Session`: what a process gives to a run besides its devices: a name, a tracker, a voice."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Recorder(Protocol):
    """Where a run's numbers go: what `levanter.tracker` offers, as far as a run uses it."""

    def log(self, metrics: Mapping[str, Any], *, step: int | None) -> None:
        """Records numbers of a step."""
        ...

    def log_summary(self, metrics: Mapping[str, Any]) -> None:
        """Records single values of the whole run."""
        ...

    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        """Records what the run was made of."""
        ...

    def log_artifact(self, path: str, *, name: str | None = None, type: str | None = None) -> None:
        """Keeps a file."""
        ...


class _Unrecorded:
    """A recorder that keeps nothing."""

    def log(self, metrics: Mapping[str, Any], *, step: int | None) -> None:
        del metrics, step

    def log_summary(self, metrics: Mapping[str, Any]) -> None:
        del metrics

    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        del hparams

    def log_artifact(self, path: str, *, name: str | None = None, type: str | None = None) -> None:
        del path, name, type


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a process brings to a run beside its devices; one by itself for calls from Python.

    Attributes:
        run_id: the run's name, the same on all processes.
        tracker: where its numbers go.
        show: whether this process talks to the user: process 0 does.
    """

    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    tracker: Recorder = field(default_factory=_Unrecorded)
    show: bool = False
