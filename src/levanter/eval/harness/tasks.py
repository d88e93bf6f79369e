"""lm_eval's tasks: found by name, loaded with their documents, ready to be asked.

Tasks of folders that a run names are looked for first; lm_eval's own index of 14,000 names, which takes seconds to
read, is opened where a name is in none of them.
"""

import importlib
import logging
import os
import random
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from levanter.config.errors import did_you_mean
from levanter.eval.harness.config import HarnessConfig, HarnessTaskConfig
from levanter.eval.harness.encoding import HarnessError

INSTALL = 'pip install "levanter[harness]"'
FEWSHOT_SEED = 1234
"""lm_eval's, of the choice of solved documents."""
RANDOM_SEED = 0
"""lm_eval's, of Python's `random`."""


class AbsentTaskError(HarnessError):
    """A task's documents, or lm_eval itself, are not available here."""


class LmTask(Protocol):
    """What is used of lm_eval's tasks."""

    @property
    def eval_docs(self) -> Sized:
        """The documents."""
        ...

    @property
    def instances(self) -> Sequence[Any]:
        """The requests, once they are built."""
        ...

    def get_config(self, key: str) -> object:
        """A key of the task."""
        ...

    def set_config(self, key: str, value: object) -> None:
        """Changes a key of the task."""
        ...

    def set_fewshot_seed(self, seed: int) -> None:
        """Seeds the choice of solved documents."""
        ...

    def build_all_requests(self, **options: object) -> None:
        """Makes the requests."""
        ...


class _Entry(Protocol):
    """A name in lm_eval's index."""

    yaml_path: Path | None
    kind: Enum


class _LmManager(Protocol):
    """lm_eval's task manager."""

    include_path: Sequence[str] | None

    @property
    def task_index(self) -> Mapping[str, _Entry]: ...

    @property
    def all_tasks(self) -> Sequence[str]: ...

    def load(self, task_list: list[object]) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedTasks:
    """Tasks with their documents.

    Attributes:
        tasks: lm_eval's tasks by name.
        groups: lm_eval's groups by name, and `group_map`, the members of each.
        stops: strings that end texts of a task besides its own, by its name.
    """

    tasks: Mapping[str, LmTask]
    groups: Mapping[str, Any]
    group_map: Mapping[str, list[str]]
    stops: Mapping[str, tuple[str, ...]]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of requests: `loglikelihood`, `loglikelihood_rolling`, `generate_until`."""
        kinds = {str(task.get_config("output_type")) for task in self.tasks.values()}
        return frozenset("loglikelihood" if kind == "multiple_choice" else kind for kind in kinds)

    def documents(self, limit: int | None) -> dict[str, int]:
        """How many documents of each task are asked."""
        counts = {name: len(task.eval_docs) for name, task in self.tasks.items()}
        return {name: count if limit is None else min(count, limit) for name, count in counts.items()}

    def as_lm_eval(self) -> dict[str, Any]:
        """What `lm_eval.evaluator.evaluate` takes."""
        return {"tasks": dict(self.tasks), "groups": dict(self.groups), "group_map": dict(self.group_map)}


def load_tasks(config: HarnessConfig, include_path: Sequence[str] = ()) -> LoadedTasks:
    """Finds and loads tasks.

    Args:
        config: which.
        include_path: folders of tasks beside lm_eval's own.

    Raises:
        AbsentTaskError: lm_eval is not installed, or documents cannot be had here.
        HarnessError: a task is not known (with the nearest names), runs code and may not, or is named twice.
    """
    manager = _Manager(include_path)
    unknown = [
        f"{spec.task}: no task, group or tag of this name{manager.nearest(spec.task)}"
        for spec in config.tasks
        if not spec.is_whole and not manager.has(spec.task)
    ]
    if unknown:
        raise HarnessError("\n".join(f"eval_harness.task_spec: {each}" for each in unknown))
    tasks: dict[str, LmTask] = {}
    groups: dict[str, Any] = {}
    group_map: dict[str, list[str]] = {}
    stops: dict[str, tuple[str, ...]] = {}
    for spec in config.tasks:
        loaded = manager.load(spec)
        found = _renamed(spec, loaded["tasks"])
        if twice := sorted(tasks.keys() & found.keys()):
            raise HarnessError(
                f"eval_harness.task_spec: {', '.join(twice)}: named twice\n  → task_alias: a name for each"
            )
        tasks |= found
        groups |= loaded.get("groups") or {}
        group_map |= loaded.get("group_map") or {}
        stops |= dict.fromkeys(found, tuple(spec.additional_stop_strings or ()))
    unsafe = [name for name, task in tasks.items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe and not config.confirm_run_unsafe_code:
        raise HarnessError(
            f"eval_harness.task_spec: {', '.join(unsafe)}: runs code that the model wrote\n"
            "  → eval_harness.confirm_run_unsafe_code: true, on a machine where that may do no harm"
        )
    for task in tasks.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return LoadedTasks(tasks=tasks, groups=groups, group_map=group_map, stops=stops)


def said_of_a_task(error: BaseException) -> str | None:
    """What is said of an error that a task raised; None for one of ours, or of what we called."""
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame.filename.replace("\\", "/") for frame in frames[1:]]
    # Behind whoever asks, a task is in lm_eval, in `datasets`, or in a file of its own.
    if isinstance(error, HarnessError) or any("/levanter/" in file or "/haliax_ext/" in file for file in files):
        return None
    last = frames[-1]
    causes = [error, *([error.__cause__] if error.__cause__ is not None else [])]
    what = "; ".join(f"{type(each).__name__}: {' '.join(str(each).split())[:300]}".rstrip(": ") for each in causes)
    return f"a task failed: {what} ({last.filename}, line {last.lineno})\n  → leave the task out, or mend it"


def seed_everything() -> None:
    """Seeds Python's and NumPy's generators as lm_eval does, so that equal runs ask the same."""
    random.seed(RANDOM_SEED)
    np.random.seed(FEWSHOT_SEED)


@contextmanager
def quiet() -> Iterator[None]:
    """lm_eval and datasets without their bars and remarks: a run says itself how far it is."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    with ExitStack() as stack:
        task = sys.modules.get("lm_eval.api.task")
        if task is not None:
            stack.callback(setattr, task, "tqdm", task.tqdm)
            task.tqdm = _unshown  # pyright: ignore[reportAttributeAccessIssue]
        bars = sys.modules.get("datasets")
        if bars is not None and bars.utils.is_progress_bar_enabled():
            bars.disable_progress_bars()
            stack.callback(bars.enable_progress_bars)
        try:
            yield
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)


