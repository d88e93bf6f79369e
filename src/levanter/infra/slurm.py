"""A Slurm batch script: one process per node, each with its index, requeued after a preemption."""

import re
import shlex
from dataclasses import dataclass

from levanter.infra.errors import PREEMPTED, UsageError

_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job for Slurm.

    Attributes:
        name: of the job; its log is `NAME-JOBID.log`.
        command: the arguments of each process.
        nodes: their number, with one process on each.
        gpus_per_node: 0: none are requested.
        cpus_per_task: None: the cluster's default.
        memory: of a node, such as `200G`; `0` is all of it.
        time: limit, such as `12:00:00`.
        partition, account, qos, constraint: as the cluster names them.
        environment_file: on a file system that every node sees; None: no variables are passed.
        run: the run's id, the same after a requeue.
        retries: the most requeues after a preemption.
        warning_seconds: seconds before the time limit at which Slurm sends SIGTERM, so that the job can save.
        extra: further `#SBATCH` options, verbatim.
    """

    name: str
    command: tuple[str, ...]
    nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    memory: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    environment_file: str | None = None
    run: str = ""
    retries: int = 10
    warning_seconds: int = 300
    extra: tuple[str, ...] = ()

    def script(self) -> str:
        """The batch script.

        Raises:
            UsageError: lists everything that is wrong.
        """
        problems = []
        if not _NAME.fullmatch(self.name):
            problems.append(f"--job_name {self.name!r}: use only letters, digits, dots, hyphens and underscores")
        if self.nodes < 1:
            problems.append(f"--nodes {self.nodes}: must be at least 1")
        problems += [
            f"--{flag} {value!r}: has a line break"
            for flag, value in vars(self).items()
            if isinstance(value, str) and "\n" in value
        ]
        if problems:
            raise UsageError("\n".join(problems))
        options = {
            "job-name": self.name,
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": self.gpus_per_node or None,
            "cpus-per-task": self.cpus_per_task,
            "mem": self.memory,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "output": f"{self.name}-%j.log",
            # A requeued job runs the same script again and must not overwrite its log.
            "open-mode": "append",
            # Sent to the job steps, so each process saves; exit code 75 then requeues the job.
            "signal": f"TERM@{self.warning_seconds}",
        }
        lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
        lines += ["#SBATCH --requeue", *(f"#SBATCH {option}" for option in self.extra)]
        environment = ""
        if self.environment_file is not None:
            environment = _ENVIRONMENT.format(file=shlex.quote(self.environment_file))
        return _SCRIPT.format(
            options="\n".join(lines),
            environment=environment,
            run=shlex.quote(self.run or self.name),
            command=shlex.join(self.command),
            preempted=PREEMPTED,
            retries=self.retries,
        )


_ENVIRONMENT = """\
# NAME=value lines; nothing in them is evaluated.
while IFS= read -r line; do
    export "$line"
done <{file}
"""

# `${{SLURM_RESTART_COUNT:-0}}` counts requeues, which Slurm does not limit. Braces are doubled for `format`.
_SCRIPT = """\
#!/usr/bin/env bash
{options}
set -uo pipefail
{environment}
export RUN_ID={run}
export PYTHONUNBUFFERED=1
# Process 0 is on the first node; the port follows from the job's number, so that two jobs on one node differ.
coordinator=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export LEVANTER_COORDINATOR=$coordinator:$((20000 + SLURM_JOB_ID % 20000))
export LEVANTER_NUM_PROCESSES=$SLURM_NTASKS

# One failing process ends all of them; each line is prefixed with its process number.
srun --kill-on-bad-exit=1 --label bash -c 'export LEVANTER_PROCESS_ID=$SLURM_PROCID; exec "$@"' process \\
    {command}
code=$?

# {preempted}: preempted, saved, resumable.
if [ "$code" -eq {preempted} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {retries} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
