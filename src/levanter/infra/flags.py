"""The flags of each launcher command. The spellings of upstream's launch script are accepted too."""

from pathlib import Path

from levanter.infra.command_line import Parser
from levanter.infra.pods import CAPACITIES

COMMANDS = ("tpu", "create", "exec", "logs", "list", "delete", "local", "slurm")

HELP = """\
usage: python -m levanter.infra.launch [COMMAND] FLAGS [-- COMMAND OF THE RUN]

Runs the same command on every host of a pod: creates the TPU VMs, sets them up, runs the command, follows its output,
and starts over after a preemption. Needs no JAX; preflight (on by default for pods) needs the `plan` extra.

commands (each has --help):
  tpu      create a pod of TPU VMs, set it up, run (the default)
  create   create and set up only
  exec     run something on every host of an existing pod
  logs     show the output of the newest run
  list     list the TPU VMs and queued resources of a zone
  delete   delete a pod
  local    N processes on this machine: a multi-host run to debug
  slurm    write (and submit) a batch script

examples:
  python -m levanter.infra.launch --dry_run --tpu_name books --tpu_type v4-256 --zone us-central2-b -- \\
      python -m levanter.main.eval_lm --config_path config/eval/llama3.1_405b_v4-256.yaml
  python -m levanter.infra.launch --tpu_name t --tpu_type v6e-64 --zone us-east5-b --spot --queued --autodelete -- \\
      python -m levanter.main.train_lm --config_path gs://bucket/train.yaml
  python -m levanter.infra.launch local --processes 4 --cpu_devices 2 -- \\
      python -m levanter.main.eval_lm --config_path config/eval/demo.yaml
  python -m levanter.infra.launch delete --tpu_name books --zone us-central2-b

exit codes: those of the run; 2 bad input, quota, permission; 3 does not fit; 5 no capacity for too long, or hosts
lost too often; 130 Ctrl-C
"""


def command_parser(command: str) -> Parser:
    """The parser of a command's flags."""
    parser = Parser(prog=f"python -m levanter.infra.launch {command}", usage="%(prog)s FLAGS [-- COMMAND OF THE RUN]")
    {
        "tpu": _tpu, "create": _tpu, "exec": _exec, "logs": _exec, "list": _list, "delete": _delete,
        "local": _local, "slurm": _slurm,
    }[command](parser)  # fmt: skip
    return parser


def _dry_run(parser: Parser) -> None:
    parser.switch("--dry_run", default=False, help="print every command without running any")


def environment_flags(parser: Parser) -> None:
    """Adds the flags that collect the variables of a run."""
    parser.flag(
        "-e", "--env", dest="env", action="append", nargs="+", metavar="NAME[=VALUE]",
        help="an environment variable of the run: NAME=value, NAME value, or NAME alone (its value here)",
    )  # fmt: skip
    parser.flag("--env_file", action="append", metavar="FILE", help="file of NAME=value lines; for secrets")


def _where(parser: Parser) -> None:
    parser.flag("--tpu_name", "--name", dest="tpu_name", metavar="NAME", help="name of the pod")
    parser.flag("--zone", metavar="ZONE", help="such as us-central2-b")
    parser.flag("--project", metavar="PROJECT", help="default: what gcloud is configured for")


def _kind(parser: Parser) -> None:
    parser.flag("--tpu_type", "--tpu", dest="tpu_type", metavar="TYPE", help="v4-256, v6e-64, 2xv5p-128, v4:4x4x16")
    parser.flag("--node_count", type=int, metavar="N", help="number of slices, if the type does not give it")
    # None: `make_pod` decides by the number of slices and the capacity.
    parser.switch("--queued", default=None, help="use a queued resource (default: if needed)")  # type: ignore[arg-type]
    parser.switch("--internal_ips", default=False, help="no external addresses; reach hosts through IAP")


