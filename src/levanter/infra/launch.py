"""Launches a run: on TPU VMs through gcloud, under Slurm, or as N processes here. Needs no JAX.

    python -m levanter.infra.launch --tpu_name books --tpu_type v4-256 --zone us-central2-b -- \\
        python -m levanter.main.eval_careless_lm --config_path config/memorization/llama3.1_405b_v4-256.yaml

The run is planned first (`planfirst`); then the pod is created, set up, run and followed (`tpu_vm`). `--dry_run` prints
every command instead. `HELP` lists the other commands.
"""

import os
import secrets
import shlex
import shutil
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from levanter.config.errors import did_you_mean
from levanter.infra import dry_run, gcloud, preflight
from levanter.infra.code_archive import pack
from levanter.infra.command_line import settings, split_command, with_settings
from levanter.infra.console import Console
from levanter.infra.environment import Environment, collect
from levanter.infra.errors import INTERNAL_ERROR, INTERRUPTED, OK, LaunchError, UsageError
from levanter.infra.flags import COMMANDS, HELP, parser_of
from levanter.infra.host_scripts import ENVIRONMENT, SOURCE, Remote, like_here
from levanter.infra.pods import Pod, pod_of
from levanter.infra.processes import Processes, exit_code
from levanter.infra.slurm import SlurmJob
from levanter.infra.subprocesses import Caller
from levanter.infra.tpu_vm import HINTS, RetryPolicy, TpuVmLauncher
from levanter.io import output_is_lost
from levanter.io.names import name_problem


