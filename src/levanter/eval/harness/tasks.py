"""lm_eval's tasks by name, loaded with their documents.

Folders that a run names are searched first; lm_eval's own index of 14,000 names, which takes seconds to read, is opened
only for names that are in none of them.
"""

import importlib
import logging
import os
import random
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from levanter.config.errors import did_you_mean
from levanter.eval.harness.config import HarnessConfig, HarnessTaskConfig
from levanter.eval.harness.encoding import HarnessError

INSTALL = "pip install 'levanter-fork[harness]'"
FEWSHOT_SEED = 1234
"""lm_eval's seed for the choice of few-shot examples."""
RANDOM_SEED = 0
"""lm_eval's seed of Python's `random`."""

logger = logging.getLogger(__name__)


class UnavailableTaskError(HarnessError):
    """A task's documents, or lm_eval itself, are not available on this machine."""


class LmTask(Protocol):
    """The part of lm_eval's task interface that is used here."""

    @property
    def eval_docs(self) -> Collection[object]:
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
        """Sets a key of the task."""
        ...

    def set_fewshot_seed(self, seed: int) -> None:
        """Seeds the choice of few-shot examples."""
        ...

    def doc_to_choice(self, doc: object) -> Sequence[object]:
        """The choices of a document."""
        ...

    def process_results(self, doc: object, results: Sequence[object]) -> Mapping[str, object]:
        """The metrics of the answers to a document, by name."""
        ...

    def build_all_requests(self, **options: object) -> None:
        """Builds the requests."""
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
        tasks: name → lm_eval's task.
        groups: name → lm_eval's group.
        group_map: group → names of its members.
        stops: task name → stop strings in addition to the task's.
    """

    tasks: Mapping[str, LmTask]
    groups: Mapping[str, Any]
    group_map: Mapping[str, list[str]]
    stops: Mapping[str, tuple[str, ...]]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of requests: `loglikelihood`, `loglikelihood_rolling`, `generate_until`."""
        # lm_eval makes a request of log-probability for each choice.
        kinds = {str(task.get_config("output_type")) for task in self.tasks.values()}
        return frozenset("loglikelihood" if kind == "multiple_choice" else kind for kind in kinds)

    def documents(self, limit: int | None) -> dict[str, int]:
        """Task → number of documents that are evaluated."""
        counts = {name: len(task.eval_docs) for name, task in self.tasks.items()}
        return {name: count if limit is None else min(count, limit) for name, count in counts.items()}

    def as_lm_eval(self) -> dict[str, Any]:
        """The argument of `lm_eval.evaluator.evaluate`."""
        return {"tasks": dict(self.tasks), "groups": dict(self.groups), "group_map": dict(self.group_map)}


