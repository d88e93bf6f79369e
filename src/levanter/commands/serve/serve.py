"""How many computations JAX compiles: once a server is ready there should be none.

A model over HTTP, for clients of OpenAI's interface.

    python -m levanter.main.plan serve --config_path config/serve/llama3.1_70b_int8.yaml --target v5e-8
    python -m levanter.main.serve --hf_checkpoint HuggingFaceTB/SmolLM2-135M-Instruct --trainer.mp f32

The model, its cache and its Programs are those of `generate`; a server adds an address, a key and a queue. What is
described is planned, loaded and compiled; then the port is opened, and nothing compiles any more.
"""

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from socket import socket
from types import FrameType
from typing import TYPE_CHECKING, cast

import jax
import jax.monitoring
import numpy as np
from jax.sharding import Mesh

from haliax_ext.load_progress import LoadReport
from levanter.commands.cli.lifecycle import peer_loss_reported
from levanter.commands.cli.runner import run_config
from levanter.commands.cli.signals import interrupts_delegated
from levanter.commands.generate import plan as generation
from levanter.commands.generate.engine_setup import LoadedEngine, running
from levanter.commands.generate.plan import GenerateWork
from levanter.commands.generate.prompts import prompt_reader
from levanter.commands.serve.config import ServeConfig
from levanter.config import ExplicitKeys
from levanter.inference.engine import make_schedule
from levanter.inference.scheduler import Schedule
from levanter.io import Output
from levanter.io.package_version import version
from levanter.runplan import OK, Check, EntryPoint, RunPlan, Session, Target
from levanter.serving import NOT_INSTALLED, is_installed
from levanter.serving.api_key import ApiKeyError, read_key

if TYPE_CHECKING:
    from levanter.serving.app import Application
    from levanter.serving.service import Service


EVENT = "/jax/core/compile/backend_compile_duration"
"""What JAX reports each time, whether it compiles or finds it in a folder of compiled programs."""


class _Count:
    """What was compiled since this process began to listen."""

    def __init__(self) -> None:
        self.value = 0

    def __call__(self, event: str, duration_secs: float, **more: str | int) -> None:
        """JAX has done something."""
        del duration_secs, more
        self.value += event == EVENT


_LISTENING: list[_Count] = []


def count_compiles() -> Callable[[], int]:
    """Counts what this process compiles from now on.

    Returns:
        What gives the number so far.
    """
    if not _LISTENING:
        # JAX keeps its listeners: one is enough for a process.
        _LISTENING.append(_Count())
        jax.monitoring.register_event_duration_secs_listener(_LISTENING[0])
    count = _LISTENING[0]
    before = count.value
    return lambda: count.value - before


NAME = "serve"
TURN = 5e-5
"""Seconds that a thread of a server keeps the interpreter while another one wants it."""

NEW_OBJECTS = 10_000
"""Objects that a server makes, beside those that are gone again, before it looks for garbage among them: it stands
still while it looks, and with Python's 700 it looked at every tenth step."""


