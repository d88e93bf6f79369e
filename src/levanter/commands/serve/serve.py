"""What serving a model takes, before a chip is rented: `python -m levanter.main.plan serve`.

    python -m levanter.main.plan serve --config_path config/serve/llama3.1_70b_int8.yaml --target v5e-8

The model, its cache and its Programs are those of `generate`; a server adds an address, a key and a queue. There is no
server yet: what is described here is planned, and a run is refused.
"""

from dataclasses import replace
from typing import NoReturn

from jax.sharding import Mesh

from levanter.commands.generate import plan as generation
from levanter.commands.generate.plan import GenerateWork
from levanter.commands.serve.config import ServeConfig
from levanter.commands.shell.perform import perform
from levanter.config import Written
from levanter.io import Output, exists
from levanter.run import Check, EntryPoint, RunPlan, Session, Target

NAME = "serve"
NOT_YET = (
    "a model cannot be served over HTTP yet: it can be planned (python -m levanter.main.plan serve …), and `generate` "
    "answers a file of requests with the same model, cache and Programs"
)


class NotServedError(ValueError):
    """There is no server yet."""


def describe(config: ServeConfig, target: Target, *, written: Written | None = None) -> RunPlan[GenerateWork]:
    """Describes the server for `target`; reads metadata, no weights.

    Args:
        config: what is served.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.

    Raises:
        ValueError: the model is broken or unknown, the mesh cannot be resolved, or the rows cannot be cut over it.
    """
    written = Written.in_python(config) if written is None else written
    planned = generation.describe(config.generating, target, written=written)
    checks = [Check(name=NAME, status="unchecked", message=NOT_YET, error=NotServedError(NOT_YET))]
    checks += [check for check in planned.checks if check.name not in ("input_path", "output_path")]
    limits = f"{config.max_queued_tokens:,} tokens of prompts may wait, {config.drain_seconds:g} s to end"
    address = f"{config.host}:{config.port}, {_who(config)}; {limits}"
    checks.append(Check(name="address", status="ok", message=address))
    if config.api_key is not None and not exists(config.api_key):
        error = ValueError(f"api_key: {config.api_key}: no such file")
        checks.append(Check(name="api_key", status="unchecked", message=str(error), error=error))
    return replace(planned, entry_point=NAME, checks=tuple(checks))


def _who(config: ServeConfig) -> str:
    """Whom the server answers."""
    if config.api_key is not None:
        return f"to requests with the key in {config.api_key}"
    return "to this machine" if config.is_local else "to everyone who reaches it (insecure)"


def execute(plan: RunPlan[GenerateWork], mesh: Mesh | None, session: Session | None = None) -> NoReturn:
    """Refuses.

    Raises:
        NotServedError: always.
    """
    del plan, mesh, session
    raise NotServedError(NOT_YET)


def conclude(plan: RunPlan[GenerateWork], done: object, session: Session) -> int:
    """Nothing comes of it."""
    raise AssertionError((plan, done, session))


def outputs(plan: RunPlan[GenerateWork], session: Session) -> tuple[Output, ...]:
    """Nothing is written."""
    del plan, session
    return ()


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=ServeConfig,
    describe=describe,
    execute=execute,
    outputs=outputs,
    conclude=conclude,
)


def main(config: ServeConfig, *, written: Written | None = None) -> int:
    """Refuses, since there is no server yet."""
    return perform(ENTRY_POINT, config, written=written).exit_code
