"""Runs a command on every host of a slice of a Ray cluster, and restarts it after a preemption.

    python -m levanter.infra.ray_run --tpu v4-256 -- \\
        python -m levanter.main.eval_careless_lm --config_path config/memorization/llama3.1_405b_v4-256.yaml

Run it on the cluster's head, or from anywhere with `--address`; `ray job submit -- python -m levanter.infra.ray_run …`
sends it there with the working folder.
"""

import os
import secrets
import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from levanter.hardware import Accelerator, AcceleratorError, parse_accelerator
from levanter.infra import preflight
from levanter.infra.command_line import Parser, settings, split_command, with_settings
from levanter.infra.console import Console
from levanter.infra.environment import collect
from levanter.infra.errors import UsageError
from levanter.infra.flags import environment_flags
from levanter.infra.launch import as_program, no_secrets_in, shell
from levanter.infra.ray_cluster import RayCluster, import_ray
from levanter.infra.worker_group import GangRun, run_worker_group
from levanter.io.names import name_problem


def make_parser() -> Parser:
    """The parser of the launcher's flags."""
    parser = Parser(prog="python -m levanter.infra.ray_run", usage="%(prog)s --tpu TYPE FLAGS -- COMMAND OF THE RUN")
    parser.flag("--tpu", "--tpu_type", dest="tpu", metavar="TYPE", help="v4-256, v6e-64, 2xv5p-128")
    parser.flag(
        "--address", metavar="ADDRESS", help="of the cluster: host:port, ray://host:10001 (default: RAY_ADDRESS, auto)"
    )
    environment_flags(parser)
    parser.flag("--run_id", metavar="ID", help="RUN_ID of the run, the same for every attempt (default: from the time)")
    parser.switch("--plan_first", default=True, help="refuse what does not fit before contacting the cluster")
    parser.flag("--restarts", "--retries", dest="restarts", type=int, default=3, metavar="N",
              help="restarts after a lost host or a preemption (default: 3)")  # fmt: skip
    parser.flag("--wait_seconds", type=float, default=3600.0, metavar="S", help="to wait for slices (default: 3600)")
    parser.flag(
        "--intact_seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="to wait for all hosts of a slice (default: 120)",
    )
    parser.flag("--settle_seconds", type=float, default=15.0, metavar="S",
              help="for the others to end once one has failed (default: 15)")  # fmt: skip
    parser.flag("--grace_seconds", type=float, default=10.0, metavar="S", help="from SIGTERM to SIGKILL (default: 10)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher's command line; returns the exit code."""
    return shell(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def _main(argv: Sequence[str]) -> int:
    flag_words, command = split_command(argv)
    flags, variables = settings(folder=Path.cwd(), home=Path.home())
    parser = make_parser()
    with_settings(parser, flags)
    args = parser.parse_args(flag_words)
    if args.run_id and (problem := name_problem(args.run_id)) is not None:
        raise UsageError(f"--run_id: {problem}")
    accelerator = _accelerator(args, command)
    environment = collect(args.env or (), args.env_file or (), here=os.environ, defaults=variables)
    no_secrets_in(command, environment)
    console = Console(environment.secrets())
    ray = import_ray()
    # Before the cluster is contacted: a run that does not fit reserves no slice.
    if args.plan_first:
        preflight.require_plan(command, accelerator.name, console)
    run_id = args.run_id or f"ray-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    run = GangRun(
        command=command,
        environment={**environment.values, "RUN_ID": run_id},
        restarts=args.restarts,
        settle=args.settle_seconds,
        grace=args.grace_seconds,
    )
    try:
        ray.init(
            address=args.address or os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=False, logging_level="ERROR"
        )
    except (ConnectionError, ValueError) as error:
        raise UsageError(f"cannot reach a Ray cluster: {error}; give its address with --address") from error
    try:
        cluster = RayCluster(accelerator, console, wait=args.wait_seconds, intact=args.intact_seconds)
        judgement = run_worker_group(run, cluster, console)
    finally:
        # Disconnects, and releases the actors of this driver even after an error.
        ray.shutdown()
    console.say(str(judgement))
    return judgement.exit_code


def _accelerator(args: Namespace, command: Sequence[str]) -> Accelerator:
    problems = []
    accelerator = None
    if args.tpu is None:
        problems.append("--tpu is missing, e.g. --tpu v4-256")
    else:
        try:
            accelerator = parse_accelerator(args.tpu)
        except AcceleratorError as error:
            problems.append(f"--tpu {args.tpu}: {error}")
    if accelerator is not None and accelerator.generation.platform != "tpu":
        problems.append(f"--tpu {args.tpu}: not a TPU; use `levanter.infra.launch slurm` for GPUs")
    if not command:
        problems.append("what to run comes after `--`, e.g. -- python -m levanter.main.eval_lm --config_path …")
    if problems:
        raise UsageError("\n".join(problems))
    assert accelerator is not None
    return accelerator


if __name__ == "__main__":
    as_program(main)
