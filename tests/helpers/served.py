"""A tiny model behind HTTP, on a port of this machine, in this process."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from helpers.hf_folder import tensors, write_folder
from starlette.applications import Starlette

from levanter.commands.cli.devices import set_jax_options
from levanter.commands.generate.engine_setup import LoadedEngine, running
from levanter.commands.generate.prompts import prompt_reader
from levanter.commands.serve import serve
from levanter.commands.serve.config import ServeConfig
from levanter.config import load_written
from levanter.inference.engine import DeviceRunner, Engine, make_schedule
from levanter.runplan import RunPlan, Target
from levanter.serving.server import HttpServer, bind_socket
from levanter.serving.service import Service

TRAINER = {"mp": "f32", "tracker": {"type": "noop"}, "mesh": {"axes": {"data": -1}}}


TEMPLATE = """{%- for message in messages %}
{%- if message.role == "robot" %}
{{ raise_exception("no robots") }}
{%- endif %}
{{- bos_token + message.role + ":" + message.content }}
{%- for call in message.tool_calls or [] %} calls {{ call.function.name }}({{ call.function.arguments.x }}){% endfor %}
{{- eos_token }}
{%- endfor %}
{%- for tool in tools or [] %} may call {{ tool.function.name }}{% endfor %}
{%- if add_generation_prompt %}
assistant:{% endif %}"""
"""Of conversations; it shows tools and calls."""


def model_folder(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """A tiny model whose texts are not all the same."""
    weights = {
        name: each if "norm" in name else (0.3 * each.astype(np.float32)).astype(each.dtype)
        for name, each in tensors().items()
    }
    write_folder(folder, weights=weights, adds_bos=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model on its devices, and the plan that it follows."""

    plan: RunPlan[serve.ServeWork]
    ready: LoadedEngine

    def service(self) -> Service:
        """A service of it, with rows of its own."""
        given = self.ready.engine
        assert given is not None
        device = given.device
        assert isinstance(device, DeviceRunner)
        rows = DeviceRunner(device.programs, device._mesh, device._flat_model)
        engine = Engine(rows, given.schedule, constraints=given.constraints)
        return serve.make_service(self.plan.work, replace(self.ready, engine=engine))


@contextmanager
def loaded(folder: Path, scratch: Path, **keys: object) -> Iterator[Loaded]:
    """A model whose Programs are compiled.

    Args:
        folder: its files.
        scratch: where its config is written.
        keys: of the config.
    """
    inference = {
        "max_rows": 4,
        "max_seq_len": 192,
        "prefill_chunk": 8,
        "prompt_logprobs": True,
        **keys.pop("inference", {}),
    }  # type: ignore
    path = scratch / "serve.yaml"
    path.write_text(json.dumps({"hf_checkpoint": str(folder), "trainer": TRAINER, "inference": inference, **keys}))
    read = load_written(ServeConfig, ["--config_path", str(path)])
    # As every entry point does: one that ran in this process later would change what compiled Programs are found by.
    assert set_jax_options(read.config.trainer) == []
    target = Target(name="local", platform="cpu", kind="cpu", devices=1)
    plan = serve.describe(read.config, target, written=read.written).check()
    work = plan.work
    schedule = make_schedule(work.programs, share_prefixes=True, max_queued_tokens=work.server.max_queued_tokens)
    reader = prompt_reader(work, schedule)
    with running(work, plan.mesh.build(jax.devices()[:1]), schedule=schedule, reader=reader, show=False) as ready:
        serve.warm(ready, schedule)
        yield Loaded(plan=plan, ready=ready)


@dataclass(frozen=True, kw_only=True)
class Listening:
    """A server that answers."""

    url: str
    application: Starlette
    service: Service
    server: HttpServer
    thread: threading.Thread


@contextmanager
def listening(
    model: Loaded, *, drain_seconds: float = 5.0, max_queued_tokens: int | None = None
) -> Iterator[Listening]:
    """A model at an address of this machine; the server is told to end behind the block."""
    service, opened = model.service(), threading.Event()
    if max_queued_tokens is not None:
        service._inbox.max_queued_tokens = max_queued_tokens
    application = serve.make_application(model.plan, service)
    server = HttpServer(application, service, drain_seconds=drain_seconds, opened=opened.set)
    socket = bind_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    thread = threading.Thread(target=server.run, args=(socket,), name="http")
    thread.start()
    try:
        assert opened.wait(200), "the server does not open its port"
        yield Listening(url=url, application=application, service=service, server=server, thread=thread)
    finally:
        if thread.is_alive():
            server.stop()
        thread.join(200)
        assert not thread.is_alive(), "the server does not end"