def _unshown(values: Iterable[object], **_: object) -> Iterable[object]:
    """What stands for tqdm: the values, without a bar."""
    return values


class _Manager:
    """lm_eval's task managers: that of the run's folders, and that of lm_eval's own, once it is needed."""

    def __init__(self, include_path: Sequence[str]):
        missing = [path for path in include_path if not Path(path).is_dir()]
        if missing:
            raise HarnessError("\n".join(f"include_path: {path}: no such folder" for path in missing))
        self._folders = [str(Path(path).absolute()) for path in include_path]
        self._own = self._made(defaults=False) if include_path else None
        self._all: _LmManager | None = None

    def _made(self, *, defaults: bool) -> "_LmManager":
        try:
            with quiet():
                module = importlib.import_module("lm_eval.tasks")
                return module.TaskManager(include_path=self._folders or None, include_defaults=defaults)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "lm_eval":
                raise
            raise AbsentTaskError(
                f"eval_harness: the tasks are lm_eval's, which is not installed here\n  → {INSTALL}"
            ) from None

    def _of(self, name: str) -> "_LmManager":
        if self._own is not None and name in self._own.task_index:
            return self._own
        self._all = self._all or self._made(defaults=True)
        return self._all

    def has(self, name: str) -> bool:
        """Whether there is such a task, group, tag, or file."""
        return name in self._of(name).task_index or (Path(name).suffix == ".yaml" and Path(name).is_file())

    def nearest(self, name: str) -> str:
        """What is meant perhaps, for an error."""
        own = [] if self._own is None else list(self._own.all_tasks)
        return did_you_mean(name, own) or did_you_mean(name, self._of(name).all_tasks)

    def load(self, spec: HarnessTaskConfig) -> Mapping[str, Any]:
        """A task, or the tasks of a group, with their documents."""
        manager = self._of(spec.task)
        entry = manager.task_index.get(spec.task)
        if spec.changes and entry is not None and entry.kind.name == "GROUP":
            raise HarnessError(
                f"eval_harness.task_spec: {spec.task}: a group; changes ({', '.join(spec.changes)}) are a task's\n"
                f"  → one entry for each of its tasks"
            )
        if spec.changes and entry is None and Path(spec.task).suffix == ".yaml":
            raise HarnessError(
                f"eval_harness.task_spec: {spec.task}: a file; changes ({', '.join(spec.changes)}) are a task's\n"
                "  → its folder as include_path, and the name that the file gives it"
            )
        # Alone, a mapping is a task of its own; in a group it is over the task that it names.
        mapping = {"task": spec.task, **spec.changes}
        asked = {"group": "changed", "task": [mapping]} if entry is not None else mapping
        try:
            with quiet(), _beside(entry, manager, spec.task):
                return {"tasks": manager.load([asked])["tasks"]} if spec.changes else manager.load([spec.task])
        except ImportError as error:
            said = " ".join(map(str, error.args)).strip()[:300]
            raise HarnessError(
                f"eval_harness.task_spec: {spec.task}: it needs what is not installed here ({said})\n"
                "  → install it, or leave the task out"
            ) from error
        except OSError as error:
            said = " ".join(str(error).split())[:300]
            raise AbsentTaskError(
                f"eval_harness.task_spec: {spec.task}: its documents cannot be had here ({said})\n"
                "  → fetch them where there is a network (datasets keeps them), or name a task with files of its own"
            ) from error
        except Exception as error:
            if (told := said_of_a_task(error)) is None:
                raise
            raise HarnessError(f"eval_harness.task_spec: {spec.task}: {told}") from error


@contextmanager
def _beside(entry: "_Entry | None", manager: "_LmManager", name: str) -> Iterator[None]:
    """Relative data files are looked for beside the task's own file, if they are not where the process is."""
    folder = _folder(entry, manager, name)
    before = os.getcwd()
    if folder is not None:
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _folder(entry: "_Entry | None", manager: "_LmManager", name: str) -> Path | None:
    """The folder of a task's file, where the run named it."""
    if entry is None:
        return Path(name).absolute().parent
    path = None if entry.yaml_path is None else Path(entry.yaml_path).absolute()
    named = [Path(each) for each in (manager.include_path or [])]
    return path.parent if path is not None and any(each in path.parents for each in named) else None


def _renamed(spec: HarnessTaskConfig, tasks: Mapping[str, LmTask]) -> dict[str, LmTask]:
    """The tasks by the names that their results have."""
    if spec.task_alias is None:
        return dict(tasks)
    if len(tasks) > 1:
        raise HarnessError(
            f"eval_harness.task_spec: {spec.task}: {len(tasks)} tasks cannot have one name "
            f"(task_alias: {spec.task_alias})"
        )
    (task,) = tasks.values()
    task.set_config(key="task", value=spec.task_alias)
    return {spec.task_alias: task}
