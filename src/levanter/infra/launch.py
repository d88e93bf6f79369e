"""Launches a run: on TPU VMs through gcloud, under Slurm, or as N processes here. Needs no JAX.

    python -m levanter.infra.launch --tpu_name books --tpu_type v4-256 --zone us-central2-b -- \\
        python -m levanter.main.eval_careless_lm --config_path config/memorization/llama3.1_405b_v4-256.yaml

`preflight` plans the run first; then `tpu_vm` creates the pod, sets it up, runs the command and follows its output.
`--dry_run` prints every command instead. `pack` writes the archive of the working tree that the hosts install: the
files that git does not ignore, without those that may hold secrets. `HELP` lists the other commands.
"""

import fnmatch
import gzip
import io
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from levanter.config.errors import did_you_mean
from levanter.infra import gcloud, preflight
from levanter.infra.command_line import settings, split_command, with_settings
from levanter.infra.console import Console
from levanter.infra.environment import Environment, collect
from levanter.infra.errors import INTERNAL_ERROR, INTERRUPTED, OK, LaunchError, UsageError
from levanter.infra.flags import COMMANDS, HELP, command_parser
from levanter.infra.gcloud import shell_text
from levanter.infra.host_scripts import ENVIRONMENT, FOLDER, SOURCE, Remote, like_here
from levanter.infra.pods import Pod, make_pod
from levanter.infra.processes import Processes, exit_code
from levanter.infra.slurm import SlurmJob
from levanter.infra.subprocesses import Caller
from levanter.infra.tpu_vm import HINTS, RetryPolicy, TpuVmLauncher
from levanter.io import output_is_lost
from levanter.io.names import name_problem


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher's command line; returns the exit code."""
    return shell(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def shell(run: Callable[[], int]) -> int:
    """Calls `run` and turns the outcome into an exit code; user errors are shown without a traceback."""
    try:
        code = run()
        # Python flushes standard output at exit, where a full disk would no longer change the exit code.
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
    flag_words, command = split_command(argv)
    if not flag_words and not command:
        raise UsageError(f"no command given\n\n{HELP}")
    if flag_words and flag_words[0] in ("-h", "--help"):
        sys.stdout.write(HELP)
        return OK
    if flag_words and flag_words[0] not in COMMANDS and not flag_words[0].startswith("-"):
        raise UsageError(
            f"unknown command {flag_words[0]!r}{did_you_mean(flag_words[0], COMMANDS)} (known: {', '.join(COMMANDS)})"
        )
    # Without a command the flags are those of `tpu`, as in upstream's launch script.
    name = flag_words.pop(0) if flag_words and flag_words[0] in COMMANDS else "tpu"
    parser = command_parser(name)
    flags, variables = settings(folder=Path.cwd(), home=Path.home())
    with_settings(parser, flags)
    args = parser.parse_args(flag_words)
    if name in ("logs", "list", "delete") and command:
        raise UsageError(f"{name} takes no command after `--`")
    if name in _ON_PODS:
        return _ON_PODS[name](args, command)
    if name == "local":
        return _local(args, command, variables)
    if name == "slurm":
        return _slurm(args, command, variables)
    return _tpu(args, command, variables, only_create=name == "create")


def _environment(args: Namespace, variables: Mapping[str, str]) -> Environment:
    return collect(args.env or (), args.env_file or (), here=os.environ, defaults=variables)


def no_secrets_in(command: Sequence[str], environment: Environment) -> None:
    """Command lines are shown and logged everywhere; a secret value has no place in them."""
    console = Console(environment.secrets())
    if any(console.clean(word) != word for word in command):
        raise UsageError(
            "the run's command contains the value of a secret; the variable is forwarded anyway, leave the value out"
        )


def _pod(args: Namespace) -> Pod:
    if args.image and args.setup != "pip":
        raise UsageError(f"--image and --setup {args.setup} exclude each other; give one of them")
    return make_pod(
        tpu=args.tpu_type,
        name=args.tpu_name,
        zone=args.zone,
        node_count=args.node_count,
        capacity="spot" if args.spot else "preemptible" if args.preemptible else args.capacity_type,
        queued=args.queued,
        runtime_version=args.version,
        project=args.project,
        network=args.network,
        subnetwork=args.subnetwork,
        service_account=args.service_account,
        internal_ips=args.internal_ips,
        valid_until=args.valid_until,
        labels=args.labels,
    )


def _check_name(flag: str, name: str | None) -> None:
    """Refuses a name that would be a path, here or on the hosts."""
    if name and (problem := name_problem(name)) is not None:
        raise UsageError(f"{flag}: {problem}")


def _run_id(args: Namespace) -> str:
    _check_name("--run_id", args.run_id)
    return args.run_id or f"{args.tpu_name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _tpu(args: Namespace, command: tuple[str, ...], variables: Mapping[str, str], *, only_create: bool = False) -> int:
    if only_create and command:
        raise UsageError("create takes no command; leave out `create` to run the command as well")
    if not only_create and not command:
        raise UsageError("what to run comes after `--`, e.g. -- python -m levanter.main.eval_lm --config_path …")
    pod, run = _pod(args), _run_id(args)
    environment = _environment(args, variables).with_values({"RUN_ID": run, "PYTHONUNBUFFERED": "1"})
    no_secrets_in(command, environment)
    console = Console(environment.secrets())
    python, pins = like_here()
    remote = Remote(
        run=run,
        command=command,
        setup="image" if args.image else args.setup,
        install=args.install or "source[tpu,remote]",
        image=args.image or "",
        python=python,
        pins=pins,
    )
    staged = Path(args.staging).expanduser() / run
    packs = remote.setup == "pip" and not args.install
    if args.dry_run:
        plan = preflight.shown(command, pod.accelerator.name) if command and args.plan_first else None
        text = dry_run_text(
            pod,
            remote,
            environment,
            staged,
            plan=plan,
            source=SOURCE if packs else None,
            follow=args.foreground,
            autodelete=args.autodelete,
            retries=args.retries,
        )
        sys.stdout.write(console.clean(text))
        return OK
    if command and args.plan_first:
        preflight.require_plan(command, pod.accelerator.name, console)
    if environment.forwarded:
        console.say(f"forwarded from here, in a file: {', '.join(environment.forwarded)}")
    launcher = TpuVmLauncher(pod, remote, staged, console=console, patience=_retry_policy(args))
    try:
        _stage(staged, remote, environment, tree=Path.cwd() if packs else None)
        return _follow_run(args, launcher, command)
    finally:
        # The environment is on the hosts now, and nowhere else.
        shutil.rmtree(staged, ignore_errors=True)


def _follow_run(args: Namespace, launcher: TpuVmLauncher, command: tuple[str, ...]) -> int:
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
        judgement = launcher.run(follow=args.foreground)
    except KeyboardInterrupt:
        console.say(f"interrupted; the run continues on the hosts (`logs` shows it). {exists}")
        raise
    except LaunchError:
        console.say(exists)
        raise
    console.say(str(judgement))
    if args.autodelete and args.foreground:
        console.say(f"deleting {pod.name}")
        launcher.delete()
    else:
        console.say(exists)
    return judgement.exit_code


def _retry_policy(args: Namespace) -> RetryPolicy:
    return RetryPolicy(
        retries=args.retries, create_retries=args.create_retries, wait=args.retry_seconds, poll=args.poll_seconds
    )


def _stage(staged: Path, remote: Remote, environment: Environment, *, tree: Path | None) -> None:
    staged.mkdir(mode=0o700, parents=True, exist_ok=True)
    # `mkdir` is subject to the umask, and the folder may exist already with another mode.
    staged.chmod(0o700)
    environment.write(staged / ENVIRONMENT)
    (staged / "setup.sh").write_text(remote.setup_script(), encoding="utf-8")
    (staged / "worker.sh").write_text(remote.worker_script(), encoding="utf-8")
    if tree is not None:
        pack(tree, staged / SOURCE)


def _exec(args: Namespace, command: tuple[str, ...]) -> int:
    if not command:
        raise UsageError("what to run on every host comes after `--`, e.g. -- uptime")
    # One word is a shell command line, with its pipes and wildcards; several are an argument list.
    return _on_all_nodes(args, command[0] if len(command) == 1 else shlex.join(command))


def _logs(args: Namespace, _: tuple[str, ...]) -> int:
    _check_name("--run_id", args.run_id)
    words = Remote(run=args.run_id, command=()).folder if args.run_id else None
    return _on_all_nodes(args, f"bash {words}/worker.sh latest follow" if words else Remote.newest_call())


def _on_all_nodes(args: Namespace, words: str) -> int:
    # The kind of slices does not matter here, only their number.
    args.tpu_type = args.tpu_type or "v4-8"
    pod = _pod(Namespace(**{**vars(command_parser("tpu").parse_args([])), **vars(args)}))
    commands = [gcloud.ssh(pod, node, words) for node in pod.nodes]
    if args.dry_run:
        sys.stdout.write("".join(gcloud.shell_text(command) + "\n" for command in commands))
        return OK
    caller = Caller(Console(), HINTS)
    return max(caller.show(command).code for command in commands)


def _list(args: Namespace, _: tuple[str, ...]) -> int:
    if not args.zone:
        raise UsageError("--zone is missing, e.g. --zone us-central2-b")
    return _call_all(args, gcloud.listing(args.zone, args.project))


def _delete(args: Namespace, _: tuple[str, ...]) -> int:
    missing = [f"--{flag} is missing" for flag in ("tpu_name", "zone") if not getattr(args, flag)]
    if missing:
        raise UsageError("\n".join(missing))
    # Its kind does not matter for deleting it.
    pod = make_pod(tpu="v4-8", name=args.tpu_name, zone=args.zone, project=args.project, queued=bool(args.queued))
    return _call_all(args, [gcloud.delete(pod)])


def _call_all(args: Namespace, commands: Sequence[gcloud.Command]) -> int:
    if args.dry_run:
        sys.stdout.write("".join(gcloud.shell_text(command) + "\n" for command in commands))
        return OK
    caller = Caller(Console(), HINTS)
    return max([caller.show(command).code for command in commands])


_ON_PODS = {"exec": _exec, "logs": _logs, "list": _list, "delete": _delete}


def _local(args: Namespace, command: tuple[str, ...], variables: Mapping[str, str]) -> int:
    if not command:
        raise UsageError("what to run comes after `--`, e.g. -- python -m levanter.main.eval_lm --config_path …")
    if args.processes < 1:
        raise UsageError(f"--processes {args.processes}: must be at least 1")
    requested = _environment(args, variables)
    environment = {**os.environ, **requested.values}
    if args.cpu_devices:
        # Virtual devices exist on the CPU platform only, and an accelerator
        # cannot be shared by several processes.
        environment["JAX_PLATFORMS"] = "cpu"
        flags = [flag for flag in environment.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
        environment["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={args.cpu_devices}"])
    words = (sys.executable, *command[1:]) if command[0] in ("python", "python3") else command
    outcome = Processes(
        words, args.processes, environment=environment, console=Console(requested.secrets()), grace=args.grace_seconds
    ).run()
    return exit_code(outcome)


def _slurm(args: Namespace, command: tuple[str, ...], variables: Mapping[str, str]) -> int:
    if not command:
        raise UsageError("what to run comes after `--`, e.g. -- python -m levanter.main.train_lm --config_path …")
    environment = _environment(args, variables)
    no_secrets_in(command, environment)
    name = args.job_name
    _check_name("--job_name", name)
    _check_name("--run_id", args.run_id)
    script_path = Path(args.output or f"{name}.sbatch")
    environment_path = script_path.with_suffix(".environment").absolute()
    job = SlurmJob(
        name=name, command=command, nodes=args.nodes, gpus_per_node=args.gpus_per_node,
        cpus_per_task=args.cpus_per_task, memory=args.mem, time=args.time, partition=args.partition,
        account=args.account, qos=args.qos, constraint=args.constraint,
        environment_file=str(environment_path) if environment.values else None, run=args.run_id or "",
        retries=args.retries, extra=tuple(args.sbatch or ()),
    )  # fmt: skip
    script = job.script()
    if args.dry_run:
        sys.stdout.write(script)
        return OK
    console = Console(environment.secrets())
    if args.target:
        preflight.require_plan(command, args.target, console)
    if environment.values:
        environment.write(environment_path)
        console.say(f"{environment_path} (mode 600): {', '.join(sorted(environment.values))}")
    script_path.write_text(script, encoding="utf-8")
    console.say(f"wrote {script_path}" + ("" if args.submit else f"; submit it: sbatch {script_path}"))
    if not args.submit:
        return OK
    return Caller(console, {"sbatch": "this is not a Slurm login node"}).show(("sbatch", str(script_path))).code


SECRET_PATTERNS = (".env", ".env.*", "*.env", ".levanter.yaml", ".netrc", "*.pem", "*.key", "id_rsa*", "id_ed25519*",
            "*credentials*.json", "*service_account*.json")  # fmt: skip
"""Names of files that more often hold secrets than source."""

LARGEST = 256 * 2**20


def list_files(tree: Path) -> list[str]:
    """The files of a working tree to copy: tracked ones and new ones that git does not ignore.

    Raises:
        UsageError: it is not a git repository, or git is not installed.
    """
    try:
        listed = subprocess.run(
            ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            check=True,
        ).stdout.decode()
    except FileNotFoundError as error:
        raise UsageError(
            "git is not on PATH; it decides which files of the tree are copied (or give --install)"
        ) from error
    except subprocess.CalledProcessError as error:
        raise UsageError(
            f"{tree} is not a git repository, so the files to copy are unknown: run this in the project's folder, "
            "or give --install 'levanter-fork[tpu] @ git+https://…' or --image"
        ) from error
    # `ls-files` lists a file with merge conflicts several times, and files that
    # are deleted in the working tree.
    names = sorted({name for name in listed.split("\0") if name})
    return [name for name in names if (tree / name).is_file() and not _may_hold_secrets(name)]


def _may_hold_secrets(name: str) -> bool:
    base = name.rsplit("/", 1)[-1]
    return any(fnmatch.fnmatch(base, pattern) for pattern in SECRET_PATTERNS)


def pack(tree: Path, archive: Path) -> int:
    """Writes the archive and returns its number of files; the same files give the same bytes.

    Raises:
        UsageError: no repository, no pyproject.toml in it, or more than 256 MiB.
    """
    names = list_files(tree)
    if "pyproject.toml" not in names:
        raise UsageError(
            f"{tree} has no pyproject.toml to install: run this in the project's folder, or give --install"
        )
    size = sum((tree / name).stat().st_size for name in names)
    if size > LARGEST:
        large = sorted(names, key=lambda name: -(tree / name).stat().st_size)[:3]
        raise UsageError(
            f"{tree}: {size / 2**20:.0f} MiB would be copied to every host; the limit is {LARGEST / 2**20:.0f} MiB. "
            f"Largest: {', '.join(large)}. Add them to .gitignore, or give --install or --image"
        )
    with (
        archive.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed,
        # No file name, times or owners: the same tree gives the same archive, byte for byte.
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name in names:
            content = (tree / name).read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755 if (tree / name).stat().st_mode & 0o100 else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return len(names)


def dry_run_text(
    pod: Pod,
    remote: Remote,
    environment: Environment,
    staged: Path,
    *,
    plan: Sequence[str] | None,
    source: str | None,
    follow: bool,
    autodelete: bool,
    retries: int,
) -> str:
    """The steps of a launch; variables are shown by name, without their values.

    Args:
        plan: the preflight's command; None: no preflight.
        source: the archive's name; None: none is copied.
        follow: whether the launcher stays until the end.
        autodelete: whether the pod is then deleted.
        retries: attempts after a preemption.
    """
    names = ", ".join(sorted(environment.values))
    steps: list[tuple[str, Sequence[gcloud.Command]]] = []
    if plan is not None:
        steps.append(("plan: exit code 3 (does not fit) ends the launch here", [tuple(plan)]))
    ready = "ACTIVE" if pod.queued else "READY"
    steps.append(("does it exist? reuse it, or delete it if it was preempted", [gcloud.state(pod)]))
    steps.append(("create; without capacity retry after 30 s, 60 s, …, 10 min", [gcloud.create(pod)]))
    steps.append((f"wait until it is {ready}", [gcloud.state(pod)]))
    steps.append(
        ("make a folder on every host", [gcloud.ssh(pod, node, f"mkdir -p -m 700 {FOLDER}") for node in pod.nodes])
    )
    steps.append(
        (
            f"copy setup.sh, worker.sh{f', {source}' if source else ''} and environment (mode 600: {names})",
            [gcloud.scp(pod, node, staged, f"{FOLDER}/") for node in pod.nodes],
        )
    )
    steps.append(("set up", [gcloud.ssh(pod, node, remote.setup_call()) for node in pod.nodes]))
    end = []
    if remote.command:
        verb = "run" if follow else "start"
        labels = [f"{index}/" if pod.slices > 1 else "" for index in range(pod.slices)]
        steps.append(
            (
                "run, and show the hosts' output" if follow else "start",
                [
                    gcloud.ssh(pod, node, remote.worker_call(1, label, verb=verb))
                    for node, label in zip(pod.nodes, labels, strict=True)
                ],
            )
        )
        if follow:
            end.append(("after a preemption, then start over from `create`, at most "
                        f"{retries} times", [gcloud.delete(pod)]))  # fmt: skip
    if autodelete and follow:
        end.append(("at the end", [gcloud.delete(pod)]))
    lines = [f"# {pod.described}", f"# {pod.accelerator.hosts} hosts; software {pod.runtime_version}", ""]
    for title, commands in (*steps, *end):
        lines += [f"# {title}", *(shell_text(command) for command in commands), ""]
    lines += ["# setup.sh", *_indented(remote.setup_script())]
    if remote.command:
        lines += ["", "# worker.sh", *_indented(remote.worker_script())]
    return "\n".join(lines) + "\n"


def _indented(script: str) -> list[str]:
    return [f"    {line}".rstrip() for line in script.splitlines()]


def as_program(run: Callable[[], int]) -> NoReturn:
    """Exits with what `run` returns; SIGTERM is handled like Ctrl-C, so that nothing is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(run())


if __name__ == "__main__":
    as_program(main)
