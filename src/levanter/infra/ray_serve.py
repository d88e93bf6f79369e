"""Replicas of a server on a Ray cluster, behind one address: a Ray Serve application.

    python -m levanter.infra.ray_serve --replicas 4 --tpu v5e-8 -- \\
        python -m levanter.main.serve --config_path config/serve/llama3.1_70b_int8.yaml

Each replica starts the command on a host of its own, waits until it is ready, and passes requests on to it. The same
again replaces the replicas one after another: each ends its requests first, so none fails. `--delete` ends them.
"""

import os
import secrets
import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from levanter.hardware import Accelerator, AcceleratorError, parse_accelerator
from levanter.infra import preflight
from levanter.infra.command_line import Parser, settings, split_command, with_settings
from levanter.infra.console import Console
from levanter.infra.environment import Environment, collect
from levanter.infra.errors import LaunchError, UsageError
from levanter.infra.flags import environment_flags
from levanter.infra.launch import as_program, no_secrets_in, shell
from levanter.infra.ray_cluster import import_ray, import_serve
from levanter.infra.replica import Replica, forwarding
from levanter.io.names import name_problem

LOCAL = ("127.0.0.1", "localhost", "::1")


def parser() -> Parser:
    """The flags."""
    made = Parser(
        prog="python -m levanter.infra.ray_serve", usage="%(prog)s --replicas N FLAGS -- COMMAND OF THE SERVER"
    )
    made.flag("--name", default="levanter", metavar="NAME", help="of the application (default: levanter)")
    made.flag("--replicas", type=int, default=1, metavar="N", help="how many servers (default: 1)")
    made.flag("--tpu", "--tpu_type", dest="tpu", metavar="TYPE", help="of each replica, one host: v5e-8, v6e-4")
    made.flag("--gpus", type=int, default=0, metavar="N", help="of each replica (default: none)")
    made.flag("--cpus", type=float, default=1.0, metavar="N", help="of each replica (default: 1)")
    made.flag("--address", metavar="ADDRESS", help="of the cluster: host:port (default: RAY_ADDRESS, auto)")
    made.flag("--host", default="127.0.0.1", metavar="HOST", help="that Ray Serve listens on (default: 127.0.0.1)")
    made.flag("--port", type=int, default=8000, metavar="PORT", help="that Ray Serve listens on (default: 8000)")
    made.flag("--api_key", metavar="FILE", help="the key that requests must carry; a file that every replica reads")
    made.switch("--insecure", default=False, help="listen to other machines without a key")
    environment_flags(made)
    made.switch("--plan_first", default=True, help="refuse what does not fit before contacting the cluster")
    made.flag("--drain_seconds", type=float, default=60.0, metavar="S",
              help="for a replica's requests to end when it is replaced (default: 60)")  # fmt: skip
    made.switch("--delete", default=False, help="end the application and its replicas")
    return made


def application(serve: ModuleType, asked: Namespace, command: Sequence[str], environment: Environment) -> object:
    """The Ray Serve application that a command line asks for.

    Args:
        serve: Ray Serve.
        asked: the command line.
        command: the server's.
        environment: the server's variables.
    """
    accelerator = parse_accelerator(asked.tpu) if asked.tpu else None
    resources = {"TPU": accelerator.chips_per_host} if accelerator is not None else {}
    deployment = serve.deployment(
        name=asked.name,
        num_replicas=asked.replicas,
        ray_actor_options={"num_cpus": asked.cpus, "num_gpus": asked.gpus, "resources": resources},
        # The server bounds its queue and says 429; Ray's own bound of 5 would leave its rows empty.
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=asked.drain_seconds,
        graceful_shutdown_wait_loop_s=0.2,
    )(serve.ingress(forwarding)(Replica))
    # Ray replaces replicas that run only where something differs.
    attempt = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return deployment.bind(
        list(command), dict(environment.values), list(environment.secrets()), asked.drain_seconds, attempt
    )