def load_tasks(config: HarnessConfig, include_path: Sequence[str] = ()) -> LoadedTasks:
    """Loads tasks.

    Args:
        config: the tasks.
        include_path: folders with tasks in addition to lm_eval's.

    Raises:
        UnavailableTaskError: lm_eval is not installed, or documents are not available.
        HarnessError: a task is unknown (with the nearest names), runs code without permission, or is listed twice.
    """
    manager = _Manager(include_path)
    unknown = [
        f"eval_harness.task_spec: {spec.task}: no task, group or tag of this name{manager.nearest(spec.task)}"
        for spec in config.tasks
        if not spec.is_whole and not manager.has(spec.task)
    ]
    if unknown:
        # lm_eval skips files that it cannot read, and one of them may be the task that is missing.
        raise HarnessError("\n".join((*unknown, *manager.unreadable())))
    # Names are the keys of the results, so they must be unique over all entries.
    tasks: dict[str, LmTask] = {}
    groups: dict[str, Any] = {}
    group_map: dict[str, list[str]] = {}
    stops: dict[str, tuple[str, ...]] = {}
    for spec in config.tasks:
        loaded = manager.load(spec)
        if spec.num_fewshot is not None and manager.is_group(spec.task):
            _set_fewshot(spec.num_fewshot, loaded["tasks"])
        task_by_name = _apply_alias(spec, loaded["tasks"])
        if duplicates := sorted(tasks.keys() & task_by_name.keys()):
            raise HarnessError(
                f"eval_harness.task_spec: {', '.join(duplicates)}: listed twice\n  → task_alias: a name for each"
            )
        for name, task in task_by_name.items():
            _check_metrics(name, task)
        tasks |= task_by_name
        groups |= loaded.get("groups") or {}
        group_map |= loaded.get("group_map") or {}
        stops |= dict.fromkeys(task_by_name, tuple(spec.additional_stop_strings or ()))
    # Refused here, when the run is planned; lm_eval refuses it only when it evaluates.
    unsafe = [name for name, task in tasks.items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe and not config.confirm_run_unsafe_code:
        raise HarnessError(
            f"eval_harness.task_spec: {', '.join(unsafe)}: runs code that a model wrote\n"
            "  → eval_harness.confirm_run_unsafe_code: true, on a machine where that is safe"
        )
    for task in tasks.values():
        # As lm_eval's `simple_evaluate` does, which this package does not call.
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        # lm_eval chooses few-shot examples by a generator of each task.
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return LoadedTasks(tasks=tasks, groups=groups, group_map=group_map, stops=stops)


def task_error_message(error: BaseException) -> str | None:
    """The message for an error that a task raised; None for errors of this package or of what it called."""
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame.filename.replace("\\", "/") for frame in frames[1:]]
    # The first frame is the caller. An error of a task comes from lm_eval, `datasets`, or the task's own file; an error
    # of its template from the sandbox.
    ours = any("/levanter/" in file or "/haliax_ext/" in file for file in files)
    of_task = isinstance(error, _TaskExit) or _is_template_error(error)
    if isinstance(error, HarnessError) or (ours and not of_task):
        return None
    # The task's line: not the function that replaces `os._exit`, the sandbox, or code without a file.
    outside = [n for n, file in enumerate(files, 1) if file[0] != "<" and "/levanter/" not in file]
    last = frames[outside[-1] if outside else -1]
    # `datasets` wraps the real reason, such as a network error, in an error of its own.
    causes = [error, *([error.__cause__] if error.__cause__ is not None else [])]
    description = "; ".join(_describe(cause) for cause in causes)
    what = "a task's code ends the process" if isinstance(error, SystemExit) else "a task failed"
    return f"{what}: {description} ({last.filename}, line {last.lineno})\n  → remove the task, or correct it"


def _describe(error: BaseException) -> str:
    kind = "" if isinstance(error, _TaskExit) else f"{type(error).__name__}: "
    return (kind + " ".join(str(error).split())[:300]).rstrip(": ")


def _is_template_error(error: BaseException) -> bool:
    # Without lm_eval there are no templates of tasks.
    if "lm_eval.utils" not in sys.modules:
        return False
    return isinstance(error, importlib.import_module("levanter.eval.harness.task_templates").TEMPLATE_ERRORS)


class _TaskExit(SystemExit):
    """A task's code called `os._exit` or `sys.exit`; the message is the call."""


TASK_FAILURES = (Exception, SystemExit)
"""What a task's code raises; a task that calls `sys.exit` must not end the run as if it were done."""