class NotInstalledError(ValueError):
    """The packages that speak HTTP are not installed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ServeWork(GenerateWork):
    """What `execute` needs besides the Programs.

    Attributes:
        server: the config as the user wrote it.
        chat_max_tokens: tokens of an answer in a conversation where the request does not say; None for as many as there
            is room for.
    """

    server: ServeConfig
    chat_max_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class ServedRun:
    """How serving went.

    Attributes:
        loading: how loading went.
        address: that was listened on; None where another process did.
    """

    loading: LoadReport
    address: str | None


def describe(config: ServeConfig, target: Target, *, written: ExplicitKeys | None = None) -> RunPlan[ServeWork]:
    """Describes the server for `target`; reads metadata, no weights.

    Args:
        config: what is served.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.

    Raises:
        ValueError: the model is broken or unknown, the mesh cannot be resolved, or the rows cannot be cut over it.
    """
    written = ExplicitKeys.in_python(config) if written is None else written
    planned = generation.describe(config.generating, target, written=written)
    checks = [check for check in planned.checks if check.name not in ("input_path", "output_path")]
    limits = f"{config.max_queued_tokens:,} tokens of prompts may wait, {config.drain_seconds:g} s to end"
    address = f"{config.host}:{config.port}, {_who(config)}; {limits}"
    checks.append(Check(name="address", status="ok", message=address))
    checks += _key_checks(config)
    if not is_installed():
        error = NotInstalledError(NOT_INSTALLED)
        checks.append(Check(name=NAME, status="unchecked", message=NOT_INSTALLED, error=error))
    work = planned.work
    made = ServeWork(
        config=work.config,
        pretrained=work.pretrained,
        programs=work.programs,
        serving=work.serving,
        server=config,
        chat_max_tokens=config.sampling.max_tokens if "sampling.max_tokens" in written else None,
    )
    return cast("RunPlan[ServeWork]", replace(planned, entry_point=NAME, checks=tuple(checks), work=made))


def _key_checks(config: ServeConfig) -> list[Check]:
    """What is wrong with the key; a plan needs none."""
    if config.api_key is None:
        return []
    try:
        read_key(config.api_key)
    except ApiKeyError as error:
        return [Check(name="api_key", status="unchecked", message=str(error), error=error)]
    return []


def _who(config: ServeConfig) -> str:
    """Whom the server answers."""
    if config.api_key is not None:
        return f"to requests with the key in {config.api_key}"
    return "to this machine" if config.is_local else "to everyone who reaches it (insecure)"


def model_names(work: ServeWork) -> tuple[str, ...]:
    """What the model is called: the last part of where it comes from, and all of it."""
    config = work.server
    where = config.hf_checkpoint or config.checkpoint_path
    if where is None:
        return ("model",)
    first = where.split(" | ")[0].strip().rstrip("/")
    short = first.rpartition("/")[2].partition("@")[0].removesuffix(".gguf")
    return tuple(dict.fromkeys((short or first, first, where)))


def execute(plan: RunPlan[ServeWork], mesh: Mesh | None, session: Session | None = None) -> ServedRun:
    """Serves until it is told to end; nothing runs that is not in `plan`."""
    from levanter.serving.server import bind_socket

    assert mesh is not None, "a model runs on devices"
    work, show = plan.work, session is not None and session.show
    schedule = make_schedule(
        work.programs,
        share_prefixes=work.config.inference.share_prefixes,
        max_queued_tokens=work.server.max_queued_tokens,
    )
    reader = prompt_reader(work, schedule)
    address, listening = None, None
    if jax.process_index() == 0:
        # Nobody is answered yet, but a port that is taken is known before a weight is read.
        listening = bind_socket(work.server.host, work.server.port)
    with running(work, mesh, schedule=schedule, reader=reader, show=show, following=_until_process_0_ends()) as ready:
        if ready.engine is not None:
            assert listening is not None
            warm(ready, schedule)
            # What is there now stays: whoever looks for garbage later need not go through all that JAX has made.
            gc.collect()
            gc.freeze()
            host, port = listening.getsockname()[:2]
            address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            answer(plan, ready, listening, address, show=show)
    return ServedRun(loading=ready.loading, address=address)


def warm(ready: LoadedEngine, schedule: Schedule) -> None:
    """Calls every Program once, for nobody: all of them are compiled then.

    Args:
        ready: the engine and what scores prompts.
        schedule: of its rows.
    """
    assert ready.engine is not None
    rows, programs = ready.engine.device, ready.engine.device.programs
    tables = np.full((schedule.rows, schedule.row_pages), schedule.fill, np.int32)
    nobody = [None] * schedule.rows
    for bucket in programs.prefill:
        rows.prefill(bucket, (), tables, nobody)
    rows.decode((), tables, nobody)
    for tokens in programs.score:
        assert ready.score is not None
        ready.score((0,) * tokens, 0)


def make_service(work: ServeWork, ready: LoadedEngine) -> "Service":
    """The model and its engine, for an application.

    Args:
        work: the run's.
        ready: the engine and what scores prompts.
    """
    from levanter.serving.service import Service

    assert ready.engine is not None
    return Service(
        ready.engine,
        prompt_reader(work, ready.engine.schedule),
        names=model_names(work),
        max_queued_tokens=work.server.max_queued_tokens,
        score=ready.score,
        chat_max_tokens=work.chat_max_tokens,
    )


def make_application(plan: RunPlan[ServeWork], service: "Service") -> "Application":
    """The application, with all that stands before and beside what asks the model.

    Args:
        plan: the run's.
        service: the model and its engine.
    """
    from levanter.serving.app import app
    from levanter.serving.metrics import Metrics, ServerInfo
    from levanter.serving.middleware import LOCAL_NAMES, middleware_stack
    from levanter.serving.ui import PageData, page_routes

    config = plan.work.server
    facts = ServerInfo(version=version(), model=service.names[0], devices=plan.work.serving.devices)
    metrics = Metrics(facts, load=lambda: service.load, compiles=count_compiles())
    service.observers.append(metrics)
    key = None if config.api_key is None else read_key(config.api_key)
    entrance = middleware_stack(
        limits=config.limits,
        key=key,
        names=(*LOCAL_NAMES, config.host) if key is None and config.is_local and not config.insecure else None,
        observe=service.observe,
    )
    shown = PageData(metrics=metrics, service=service, plan=plan.report())
    return app(service, routes=page_routes(shown), middleware=entrance)


def answer(plan: RunPlan[ServeWork], ready: LoadedEngine, listening: socket, address: str, *, show: bool) -> None:
    """Answers at an address until the process is told to end."""
    from levanter.serving.server import HttpServer

    def opened() -> None:
        if show:
            print(f"ready: {address}", flush=True)

    work = plan.work
    service = make_service(work, ready)
    server = HttpServer(
        make_application(plan, service),
        service,
        drain_seconds=work.server.drain_seconds,
        limits=work.server.limits,
        opened=opened,
    )
    with (
        interrupts_delegated(server.stop),
        _termination(server.stop),
        peer_loss_reported(service.fail),
        short_turns(),
        rare_collections(),
    ):
        server.run(listening)


@contextmanager
def short_turns() -> Iterator[None]:
    """Has threads take short turns at the interpreter.

    Behind each step there is a write for each stream, which gives the interpreter to the engine. With Python's turns of
    5 ms sixteen streams heard up to 20 ms later of a step that had taken 3.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Has the interpreter look for garbage less often."""
    before = gc.get_threshold()
    gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _until_process_0_ends() -> Iterator[None]:
    """Drops SIGTERM and Ctrl-C: a launcher tells all processes to end, and process 0 still answers who is there."""
    with interrupts_delegated(lambda: None), _termination(lambda: None):
        yield


@contextmanager
def _termination(take: Callable[[], object]) -> Iterator[None]:
    """Hands SIGTERM to `take`."""

    def handler(number: int, frame: FrameType | None) -> None:
        del number, frame
        take()

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def finish(plan: RunPlan[ServeWork], done: ServedRun, session: Session) -> int:
    """Says that it has ended."""
    del plan
    if session.show and done.address is not None:
        print(f"{done.address} is closed")
    return OK


def outputs(plan: RunPlan[ServeWork], session: Session) -> tuple[Output, ...]:
    """Nothing is written."""
    del plan, session
    return ()


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=ServeConfig,
    describe=describe,
    execute=execute,
    outputs=outputs,
    finish=finish,
)


def main(config: ServeConfig, *, written: ExplicitKeys | None = None) -> int:
    """Serves on the devices of this run."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
