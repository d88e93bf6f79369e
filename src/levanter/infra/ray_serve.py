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


def make_parser() -> Parser:
    """The parser of the launcher's flags."""
    parser = Parser(
        prog="python -m levanter.infra.ray_serve", usage="%(prog)s --replicas N FLAGS -- COMMAND OF THE SERVER"
    )
    parser.flag("--name", default="levanter", metavar="NAME", help="of the application (default: levanter)")
    parser.flag("--replicas", type=int, default=1, metavar="N", help="how many servers (default: 1)")
    parser.flag("--tpu", "--tpu_type", dest="tpu", metavar="TYPE", help="of each replica, one host: v5e-8, v6e-4")
    parser.flag("--gpus", type=int, default=0, metavar="N", help="of each replica (default: none)")
    parser.flag("--cpus", type=float, default=1.0, metavar="N", help="of each replica (default: 1)")
    parser.flag("--address", metavar="ADDRESS", help="of the cluster: host:port (default: RAY_ADDRESS, auto)")
    parser.flag("--host", default="127.0.0.1", metavar="HOST", help="that Ray Serve listens on (default: 127.0.0.1)")
    parser.flag("--port", type=int, default=8000, metavar="PORT", help="that Ray Serve listens on (default: 8000)")
    parser.flag("--api_key", metavar="FILE", help="the key that requests must carry; a file that every replica reads")
    parser.switch("--insecure", default=False, help="listen to other machines without a key")
    environment_flags(parser)
    parser.switch("--plan_first", default=True, help="refuse what does not fit before contacting the cluster")
    parser.flag("--drain_seconds", type=float, default=60.0, metavar="S",
              help="for a replica's requests to end when it is replaced (default: 60)")  # fmt: skip
    parser.switch("--delete", default=False, help="end the application and its replicas")
    return parser


def application(serve: ModuleType, args: Namespace, command: Sequence[str], environment: Environment) -> object:
    """Builds the Ray Serve application of a command line.

    Args:
        serve: Ray Serve.
        args: the command line.
        command: the server's.
        environment: the server's variables.
    """
    accelerator = parse_accelerator(args.tpu) if args.tpu else None
    resources = {"TPU": accelerator.chips_per_host} if accelerator is not None else {}
    deployment = serve.deployment(
        name=args.name,
        num_replicas=args.replicas,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus, "resources": resources},
        # The server bounds its queue and says 429; Ray's own bound of 5 would leave its rows empty.
        max_ongoing_requests=100_000,
        # A replaced replica gets no new requests and has this long for those that it has.
        graceful_shutdown_timeout_s=args.drain_seconds,
        graceful_shutdown_wait_loop_s=0.2,
    )(serve.ingress(forwarding)(Replica))
    # Ray replaces running replicas only if an argument differs, so every start has its own name.
    attempt = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return deployment.bind(
        list(command), dict(environment.values), list(environment.secrets()), args.drain_seconds, attempt
    )


def server_command(args: Namespace, command: Sequence[str]) -> list[str]:
    """The command of each server, with the access flags that the launcher received.

    Args:
        args: the command line.
        command: the words after `--`.
    """
    words = [*command, *(("--api_key", args.api_key) if args.api_key else ())]
    # The server listens on localhost and would refuse requests whose Host header names the address of Ray Serve.
    return [*words, "--insecure", "true"] if args.insecure else words


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher's command line; returns the exit code."""
    return shell(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def _main(argv: Sequence[str]) -> int:
    flag_words, command = split_command(argv)
    flags, variables = settings(folder=Path.cwd(), home=Path.home())
    parser = make_parser()
    with_settings(parser, flags)
    args = parser.parse_args(flag_words)
    accelerator = _checked(args, command)
    environment = collect(args.env or (), args.env_file or (), here=os.environ, defaults=variables)
    console = Console(environment.secrets())
    ray, serve = import_ray(), import_serve()
    if not args.delete:
        no_secrets_in(command, environment)
        if args.plan_first and accelerator is not None:
            preflight.require_plan(command, accelerator.name, console)
    try:
        ray.init(
            address=args.address or os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=False, logging_level="ERROR"
        )
    except (ConnectionError, ValueError) as error:
        raise UsageError(f"cannot reach a Ray cluster: {error}; give its address with --address") from error
    try:
        if args.delete:
            return _delete(serve, args.name, console)
        return _deploy(serve, args, command, environment, console)
    finally:
        ray.shutdown()


def _deploy(
    serve: ModuleType, args: Namespace, command: Sequence[str], environment: Environment, console: Console
) -> int:
    """Starts or replaces the replicas, and returns once all are ready."""
    words = server_command(args, command)
    serve.start(http_options={"host": args.host, "port": args.port}, logging_config={"enable_access_log": False})
    console.say(f"{args.replicas} replicas of {args.name}; waiting until they are ready")
    try:
        serve.run(application(serve, args, words, environment), name=args.name, route_prefix="/")
    except RuntimeError as error:
        deployed = serve.status().applications.get(args.name)
        # Ray's error says that the deployment failed; the reason is in the status of its deployments.
        why = [deployment.message for deployment in deployed.deployments.values()] if deployed is not None else []
        raise LaunchError("\n".join([f"{args.name} could not be started: {error}", *why])) from error
    console.say(f"{args.name} is ready: http://{args.host}:{args.port} (ended by --delete --name {args.name})")
    return 0


def _delete(serve: ModuleType, name: str, console: Console) -> int:
    if name not in serve.status().applications:
        applications = ", ".join(serve.status().applications) or "none"
        raise UsageError(f"--name {name}: no such application on the cluster; it has {applications}")
    serve.delete(name)
    console.say(f"{name} has ended")
    return 0


def _checked(args: Namespace, command: Sequence[str]) -> Accelerator | None:
    """The accelerator of a replica, if it has one.

    Raises:
        UsageError: lists everything that is wrong with the command line.
    """
    problems, accelerator = [], None
    if (problem := name_problem(args.name)) is not None:
        problems.append(f"--name: {problem}")
    if args.replicas < 1:
        problems.append(f"--replicas {args.replicas}: expected at least 1")
    if not 0 < args.port < 65_536:
        problems.append(f"--port {args.port}: expected 1 to 65535")
    if args.tpu:
        try:
            accelerator = parse_accelerator(args.tpu)
        except AcceleratorError as error:
            problems.append(f"--tpu {args.tpu}: {error}")
        else:
            if accelerator.generation.platform != "tpu":
                problems.append(f"--tpu {args.tpu}: not a TPU; use --gpus")
            elif accelerator.hosts > 1:
                problems.append(
                    f"--tpu {args.tpu}: {accelerator.hosts} hosts, and a replica is one; a server over many hosts is "
                    "started by `levanter.infra.ray_run` or `levanter.infra.launch`"
                )
    if not command and not args.delete:
        problems.append("what to run comes after `--`, e.g. -- python -m levanter.main.serve --config_path …")
    problems += [
        f"{word}: is this launcher's own; put it before `--`"
        for word in command
        if word.partition("=")[0] in ("--host", "--port", "--api_key", "--insecure")
    ]
    if not (args.host in LOCAL or args.api_key or args.insecure or args.delete):
        problems.append(
            f"--host {args.host} is reached from other machines, and nothing keeps them out\n"
            "  → --api_key FILE, or --host 127.0.0.1, or --insecure"
        )
    if problems:
        raise UsageError("\n".join(problems))
    return accelerator


if __name__ == "__main__":
    as_program(main)
