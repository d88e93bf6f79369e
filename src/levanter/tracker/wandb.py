"""Weights & Biases, without prompts.

`wandb` prompts for a login on a terminal and fails without one. Here a run without an API key is recorded offline, and
one line says where it is and how to upload it. A run keeps its id when it is resumed, so its curves continue.
"""

import hashlib
import json
import logging
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from levanter.config.validators import NonNegativeFloat, PositiveInt
from levanter.io import Output
from levanter.io.atomic import atomic_write
from levanter.io.names import name_problem
from levanter.io.paths import join
from levanter.tracker.background import BackgroundTracker
from levanter.tracker.base import Metrics, MetricsTable, NoopTracker, Tracker, TrackerConfig, as_json, as_plain

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)

_FORK = re.compile(r"([^?]+)\?_step=\d+", re.ASCII)
ARTIFACT_NAME_LIMIT = 128
"""The service's limit on the length of an artifact's name."""


class WandbTracker(Tracker):
    """Tracks into one wandb run.

    Args:
        run: the run that `wandb.init` returned.
        replicate_path: a folder, local or remote, that gets configuration and summary when the run ends.
        xla_dump_folder: a folder of compiled programs to save with the run when it ends.
    """

    name = "wandb"

    def __init__(self, run: "wandb.Run", *, replicate_path: str | None = None, xla_dump_folder: str | None = None):
        self.run = run
        self._replicate_path = replicate_path
        self._xla_dump_folder = xla_dump_folder
        self._warned_about_steps = False
        self._finished = False
        # Logged values, kept here because the run's own summary lags behind until it has ended.
        self._config: dict[str, Any] = {}
        # A resumed run begins with the summary of its earlier part.
        self._summary: dict[str, Any] = as_plain(dict(run.summary))

    def log_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        plain = as_plain(hparams)
        self._config.update(plain)
        # A resumed run may change its configuration, which the service refuses by default.
        self.run.config.update(plain, allow_val_change=True)

    def log(self, metrics: Metrics, *, step: int | None, commit: bool | None = None) -> None:
        if step is not None and step < self.run.step:
            # The service drops them silently: steps of a run only grow. That is normal after a resume.
            if not self._warned_about_steps:
                logger.warning(
                    "wandb: step %d is before the run's step %d; such metrics are dropped", step, self.run.step
                )
                self._warned_about_steps = True
            return
        tables = {name: value for name, value in metrics.items() if isinstance(value, MetricsTable)}
        plain = as_plain({name: value for name, value in metrics.items() if name not in tables})
        self._summary.update(plain)
        # A table is an object of the service; it stays out of the summary that is replicated.
        # Made here, in the tracker's thread: the service is imported by then.
        objects = {name: _wandb_table(table) for name, table in tables.items()}
        self.run.log({**plain, **objects}, step=step, commit=commit)

    def log_summary(self, metrics: Metrics) -> None:
        plain = as_plain(metrics)
        self._summary.update(plain)
        self.run.summary.update(plain)

    def log_artifact(self, path: str, *, name: str | None = None, type: str | None = None) -> None:
        self.run.log_artifact(path, name=_artifact_name(name or os.path.basename(path)), type=type or "file")

    def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        # Before the run ends, since an ended run takes no more artifacts.
        if self._xla_dump_folder is not None and os.path.isdir(self._xla_dump_folder):
            self.log_artifact(self._xla_dump_folder, name="xla_dump", type="xla_dump")
        self.run.finish()
        if self._replicate_path is not None:
            record = {"config": as_json(self._config), "summary": as_json(self._summary)}
            with atomic_write(join(self._replicate_path, "tracker_metrics.jsonl")) as file:
                file.write((json.dumps(record, sort_keys=True) + "\n").encode())


def _wandb_table(table: MetricsTable) -> "wandb.Table":
    import wandb

    return wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])