@contextmanager
def task_code() -> Iterator[None]:
    """Runs code of lm_eval and of tasks: silently, templates in the sandbox, and without ways to end the process."""
    with silence_lm_eval(), ExitStack() as stack:
        if "lm_eval.utils" in sys.modules:
            templates = importlib.import_module("levanter.eval.harness.task_templates")
            stack.enter_context(templates.sandboxed_templates())
        end, end_process, process = sys.exit, os._exit, os.getpid()

        def refuse(status: int) -> NoReturn:
            # Processes that `datasets` starts end in this way.
            if os.getpid() != process:
                end_process(status)
            raise _TaskExit(f"os._exit({status})")

        def refuse_exit(status: str | int | None = None) -> NoReturn:
            if os.getpid() != process:
                end(status)
            raise _TaskExit(f"sys.exit({'' if status is None else repr(status)})")

        # It would end the run at once, with the exit code of one that is done.
        stack.callback(setattr, os, "_exit", end_process)
        os._exit = refuse
        # wandb replaces `sys.exit` too; the last line of the traceback would be its.
        stack.callback(setattr, sys, "exit", end)
        sys.exit = refuse_exit
        yield


def seed_everything() -> None:
    """Seeds Python's and NumPy's generators as lm_eval does, so that equal runs build equal requests."""
    random.seed(RANDOM_SEED)
    np.random.seed(FEWSHOT_SEED)