def server_command(asked: Namespace, command: Sequence[str]) -> list[str]:
    """The command of each server, with what the launcher's own flags say of who is answered.

    Args:
        asked: the command line.
        command: what stands behind `--`.
    """
    words = [*command, *(("--api_key", asked.api_key) if asked.api_key else ())]
    # A server of its machine alone answers to that machine's names; requests that are passed on have others.
    return [*words, "--insecure", "true"] if asked.insecure else words


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what a command line asks for; returns its exit code."""
    return shell(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def _main(argv: Sequence[str]) -> int:
    own, command = split_command(argv)
    flags, variables = settings(folder=Path.cwd(), home=Path.home())
    made = parser()
    with_settings(made, flags)
    asked = made.parse_args(own)
    accelerator = _checked(asked, command)
    environment = collect(asked.env or (), asked.env_file or (), here=os.environ, defaults=variables)
    console = Console(environment.secrets())
    ray, serve = import_ray(), import_serve()
    if not asked.delete:
        no_secrets_in(command, environment)
        if asked.plan_first and accelerator is not None:
            preflight.require_plan(command, accelerator.name, console)
    try:
        ray.init(
            address=asked.address or os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=False, logging_level="ERROR"
        )
    except (ConnectionError, ValueError) as error:
        raise UsageError(f"cannot reach a Ray cluster: {error}; give its address with --address") from error
    try:
        if asked.delete:
            return _delete(serve, asked.name, console)
        return _deploy(serve, asked, command, environment, console)
    finally:
        ray.shutdown()


def _deploy(
    serve: ModuleType, asked: Namespace, command: Sequence[str], environment: Environment, console: Console
) -> int:
    """Starts or replaces the replicas, and returns once all are ready."""
    words = server_command(asked, command)
    serve.start(http_options={"host": asked.host, "port": asked.port}, logging_config={"enable_access_log": False})
    console.say(f"{asked.replicas} replicas of {asked.name}; waiting until they are ready")
    try:
        serve.run(application(serve, asked, words, environment), name=asked.name, route_prefix="/")
    except RuntimeError as error:
        found = serve.status().applications.get(asked.name)
        why = [each.message for each in found.deployments.values()] if found is not None else []
        raise LaunchError("\n".join([f"{asked.name} could not be started: {error}", *why])) from error
    console.say(f"{asked.name} is ready: http://{asked.host}:{asked.port} (ended by --delete --name {asked.name})")
    return 0


def _delete(serve: ModuleType, name: str, console: Console) -> int:
    if name not in serve.status().applications:
        found = ", ".join(serve.status().applications) or "none"
        raise UsageError(f"--name {name}: no such application on the cluster; it has {found}")
    serve.delete(name)
    console.say(f"{name} has ended")
    return 0


def _checked(asked: Namespace, command: Sequence[str]) -> Accelerator | None:
    """The accelerator of a replica, if it has one.

    Raises:
        UsageError: lists everything that is wrong with the command line.
    """
    problems, accelerator = [], None
    if (problem := name_problem(asked.name)) is not None:
        problems.append(f"--name: {problem}")
    if asked.replicas < 1:
        problems.append(f"--replicas {asked.replicas}: expected at least 1")
    if not 0 < asked.port < 65_536:
        problems.append(f"--port {asked.port}: expected 1 to 65535")
    if asked.tpu:
        try:
            accelerator = parse_accelerator(asked.tpu)
        except AcceleratorError as error:
            problems.append(f"--tpu {asked.tpu}: {error}")
        else:
            if accelerator.generation.platform != "tpu":
                problems.append(f"--tpu {asked.tpu}: not a TPU; use --gpus")
            elif accelerator.hosts > 1:
                problems.append(
                    f"--tpu {asked.tpu}: {accelerator.hosts} hosts, and a replica is one; a server over many hosts is "
                    "started by `levanter.infra.ray_run` or `levanter.infra.launch`"
                )
    if not command and not asked.delete:
        problems.append("what to run comes after `--`, e.g. -- python -m levanter.main.serve --config_path …")
    problems += [
        f"{word}: is this launcher's own; put it before `--`"
        for word in command
        if word.partition("=")[0] in ("--host", "--port", "--api_key", "--insecure")
    ]
    if not (asked.host in LOCAL or asked.api_key or asked.insecure or asked.delete):
        problems.append(
            f"--host {asked.host} is reached from other machines, and nothing keeps them out\n"
            "  → --api_key FILE, or --host 127.0.0.1, or --insecure"
        )
    if problems:
        raise UsageError("\n".join(problems))
    return accelerator


if __name__ == "__main__":
    as_program(main)
