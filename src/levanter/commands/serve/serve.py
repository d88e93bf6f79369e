"""Serves a model over HTTP with OpenAI's API.

    python -m levanter.main.plan serve --config_path config/serve/llama3.1_70b_int8.yaml --target v5e-8
    python -m levanter.main.serve --hf_checkpoint HuggingFaceTB/SmolLM2-135M-Instruct --trainer.mp f32

The model, its cache and its Programs are those of `generate`; a server adds an address, a key and a queue. The server
loads the model and compiles all Programs before it opens the port; afterwards nothing compiles.
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
from levanter.serving.api_key import ApiKeyError, read_key, shown_source

if TYPE_CHECKING:
    from levanter.serving.app import Application
    from levanter.serving.service import Service


EVENT = "/jax/core/compile/backend_compile_duration"
"""The event that JAX reports for each compilation, and for each program read from the compilation cache."""


class _Count:
    """Counts compilations of this process."""

    def __init__(self) -> None:
        self.value = 0

    def __call__(self, event: str, duration_secs: float, **more: str | int) -> None:
        """Receives an event of JAX."""
        del duration_secs, more
        self.value += event == EVENT


_LISTENERS: list[_Count] = []


def count_compiles() -> Callable[[], int]:
    """Counts the compilations of this process from now on.

    Returns:
        A function that gives the number so far.
    """
    if not _LISTENERS:
        # JAX cannot remove a listener: one is registered for the process.
        _LISTENERS.append(_Count())
        jax.monitoring.register_event_duration_secs_listener(_LISTENERS[0])
    count = _LISTENERS[0]
    before = count.value
    return lambda: count.value - before


NAME = "serve"
TURN = 5e-5
"""Python's switch interval of a server, in seconds."""

NEW_OBJECTS = 10_000
"""Threshold of Python's garbage collector, in objects that were allocated and not freed. All threads wait for a
collection; with Python's default of 700 there was one in every tenth step."""


class NotInstalledError(ValueError):
    """The packages that speak HTTP are not installed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ServeWork(GenerateWork):
    """The inputs of `execute` in addition to the Programs.

    Attributes:
        server: the config as the user wrote it.
        chat_max_tokens: default `max_tokens` of a chat completion; None for the rest of the context.
    """

    server: ServeConfig
    chat_max_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class ServedRun:
    """The result of a run.

    Attributes:
        loading: the report of loading.
        address: the URL of the server; None in processes other than 0.
    """

    loading: LoadReport
    address: str | None


def describe(config: ServeConfig, target: Target, *, written: ExplicitKeys | None = None) -> RunPlan[ServeWork]:
    """Describes the server for `target`; reads metadata, no weights.

    Args:
        config: the config.
        target: the devices.
        written: the keys that the user set; None for a config from Python.

    Raises:
        ValueError: the model is broken or unknown, the mesh cannot be resolved, or the rows do not divide over it.
    """
    written = ExplicitKeys.in_python(config) if written is None else written
    planned = generation.describe(config.generating, target, written=written)
    checks = [check for check in planned.checks if check.name not in ("input_path", "output_path")]
    limits = f"{config.max_queued_tokens:,} tokens of prompts may wait, {config.drain_seconds:g} s to end"
    address = f"{config.host}:{config.port}, {_who(config)}; {limits}"
    checks.append(Check(name="address", status="ok", message=address))
    checks += _key_checks(config)
    # The plan needs no HTTP packages; a run does.
    if not is_installed():
        error = NotInstalledError(NOT_INSTALLED)
        checks.append(Check(name=NAME, status="unchecked", message=NOT_INSTALLED, error=error))
    work = planned.work
    serve_work = ServeWork(
        config=work.config,
        pretrained=work.pretrained,
        programs=work.programs,
        serving=work.serving,
        server=config,
        # A default of the config class would cap every chat; only a written value counts.
        chat_max_tokens=config.sampling.max_tokens if "sampling.max_tokens" in written else None,
    )
    return cast("RunPlan[ServeWork]", replace(planned, entry_point=NAME, checks=tuple(checks), work=serve_work))


def _key_checks(config: ServeConfig) -> list[Check]:
    """Problems of the key; a plan does not need the key."""
    if config.api_key is None:
        return []
    try:
        read_key(config.api_key)
    except ApiKeyError as error:
        return [Check(name="api_key", status="unchecked", message=str(error), error=error)]
    return []


def _who(config: ServeConfig) -> str:
    """Which requests the server accepts."""
    if config.api_key is not None:
        return f"to requests with the key in {_key_source(config.api_key)}"
    return "to this machine" if config.is_local else "to everyone who reaches it (insecure)"


def _key_source(where: str) -> str:
    """The file or variable of a key; what may be the key itself is not shown."""
    try:
        read_key(where)
    except ApiKeyError:
        return shown_source(where)
    return where


def model_names(work: ServeWork) -> tuple[str, ...]:
    """The names of the model: the configured one, the last part of its source, and the whole source."""
    config = work.server
    configured = () if config.served_model_name is None else (config.served_model_name,)
    where = config.hf_checkpoint or config.checkpoint_path
    if where is None:
        return configured or ("model",)
    # The source may have parts separated by bars; the first one names the model.
    first = where.split(" | ")[0].strip().rstrip("/")
    short = first.rpartition("/")[2].partition("@")[0].removesuffix(".gguf")
    return tuple(dict.fromkeys((*configured, short or first, first, where)))


def execute(plan: RunPlan[ServeWork], mesh: Mesh | None, session: Session | None = None) -> ServedRun:
    """Serves until the process is asked to stop; nothing runs that is not in `plan`."""
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
    # Process 0 alone listens; the others execute its calls.
    if jax.process_index() == 0:
        # Bound before weights are read, so that a port in use is an error at once; nothing listens on it yet.
        listening = bind_socket(work.server.host, work.server.port)
    with running(work, mesh, schedule=schedule, reader=reader, show=show, following=_until_process_0_ends()) as ready:
        if ready.engine is not None:
            assert listening is not None
            # Before the port answers: the first client must not wait for a compiler.
            warm(ready, schedule)
            # Objects that exist now live as long as the server: `freeze` exempts them from later collections.
            gc.collect()
            gc.freeze()
            host, port = listening.getsockname()[:2]
            address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            answer(plan, ready, listening, address, show=show)
    return ServedRun(loading=ready.loading, address=address)


def warm(ready: LoadedEngine, schedule: Schedule) -> None:
    """Calls every Program once without sequences, so that all of them are compiled.

    Args:
        ready: the engine and the prompt scorer.
        schedule: its schedule.
    """
    assert ready.engine is not None
    rows, programs = ready.engine.device, ready.engine.device.programs
    # Page tables of empty slots point to the fill page, so that warming up touches no sequence.
    tables = np.full((schedule.rows, schedule.row_pages), schedule.fill, np.int32)
    no_requests = [None] * schedule.rows
    # No tokens and no requests: the Programs run on padding and change nothing.
    for bucket in programs.prefill:
        rows.prefill(bucket, (), tables, no_requests)
    rows.decode((), tables, no_requests)
    if ready.engine.constraints is not None:
        ready.engine.constraints.load_vocabulary()
    for tokens in programs.score:
        assert ready.score is not None
        # Scoring needs a sequence: zeros of the full length of the Program.
        ready.score((0,) * tokens, 0)


def make_service(work: ServeWork, ready: LoadedEngine) -> "Service":
    """The service of a run.

    Args:
        work: the run's inputs.
        ready: the engine and the prompt scorer.
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
    """The application of a run, with middleware, metrics and web page.

    Args:
        plan: the run's plan.
        service: the model and its engine.
    """
    from levanter.serving.app import app
    from levanter.serving.metrics import Metrics, ServerInfo
    from levanter.serving.middleware import LOCAL_NAMES, middleware_stack
    from levanter.serving.ui import PageData, page_routes

    config = plan.work.server
    facts = ServerInfo(version=version(), model=service.names[0], devices=plan.work.serving.devices)
    metrics = Metrics(facts, load=lambda: service.load, compiles=count_compiles())
    # Observers see every request, so metrics are complete from the first one on.
    service.observers.append(metrics)
    key = None if config.api_key is None else read_key(config.api_key)
    middleware = middleware_stack(
        limits=config.limits,
        key=key,
        # Without a key, a browser page of another site could reach a local server (DNS rebinding), so only local host
        # names are accepted.
        names=(*LOCAL_NAMES, config.host) if key is None and config.is_local and not config.insecure else None,
        observe=service.observe,
    )
    page_data = PageData(metrics=metrics, service=service, plan=plan.report())
    return app(service, routes=page_routes(page_data), middleware=middleware)


