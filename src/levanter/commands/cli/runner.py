"""Runs an entry point as a process: parse, describe, print, check, compare processes, track, execute, finish.

`run` starts from a command line; `run_config` starts from an existing configuration.
"""

import os
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import jax

from levanter.commands.cli.compilation_cache import keep_compiled, try_compiler_options
from levanter.commands.cli.consistency import require_same_config
from levanter.commands.cli.devices import configure_jax, local_target
from levanter.commands.cli.errors import shell
from levanter.commands.cli.lifecycle import is_idle_process
from levanter.commands.cli.outputs import try_outputs
from levanter.commands.cli.signals import raise_if_interrupted
from levanter.config import ExplicitKeys, load_written, plain
from levanter.distributed.agreement import agreed
from levanter.io import printing_may_fail, setup_logging
from levanter.io.names import name_problem
from levanter.io.stdout import printable
from levanter.mesh import DeviceSet, local_devices, mesh_report, require_accelerator
from levanter.plan.local_hbm_check import out_of_memory_error, require_hbm
from levanter.runplan import OK, EntryPoint, RunPlan, Session, Target
from levanter.tracker import start_trackers
from levanter.trainer.config import TrainerConfig

C = TypeVar("C")
W = TypeVar("W")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class RunResult(Generic[R]):
    """The outcome of a run.

    Attributes:
        result: the result of the entry point; None in a process that had nothing to do.
        exit_code: exit code of the process.
    """

    result: R | None
    exit_code: int


def run(entry: EntryPoint[C, W, R], argv: Sequence[str] | None = None) -> int:
    """Runs an entry point as a process, from the command line to the exit code.

    Args:
        entry: the entry point.
        argv: the command line without the program's name; None for this process's.
    """

    def run_command_line() -> int:
        setup_logging()
        loaded = load_written(entry.config, list(sys.argv[1:] if argv is None else argv))
        return run_config(entry, loaded.config, written=loaded.written).exit_code

    return shell(run_command_line)


def run_config(
    entry: EntryPoint[C, W, R], config: C, *, written: ExplicitKeys | None = None, began: float | None = None
) -> RunResult[R]:
    """Runs an entry point on the available devices.

    Args:
        entry: the entry point.
        config: its configuration.
        written: the keys that the user set; None for a configuration built in Python.
        began: Unix time at which the command began; None for now.

    Raises:
        RunRefused: the plan has errors; lists all of them.
    """
    trainer: TrainerConfig = config.trainer  # pyright: ignore[reportAttributeAccessIssue]
    began = time.time() if began is None else began
    if not entry.uses_devices:
        return _run_without_devices(entry, config, trainer, written)
    configure_jax(trainer)
    devices = local_devices(trainer.mesh)
    require_accelerator(wanted=trainer.require_accelerator, devices=devices)
    keep_compiled(trainer, platform=devices.platform)
    # Process 0 prints for all of them.
    show = jax.process_index() == 0
    # Agreed by all processes, since folder names contain it.
    id_ = run_id(trainer)
    plan = entry.describe(config, local_target(devices), written=written)
    raise_if_interrupted()
    if show:
        _print_plan(plan, devices)
    plan.check()
    require_hbm(plan)
    require_same_config(config)
    session = Session(run_id=id_, show=show, began=began)
    trackers = trainer.trackers if entry.tracked else ()
    try_outputs(
        [*entry.outputs(plan, session), *(output for tracker in trackers for output in tracker.outputs(id_))],
        process=jax.process_index(),
    )
    with ExitStack() as stack:
        # From here on work could be lost, so a closed terminal must not end the run.
        stack.enter_context(printing_may_fail())
        if entry.tracked:
            tracker = start_trackers(trainer.trackers, run_id=id_, process_index=jax.process_index())
            stack.callback(tracker.finish)
            tracker.log_hyperparameters({"config": plain(config), "mesh": str(plan.mesh), **entry.facts(plan)})
            session = replace(session, tracker=tracker)
        try:
            mesh = plan.mesh.build(devices.devices)
            # Seconds now instead of an error after the weights are loaded.
            try_compiler_options(trainer, plan, mesh)
            result = entry.execute(plan, mesh, session)
        except KeyboardInterrupt as stop:
            if entry.interrupted_message is None:
                raise
            raise KeyboardInterrupt(entry.interrupted_message(plan, session)) from stop
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            if (oom := out_of_memory_error(plan, error)) is None:
                raise
            raise oom from error
        code = entry.finish(plan, result, session)
    return RunResult(result=result, exit_code=code)


def _run_without_devices(
    entry: EntryPoint[C, W, R], config: C, trainer: TrainerConfig, written: ExplicitKeys | None
) -> RunResult[R]:
    """Runs an entry point that needs no device; of several processes, only process 0 does the work."""
    if is_idle_process(trainer.distributed):
        return RunResult(result=None, exit_code=OK)
    plan = entry.describe(config, Target(name="local", platform="cpu", kind="host", devices=1), written=written)
    for check in plan.checks:
        print(printable(f"{check.status:>9}  {check.name}: {check.message}"))
    plan.check()
    session = Session(show=True)
    try_outputs(entry.outputs(plan, session), process=0)
    with printing_may_fail():
        result = entry.execute(plan, None, session)
        return RunResult(result=result, exit_code=entry.finish(plan, result, session))


def _print_plan(plan: RunPlan[W], devices: DeviceSet) -> None:
    resident = plan.resident_bytes or {"parameters": plan.sharding.bytes_per_device}
    print(printable(mesh_report(plan.mesh, devices, mappings=plan.sharding.mappings, bytes_per_device=resident)))
    print(printable(plan.report()))


def run_id(trainer: TrainerConfig) -> str:
    """The run's id: the config's, `$RUN_ID`, or eight random characters, the same on all processes.

    Raises:
        ValueError: `$RUN_ID` is not a valid folder name.
    """
    if trainer.id is None and os.environ.get("RUN_ID") and (problem := name_problem(os.environ["RUN_ID"])):
        raise ValueError(f"$RUN_ID: {problem}")
    return agreed("run id", trainer.id or os.environ.get("RUN_ID") or secrets.token_hex(4))