@contextmanager
def silence_lm_eval() -> Iterator[None]:
    """Suppresses progress bars and log messages of lm_eval and datasets; the run shows its own progress."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with ExitStack() as stack:
        # Only if it is imported already: looking it up must not import lm_eval.
        task = sys.modules.get("lm_eval.api.task")
        if task is not None:
            # This progress bar of lm_eval has no setting, so the function is replaced while the block runs.
            stack.callback(setattr, task, "tqdm", task.tqdm)
            task.tqdm = _no_progress  # pyright: ignore[reportAttributeAccessIssue]
        bars = sys.modules.get("datasets")
        if bars is not None and bars.utils.is_progress_bar_enabled():
            bars.disable_progress_bars()
            stack.callback(bars.enable_progress_bars)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _no_progress(values: Iterable[object], **_: object) -> Iterable[object]:
    """Replaces tqdm: the values, without a progress bar."""
    return values


class _Manager:
    """lm_eval's task managers: one for the run's folders, and one for lm_eval's own tasks, created on first use."""

    def __init__(self, include_path: Sequence[str]):
        missing = [path for path in include_path if not Path(path).is_dir()]
        if missing:
            raise HarnessError("\n".join(f"include_path: {path}: no such folder" for path in missing))
        self._folders = [str(Path(path).absolute()) for path in include_path]
        self._run_manager = self._create_manager(defaults=False) if include_path else None
        self._all: _LmManager | None = None

    def _create_manager(self, *, defaults: bool) -> "_LmManager":
        try:
            with silence_lm_eval():
                module = importlib.import_module("lm_eval.tasks")
                return module.TaskManager(include_path=self._folders or None, include_defaults=defaults)
        except ModuleNotFoundError as error:
            # A package that lm_eval needs is missing: that is another error, with its own name.
            if (error.name or "").split(".")[0] != "lm_eval":
                raise
            raise UnavailableTaskError(
                f"eval_harness: the tasks need lm_eval, which is not installed here\n  → {INSTALL}"
            ) from None

    def _manager_with(self, name: str) -> "_LmManager":
        if self._run_manager is not None and name in self._run_manager.task_index:
            return self._run_manager
        self._all = self._all or self._create_manager(defaults=True)
        return self._all

    def has(self, name: str) -> bool:
        """Whether there is a task, group, tag or file of this name."""
        return name in self._manager_with(name).task_index or (Path(name).suffix == ".yaml" and Path(name).is_file())

    def is_group(self, name: str) -> bool:
        """Whether a name is that of a group."""
        entry = self._manager_with(name).task_index.get(name)
        return entry is not None and entry.kind.name == "GROUP"

    def nearest(self, name: str) -> str:
        """A suggestion for an unknown name, for an error."""
        names = [] if self._run_manager is None else self._run_manager.all_tasks
        # A name may be another value of YAML, such as a number.
        return did_you_mean(name, list(map(str, names))) or did_you_mean(
            name, list(map(str, self._manager_with(name).all_tasks))
        )

    def load(self, spec: HarnessTaskConfig) -> Mapping[str, Any]:
        """A task, or the tasks of a group, with their documents."""
        manager = self._manager_with(spec.task)
        entry = manager.task_index.get(spec.task)
        if entry is not None and entry.kind.name == "GROUP":
            # lm_eval, too, takes a number of examples for all tasks of a group, and no other key.
            others = [key for key in spec.changes if key != "num_fewshot"]
            if others:
                raise HarnessError(
                    f"eval_harness.task_spec: {spec.task}: a group; changes ({', '.join(others)}) are a task's\n"
                    f"  → one entry for each of its tasks"
                )
            spec = replace(spec, num_fewshot=None)
        if spec.changes and entry is None and Path(spec.task).suffix == ".yaml":
            raise HarnessError(
                f"eval_harness.task_spec: {spec.task}: a file; changes ({', '.join(spec.changes)}) are a task's\n"
                "  → its folder as include_path, and the name that the file gives it"
            )
        # lm_eval reads a mapping as a new task; inside a group, as changes to the task that it names.
        mapping = {"task": spec.task, **spec.changes}
        spec_dict = {"group": "changed", "task": [mapping]} if entry is not None else mapping
        try:
            with task_code(), _working_directory(entry, manager, spec.task):
                return {"tasks": manager.load([spec_dict])["tasks"]} if spec.changes else manager.load([spec.task])
        except ImportError as error:
            detail = " ".join(map(str, error.args)).strip()[:300]
            raise HarnessError(
                f"eval_harness.task_spec: {spec.task}: it needs a package that is not installed here ({detail})\n"
                "  → install it, or remove the task"
            ) from error
        except OSError as error:
            detail = " ".join(str(error).split())[:300]
            raise UnavailableTaskError(
                f"eval_harness.task_spec: {spec.task}: its documents are not available here ({detail})\n"
                "  → download them on a machine with network access (datasets caches them), or use a task with local "
                "files"
            ) from error
        except TASK_FAILURES as error:
            if (message := task_error_message(error)) is None:
                raise
            # lm_eval itself fails on the missing aggregation of a metric that it does not know.
            keys = {**(getattr(entry, "cfg", None) or {}), **spec.changes}
            message = "\n".join((*_unknown_metrics(keys.get("metric_list")), message))
            raise HarnessError(f"eval_harness.task_spec: {spec.task}: {message}") from error

    def unreadable(self) -> Iterator[str]:
        """Why files of the run's folders are not in the index, a line for each."""
        loader, index = (importlib.import_module(f"lm_eval.tasks.{name}") for name in ("_yaml_loader", "_index"))
        for folder in self._folders:
            for path in sorted(Path(folder).glob("**/*.yaml")):
                try:
                    keys = loader.load_yaml(path, resolve_func=False)
                    name = keys.get("task", keys.get("group"))
                    # A file that others include has neither key, or a `task` that is no name.
                    if name is not None and not isinstance(name, str):
                        yield f"  {path}: task: {type(name).__name__}, expected a name (text)"
                    elif name is not None:
                        index.TaskIndex.process_cfg(keys, path, {})
                # A file may hold anything; whatever is wrong with it is the answer.
                except Exception as error:  # noqa: BLE001
                    yield f"  {path}: not a task's file ({' '.join(str(error).split())[:300]})"


def _unknown_metrics(metrics: object) -> Iterator[str]:
    """The names in a task's `metric_list` that lm_eval does not know."""
    registry = importlib.import_module("lm_eval.api.registry").metric_registry
    for entry in metrics if isinstance(metrics, list) else ():
        name = entry.get("metric") if isinstance(entry, dict) else None
        if isinstance(name, str) and name not in registry and not entry.get("hf_evaluate"):
            yield f"metric_list: {name}: no metric of this name{did_you_mean(name, sorted(registry))}"