def _tpu(parser: Parser) -> None:
    _where(parser)
    _kind(parser)
    parser.flag(
        "--capacity_type", "--capacity", dest="capacity_type", default="on-demand", metavar="|".join(CAPACITIES),
        help="kind of capacity (default: on-demand)",
    )  # fmt: skip
    parser.switch("--spot", default=False, help="--capacity_type spot")
    parser.switch("--preemptible", default=False, help="--capacity_type preemptible")
    parser.flag("--version", metavar="VERSION", help="TPU software on the hosts (default: the one for JAX)")
    parser.flag("--network", metavar="NETWORK", help="default: default")
    parser.flag("--subnetwork", metavar="SUBNETWORK", help="default: default")
    parser.flag("--service_account", metavar="EMAIL", help="service account of the hosts")
    parser.flag("--labels", metavar="KEY=VALUE,…", help="labels of the resource")
    parser.flag("--valid_until", metavar="6h", help="how long a queued request stays valid (default: forever)")
    parser.flag("--setup", choices=("pip", "none"), default="pip", help="how a host is set up (default: pip)")
    parser.flag("--install", metavar="REQUIREMENT", help="what pip installs (default: this working tree)")
    parser.flag("--image", metavar="IMAGE", help="run in this container instead of installing anything")
    environment_flags(parser)
    parser.flag("--run_id", metavar="ID", help="RUN_ID of the run, the same for every attempt (default: name and time)")
    parser.switch("--plan_first", default=True, help="refuse what does not fit before requesting anything")
    parser.switch("--foreground", default=True, help="stay and follow; false: start it and return, then see `logs`")
    parser.switch("--autodelete", default=False, help="delete the pod once the run has ended")
    parser.flag("--retries", type=int, default=10, metavar="N", help="restarts after a preemption (default: 10)")
    parser.flag("--create_retries", type=int, default=20, metavar="N", help="retries after a stockout (default: 20)")
    parser.flag("--retry_seconds", type=float, default=30.0, metavar="S", help="first delay, doubling up to 600 s")
    parser.flag("--poll_seconds", type=float, default=30.0, metavar="S", help="interval for polling a queued request")
    default = str(Path("~/.cache/levanter/launch"))
    parser.flag(
        "--staging", default=default, metavar="FOLDER", help=f"local folder for files to copy (default: {default})"
    )
    _dry_run(parser)


def _exec(parser: Parser) -> None:
    _where(parser)
    _kind(parser)
    parser.flag("--run_id", metavar="ID", help="default: the newest run")
    _dry_run(parser)


def _list(parser: Parser) -> None:
    parser.flag("--zone", metavar="ZONE", help="such as us-central2-b")
    parser.flag("--project", metavar="PROJECT", help="default: what gcloud is configured for")
    _dry_run(parser)


def _delete(parser: Parser) -> None:
    _where(parser)
    parser.switch("--queued", default=False, help="it is a queued resource")
    _dry_run(parser)


def _local(parser: Parser) -> None:
    parser.flag("--processes", type=int, default=2, metavar="N", help="number of processes (default: 2)")
    parser.flag("--cpu_devices", type=int, default=0, metavar="N", help="virtual CPU devices per process")
    parser.flag("--grace_seconds", type=float, default=10.0, metavar="S", help="from SIGTERM to SIGKILL (default: 10)")
    environment_flags(parser)


def _slurm(parser: Parser) -> None:
    parser.flag("--job_name", default="levanter", metavar="NAME", help="default: levanter")
    parser.flag("--nodes", type=int, default=1, metavar="N", help="one process on each (default: 1)")
    parser.flag("--gpus_per_node", type=int, default=0, metavar="N", help="default: none")
    parser.flag("--cpus_per_task", type=int, metavar="N", help="default: the cluster's")
    parser.flag("--mem", metavar="SIZE", help="memory per node, such as 200G; 0: all of it")
    parser.flag("--time", metavar="LIMIT", help="such as 12:00:00")
    parser.flag("--partition", metavar="NAME")
    parser.flag("--account", metavar="NAME")
    parser.flag("--qos", metavar="NAME")
    parser.flag("--constraint", metavar="EXPRESSION")
    parser.flag("--sbatch", action="append", metavar="OPTION", help="a further #SBATCH line, e.g. --sbatch=--exclusive")
    parser.flag("--run_id", metavar="ID", help="RUN_ID of the run (default: the job's name)")
    parser.flag("--retries", type=int, default=10, metavar="N", help="requeues after a preemption (default: 10)")
    parser.flag("--target", metavar="TARGET", help="run preflight for it first, e.g. h100x32")
    parser.flag("--output", metavar="FILE", help="file for the script (default: NAME.sbatch)")
    parser.switch("--submit", default=False, help="submit the script")
    environment_flags(parser)
    _dry_run(parser)