def main(argv: Sequence[str] | None = None) -> int:
    """Launches what a command line asks for; returns its exit code."""
    return shell(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def shell(run: Callable[[], int]) -> int:
    """Calls `run` and turns the outcome into an exit code; user errors are shown without a traceback."""
    try:
        code = run()
        return INTERNAL_ERROR if output_is_lost() else code
    except LaunchError as error:
        if os.environ.get("LEVANTER_TRACEBACK"):
            traceback.print_exception(error)
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return INTERRUPTED
    except BrokenPipeError as error:
        output_is_lost(error)
        return INTERNAL_ERROR
    except SystemExit as ended:
        # argparse, after --help.
        output_is_lost()
        return ended.code if isinstance(ended.code, int) else OK


def _main(argv: Sequence[str]) -> int:
    own, command = split_command(argv)
    if not own and not command:
        raise UsageError(f"no command given\n\n{HELP}")
    if own and own[0] in ("-h", "--help"):
        sys.stdout.write(HELP)
        return OK
    if own and own[0] not in COMMANDS and not own[0].startswith("-"):
        raise UsageError(f"unknown command {own[0]!r}{did_you_mean(own[0], COMMANDS)} (known: {', '.join(COMMANDS)})")
    name = own.pop(0) if own and own[0] in COMMANDS else "tpu"
    parser = parser_of(name)
    flags, variables = settings(folder=Path.cwd(), home=Path.home())
    with_settings(parser, flags)
    asked = parser.parse_args(own)
    if name in ("logs", "list", "delete") and command:
        raise UsageError(f"{name} takes no command after `--`")
    if name in _ON_PODS:
        return _ON_PODS[name](asked, command)
    if name == "local":
        return _local(asked, command, variables)
    if name == "slurm":
        return _slurm(asked, command, variables)
    return _tpu(asked, command, variables, only_create=name == "create")


def _environment(asked: Namespace, variables: Mapping[str, str]) -> Environment:
    return collect(asked.env or (), asked.env_file or (), here=os.environ, defaults=variables)


def no_secrets_in(command: Sequence[str], environment: Environment) -> None:
    """Command lines are shown and logged everywhere; a secret value has no place in them."""
    console = Console(environment.secrets())
    if any(console.clean(word) != word for word in command):
        raise UsageError(
            "the run's command contains the value of a secret; the variable is forwarded anyway, leave the value out"
        )


def _pod(asked: Namespace) -> Pod:
    if asked.image and asked.setup != "pip":
        raise UsageError(f"--image and --setup {asked.setup} exclude each other; give one of them")
    return pod_of(
        tpu=asked.tpu_type,
        name=asked.tpu_name,
        zone=asked.zone,
        node_count=asked.node_count,
        capacity="spot" if asked.spot else "preemptible" if asked.preemptible else asked.capacity_type,
        queued=asked.queued,
        runtime_version=asked.version,
        project=asked.project,
        network=asked.network,
        subnetwork=asked.subnetwork,
        service_account=asked.service_account,
        internal_ips=asked.internal_ips,
        valid_until=asked.valid_until,
        labels=asked.labels,
    )


def _check_name(flag: str, name: str | None) -> None:
    """Refuses a name that would be a path, here or on the hosts."""
    if name and (problem := name_problem(name)) is not None:
        raise UsageError(f"{flag}: {problem}")


def _run_id(asked: Namespace) -> str:
    _check_name("--run_id", asked.run_id)
    return asked.run_id or f"{asked.tpu_name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _tpu(asked: Namespace, command: tuple[str, ...], variables: Mapping[str, str], *, only_create: bool = False) -> int:
    if only_create and command:
        raise UsageError("create takes no command; leave out `create` to run the command as well")
    if not only_create and not command:
        raise UsageError("what to run comes after `--`, e.g. -- python -m levanter.main.eval_lm --config_path …")
    pod, run = _pod(asked), _run_id(asked)
    environment = _environment(asked, variables).with_values({"RUN_ID": run, "PYTHONUNBUFFERED": "1"})
    no_secrets_in(command, environment)
    console = Console(environment.secrets())
    python, pins = like_here()
    remote = Remote(
        run=run,
        command=command,
        setup="image" if asked.image else asked.setup,
        install=asked.install or "source[tpu,remote]",
        image=asked.image or "",
        python=python,
        pins=pins,
    )
    staged = Path(asked.staging).expanduser() / run
    packs = remote.setup == "pip" and not asked.install
    if asked.dry_run:
        plan = preflight.shown(command, pod.accelerator.name) if command and asked.plan_first else None
        text = dry_run.text(
            pod,
            remote,
            environment,
            staged,
            plan=plan,
            source=SOURCE if packs else None,
            follow=asked.foreground,
            autodelete=asked.autodelete,
            retries=asked.retries,
        )
        sys.stdout.write(console.clean(text))
        return OK
    if command and asked.plan_first:
        preflight.require_plan(command, pod.accelerator.name, console)
    if environment.forwarded:
        console.say(f"forwarded from here, in a file: {', '.join(environment.forwarded)}")
    launcher = TpuVmLauncher(pod, remote, staged, console=console, patience=_patience(asked))
    try:
        _stage(staged, remote, environment, tree=Path.cwd() if packs else None)
        return _watched(asked, launcher, command)
    finally:
        # The environment is on the hosts now, and nowhere else.
        shutil.rmtree(staged, ignore_errors=True)


def _watched(asked: Namespace, launcher: TpuVmLauncher, command: tuple[str, ...]) -> int:
    pod, console = launcher.pod, launcher.console
    words = f"delete --tpu_name {pod.name} --zone {pod.zone}{' --queued' if pod.queued else ''}"
    exists = f"{pod.name} exists and is billed until: python -m levanter.infra.launch {words}"
    try:
        if not command:
            launcher.acquire()
            if not launcher.prepare():
                raise LaunchError(f"{pod.name} was preempted while its hosts were being set up")
            console.say(exists)
            return OK
        judgement = launcher.run(follow=asked.foreground)
    except KeyboardInterrupt:
        console.say(f"interrupted; the run continues on the hosts (`logs` shows it). {exists}")
        raise
    except LaunchError:
        console.say(exists)
        raise
    console.say(str(judgement))
    if asked.autodelete and asked.foreground:
        console.say(f"deleting {pod.name}")
        launcher.delete()
    else:
        console.say(exists)
    return judgement.exit_code


def _patience(asked: Namespace) -> RetryPolicy:
    return RetryPolicy(
        retries=asked.retries, create_retries=asked.create_retries, wait=asked.retry_seconds, poll=asked.poll_seconds
    )


def _stage(staged: Path, remote: Remote, environment: Environment, *, tree: Path | None) -> None:
    staged.mkdir(mode=0o700, parents=True, exist_ok=True)
    staged.chmod(0o700)
    environment.write(staged / ENVIRONMENT)
    (staged / "setup.sh").write_text(remote.setup_script(), encoding="utf-8")
    (staged / "worker.sh").write_text(remote.worker_script(), encoding="utf-8")
    if tree is not None:
        pack(tree, staged / SOURCE)


def _exec(asked: Namespace, command: tuple[str, ...]) -> int:
    if not command:
        raise UsageError("what to run on every host comes after `--`, e.g. -- uptime")
    # One word is a shell command line, with its pipes and wildcards; several are an argument list.
    return _on_each_node(asked, command[0] if len(command) == 1 else shlex.join(command))


def _logs(asked: Namespace, _: tuple[str, ...]) -> int:
    _check_name("--run_id", asked.run_id)
    words = Remote(run=asked.run_id, command=()).folder if asked.run_id else None
    return _on_each_node(asked, f"bash {words}/worker.sh latest follow" if words else Remote.newest_call())


def _on_each_node(asked: Namespace, words: str) -> int:
    # The kind of slices does not matter here, only their number.
    asked.tpu_type = asked.tpu_type or "v4-8"
    pod = _pod(Namespace(**{**vars(parser_of("tpu").parse_args([])), **vars(asked)}))
    commands = [gcloud.ssh(pod, node, words) for node in pod.nodes]
    if asked.dry_run:
        sys.stdout.write("".join(gcloud.shell_text(command) + "\n" for command in commands))
        return OK
    caller = Caller(Console(), HINTS)
    return max(caller.show(command).code for command in commands)


def _list(asked: Namespace, _: tuple[str, ...]) -> int:
    if not asked.zone:
        raise UsageError("--zone is missing, e.g. --zone us-central2-b")
    return _call_all(asked, gcloud.listing(asked.zone, asked.project))


def _delete(asked: Namespace, _: tuple[str, ...]) -> int:
    missing = [f"--{flag} is missing" for flag in ("tpu_name", "zone") if not getattr(asked, flag)]
    if missing:
        raise UsageError("\n".join(missing))
    # Its kind does not matter for deleting it.
    pod = pod_of(tpu="v4-8", name=asked.tpu_name, zone=asked.zone, project=asked.project, queued=bool(asked.queued))
    return _call_all(asked, [gcloud.delete(pod)])


def _call_all(asked: Namespace, commands: Sequence[gcloud.Command]) -> int:
    if asked.dry_run:
        sys.stdout.write("".join(gcloud.shell_text(command) + "\n" for command in commands))
        return OK
    caller = Caller(Console(), HINTS)
    return max([caller.show(command).code for command in commands])


_ON_PODS = {"exec": _exec, "logs": _logs, "list": _list, "delete": _delete}


def _local(asked: Namespace, command: tuple[str, ...], variables: Mapping[str, str]) -> int:
    if not command:
        raise UsageError("what to run comes after `--`, e.g. -- python -m levanter.main.eval_lm --config_path …")
    if asked.processes < 1:
        raise UsageError(f"--processes {asked.processes}: must be at least 1")
    asked_for = _environment(asked, variables)
    environment = {**os.environ, **asked_for.values}
    if asked.cpu_devices:
        environment["JAX_PLATFORMS"] = "cpu"
        kept = [flag for flag in environment.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
        environment["XLA_FLAGS"] = " ".join([*kept, f"--xla_force_host_platform_device_count={asked.cpu_devices}"])
    words = (sys.executable, *command[1:]) if command[0] in ("python", "python3") else command
    outcome = Processes(
        words, asked.processes, environment=environment, console=Console(asked_for.secrets()), grace=asked.grace_seconds
    ).run()
    return exit_code(outcome)


def _slurm(asked: Namespace, command: tuple[str, ...], variables: Mapping[str, str]) -> int:
    if not command:
        raise UsageError("what to run comes after `--`, e.g. -- python -m levanter.main.train_lm --config_path …")
    environment = _environment(asked, variables)
    no_secrets_in(command, environment)
    name = asked.job_name
    _check_name("--job_name", name)
    _check_name("--run_id", asked.run_id)
    script_path = Path(asked.output or f"{name}.sbatch")
    environment_path = script_path.with_suffix(".environment").absolute()
    job = SlurmJob(
        name=name, command=command, nodes=asked.nodes, gpus_per_node=asked.gpus_per_node,
        cpus_per_task=asked.cpus_per_task, memory=asked.mem, time=asked.time, partition=asked.partition,
        account=asked.account, qos=asked.qos, constraint=asked.constraint,
        environment_file=str(environment_path) if environment.values else None, run=asked.run_id or "",
        retries=asked.retries, extra=tuple(asked.sbatch or ()),
    )  # fmt: skip
    script = job.script()
    if asked.dry_run:
        sys.stdout.write(script)
        return OK
    console = Console(environment.secrets())
    if asked.target:
        preflight.require_plan(command, asked.target, console)
    if environment.values:
        environment.write(environment_path)
        console.say(f"{environment_path} (mode 600): {', '.join(sorted(environment.values))}")
    script_path.write_text(script, encoding="utf-8")
    console.say(f"wrote {script_path}" + ("" if asked.submit else f"; submit it: sbatch {script_path}"))
    if not asked.submit:
        return OK
    return Caller(console, {"sbatch": "this is not a Slurm login node"}).show(("sbatch", str(script_path))).code


def as_program(run: Callable[[], int]) -> NoReturn:
    """Exits with what `run` returns; SIGTERM is handled like Ctrl-C, so that nothing is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(run())


if __name__ == "__main__":
    as_program(main)