def _check_metrics(name: str, task: LmTask) -> None:
    """Refuses a metric of which lm_eval would report no number.

    Raises:
        HarnessError: there is no such metric or aggregation, or it is not one of this kind of task.
    """
    functions: Mapping[str, object] = getattr(task, "_metric_fn_list", {})
    aggregations: Mapping[str, object] = getattr(task, "_aggregation_list", {})
    # A task's own function gives the numbers of its metrics, whatever their names are.
    if callable(task.get_config("process_results")):
        functions = {}
    registry = importlib.import_module("lm_eval.api.registry")
    problems = [
        f"metric_list: {metric}: no metric of this name{did_you_mean(str(metric), sorted(registry.metric_registry))}"
        for metric, function in functions.items()
        if function is None
    ]
    problems += [
        f"metric_list: {metric}: no such aggregation; known are {', '.join(sorted(registry.aggregation_registry))}"
        for metric, function in aggregations.items()
        if function is None
    ]
    if not problems and functions:
        known = _reported_metrics(task, mutual="acc_mutual_info" in functions)
        kind = task.get_config("output_type")
        problems = [
            f"metric_list: {metric}: a task of output_type {kind} has no such number"
            for metric in functions
            if known is not None and metric not in known and metric != "bypass"
        ]
    if problems:
        raise HarnessError("\n".join(f"eval_harness.task_spec: {name}: {problem}" for problem in problems))


def _reported_metrics(task: LmTask, *, mutual: bool) -> set[str] | None:
    """The metrics that a task computes of the answer to its first document; None where that is not known.

    Args:
        task: lm_eval's task.
        mutual: whether choices are scored without their questions, too.
    """
    kind = task.get_config("output_type")
    try:
        with task_code():
            doc = next(iter(task.eval_docs))
            # Log-probability, and whether the text is the most likely one.
            answers: dict[object, list[object]] = {"loglikelihood": [(-1.0, True)], "loglikelihood_rolling": [-1.0]}
            if kind == "multiple_choice":
                scores: list[object] = [(-1.0 - n, False) for n in range(len(task.doc_to_choice(doc)))]
                answers[kind] = scores * 2 if mutual else scores
            # Metrics of generated text are functions of any name.
            return set(task.process_results(doc, answers[kind])) if kind in answers else None
    except TASK_FAILURES:
        # Whatever is wrong with the document is reported where its requests are built.
        return None


@contextmanager
def _working_directory(entry: "_Entry | None", manager: "_LmManager", name: str) -> Iterator[None]:
    """Changes to the folder of the task's file, so that relative paths of its data files are resolved there."""
    folder = _task_folder(entry, manager, name)
    before = os.getcwd()
    if folder is not None:
        # lm_eval and `datasets` resolve `data_files` against the working directory of the process.
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _task_folder(entry: "_Entry | None", manager: "_LmManager", name: str) -> Path | None:
    """The folder of a task's file, if the run named it."""
    if entry is None:
        return Path(name).absolute().parent
    path = None if entry.yaml_path is None else Path(entry.yaml_path).absolute()
    run_folders = [Path(folder) for folder in (manager.include_path or [])]
    return path.parent if path is not None and any(folder in path.parents for folder in run_folders) else None


def _set_fewshot(count: int, tasks: Mapping[str, LmTask]) -> None:
    """Sets the number of solved examples of all tasks of a group, as lm_eval does."""
    for name, task in tasks.items():
        # A task whose file says 0 cannot take any: it has no split for them, or its prompt has no place.
        if task.get_config("num_fewshot") == 0:
            logger.warning("%s: its file sets num_fewshot to 0, which is kept, as by lm_eval", name)
        else:
            task.set_config(key="num_fewshot", value=count)


def _apply_alias(spec: HarnessTaskConfig, tasks: Mapping[str, LmTask]) -> dict[str, LmTask]:
    """The tasks by their names in the results."""
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