def answer(plan: RunPlan[ServeWork], ready: LoadedEngine, listening: socket, address: str, *, show: bool) -> None:
    """Serves at an address until the process is asked to stop."""
    from levanter.serving.server import HttpServer

    def opened() -> None:
        if show:
            print(f"ready: {address}", flush=True)

    work = plan.work
    # Everything that may raise is built before the signal handlers are replaced.
    service = make_service(work, ready)
    server = HttpServer(
        make_application(plan, service),
        service,
        drain_seconds=work.server.drain_seconds,
        limits=work.server.limits,
        opened=opened,
    )
    with (
        # Ctrl-C and SIGTERM start the server's own shutdown, which drains requests; a lost peer fails them.
        interrupts_delegated(server.stop),
        _termination(server.stop),
        peer_loss_reported(service.fail),
        short_turns(),
        rare_collections(),
    ):
        server.run(listening)


@contextmanager
def short_turns() -> Iterator[None]:
    """Shortens Python's switch interval within the block.

    After each step there is a write for each stream, at which the engine's thread may take the interpreter. With
    Python's default of 5 ms, sixteen streams got the tokens of a step of 3 ms up to 20 ms later.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Makes garbage collections rarer within the block."""
    before = gc.get_threshold()
    # Only the first generation: older ones are collected in proportion.
    gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _until_process_0_ends() -> Iterator[None]:
    """Ignores SIGTERM and Ctrl-C: a launcher signals all processes, and process 0 needs the others while it drains."""
    with interrupts_delegated(lambda: None), _termination(lambda: None):
        yield


@contextmanager
def _termination(take: Callable[[], object]) -> Iterator[None]:
    """Calls `take` on SIGTERM."""

    def handler(number: int, frame: FrameType | None) -> None:
        del number, frame
        take()

    # The previous handler is restored after the block.
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def finish(plan: RunPlan[ServeWork], done: ServedRun, session: Session) -> int:
    """Prints that the server has stopped."""
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