@TrackerConfig.register_subclass("wandb")
@dataclass(frozen=True, kw_only=True)
class WandbConfig(TrackerConfig):
    """Where and how to track with wandb; keys as upstream.

    Attributes:
        entity: a user or team.
        project: the project of the run.
        name: the run's display name.
        tags: the run's tags.
        id: the run's id; default the trainer's run id.
        group: the experiment that the run belongs to.
        mode: `online`, `offline` or `disabled`; default $WANDB_MODE, else `online` if an API key is set.
        resume: how an existing run is resumed: `allow`, `must`, `never`, `auto`.
        fork_from: `RUN?_step=N`: a new run that continues the curves of another one from that step; then `resume` is
            not used, and a run that is started again leaves this key out.
        save_code: the folder whose code and git commit are saved, or whether to save the working directory's.
        save_xla_dumps: whether to save the folder that $XLA_FLAGS names in `--xla_dump_to`.
        replicate_path: a folder that gets `tracker_metrics.jsonl` (configuration and summary) at the end.
        background: whether a background thread sends the metrics.
        background_max_queue_size: the largest number of calls queued for that thread.
        background_finish_timeout: how many seconds the run waits for that thread when it ends.
    """

    entity: str | None = None
    project: str | None = "levanter"
    name: str | None = None
    tags: list[str] = field(default_factory=list)
    id: str | None = None
    group: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None
    resume: bool | Literal["allow", "must", "never", "auto"] | None = "allow"
    fork_from: str | None = None
    save_code: bool | str = True
    save_xla_dumps: bool = False
    replicate_path: str | None = None
    background: bool = True
    background_max_queue_size: PositiveInt = 10_000
    background_finish_timeout: NonNegativeFloat = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # wandb uses it as a folder name.
        if self.id is not None and (problem := name_problem(self.id)) is not None:
            raise ValueError(f"id: {problem}")
        if self.fork_from is not None:
            match = _FORK.fullmatch(self.fork_from)
            if match is None:
                raise ValueError(f"fork_from: expected RUN?_step=N, like abc123?_step=500; got {self.fork_from!r}")
            if match[1] == self.id:
                raise ValueError(f"fork_from: {self.id} is this run's id; a fork needs an id of its own")

    def init(self, run_id: str | None) -> Tracker:
        import wandb

        mode = self._mode()
        if mode == "disabled":
            return NoopTracker()
        if self.id is not None and run_id is not None and self.id != run_id:
            logger.warning("wandb: the tracker's id %r is used instead of the run id %r", self.id, run_id)
        code_dir = self.save_code if isinstance(self.save_code, str) else os.getcwd() if self.save_code else None
        settings: dict[str, Any] = {}
        if code_dir is not None:
            settings["code_dir"] = code_dir
            commit = git_commit(code_dir)
            if commit is not None:
                # Set explicitly: the service would look for the repository in the working directory.
                settings["git_root"] = code_dir
                settings["git_commit"] = commit
        # The service refuses a call with both.
        how: dict[str, Any] = {"resume": self.resume} if self.fork_from is None else {"fork_from": self.fork_from}
        run = wandb.init(
            entity=self.entity,
            project=self.project,
            name=self.name,
            tags=list(self.tags),
            id=self.id or run_id,
            group=self.group,
            mode=mode,
            **how,
            save_code=self.save_code is not False,
            settings=wandb.Settings(**settings),
        )
        if mode == "offline":
            folder = Path(run.dir).parent
            logger.info("wandb: recording offline in %s; `wandb sync %s` uploads it", folder, folder)
        tracker = WandbTracker(
            run, replicate_path=self.replicate_path, xla_dump_folder=_xla_dump_folder() if self.save_xla_dumps else None
        )
        if not self.background:
            return tracker
        return BackgroundTracker(
            tracker, max_queue_size=self.background_max_queue_size, finish_timeout=self.background_finish_timeout
        )

    def outputs(self, run_id: str | None) -> tuple[Output, ...]:
        del run_id
        if self.replicate_path is None:
            return ()
        return (Output(key="tracker.replicate_path", path=self.replicate_path, kind="folder"),)

    def _mode(self) -> Literal["online", "offline", "disabled"]:
        """The mode: as configured, but never online without a key, which would prompt on the terminal."""
        mode = self.mode or os.environ.get("WANDB_MODE") or None
        if mode in ("offline", "disabled"):
            return mode
        if mode not in (None, "online"):
            raise ValueError(f"$WANDB_MODE is {mode!r}; expected online, offline or disabled")
        if _has_credentials():
            return "online"
        level = logging.WARNING if mode == "online" else logging.INFO
        logger.log(level, "wandb: no API key ($WANDB_API_KEY or `wandb login`), so the run is recorded offline")
        return "offline"


def _has_credentials() -> bool:
    import wandb

    # Reads the key from the environment or from netrc; `verify=False` makes no request.
    return wandb.login(prompt=False, verify=False)


def _xla_dump_folder() -> str:
    match = re.search(r"--xla_dump_to=(\S+)", os.environ.get("XLA_FLAGS", ""))
    if match is None:
        raise ValueError("tracker.save_xla_dumps is set, but $XLA_FLAGS has no --xla_dump_to=FOLDER")
    return match.group(1)


def git_commit(folder: str) -> str | None:
    """The commit checked out in `folder` ($GIT_COMMIT where set); None outside a repository or without git."""
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    try:
        result = subprocess.run(
            ["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _artifact_name(name: str) -> str:
    """A name the service takes: its characters only, and long names shortened with a hash to stay distinct."""
    clean = re.sub(r"[^A-Za-z0-9_.\-]", "-", name)
    if len(clean) <= ARTIFACT_NAME_LIMIT:
        return clean
    # Two long names with a common beginning stay distinct.
    suffix = hashlib.sha256(clean.encode()).hexdigest()[:8]
    return f"{clean[: ARTIFACT_NAME_LIMIT - 9]}-{suffix}"
