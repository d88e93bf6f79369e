"""The gcloud commands of a pod, as argument lists: pure functions, so that a dry run prints what a run does.

Written against the reference of Google Cloud SDK 528 (`gcloud compute tpus tpu-vm`, `gcloud compute tpus
queued-resources`). A slice is one TPU VM; a queued resource of several slices makes `NAME-0`, `NAME-1`, ….
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from levanter.hardware import default_topologies
from levanter.infra.pods import Pod

Command = tuple[str, ...]

_TPU_VM = ("gcloud", "compute", "tpus", "tpu-vm")
_QUEUED = ("gcloud", "compute", "tpus", "queued-resources")
_CAPACITY_FLAGS = {
    "on-demand": (),
    "spot": ("--spot",),
    "preemptible": ("--preemptible",),
    "reserved": ("--reserved",),
    "best-effort": ("--best-effort",),
}


def create(pod: Pod) -> Command:
    """Creates the TPU VM, or files the request for it."""
    where, kind = _where(pod), _kind(pod)
    common = (
        *_optional("network", pod.network),
        *_optional("subnetwork", pod.subnetwork),
        *_optional("service-account", pod.service_account),
        *(("--internal-ips",) if pod.internal_ips else ()),
        *_optional("labels", pod.labels),
    )
    if not pod.queued:
        version = f"--version={pod.runtime_version}"
        return (*_TPU_VM, "create", pod.name, *where, *kind, version, *_CAPACITY_FLAGS[pod.capacity], *common)
    # A queued resource of several slices names its VMs NAME-0, NAME-1, …, as `Pod.nodes` does.
    if pod.slices > 1:
        nodes: Command = (f"--node-count={pod.slices}", f"--node-prefix={pod.name}")
    else:
        nodes = (f"--node-id={pod.name}",)
    # Preemptible VMs of queued resources are called best-effort; that flag is in the alpha commands only.
    capacity = "best-effort" if pod.capacity == "preemptible" else pod.capacity
    group = ("gcloud", "alpha", *_QUEUED[1:]) if capacity == "best-effort" else _QUEUED
    return (
        *group, "create", pod.name, *where, *nodes, *kind, f"--runtime-version={pod.runtime_version}",
        *_CAPACITY_FLAGS[capacity], *_optional("valid-until-duration", pod.valid_until), *common,
    )  # fmt: skip


def state(pod: Pod) -> Command:
    """Prints the state: of the queued request (`ACTIVE`, …), or of the TPU VM (`READY`, …)."""
    if pod.queued:
        return (*_QUEUED, "describe", pod.name, *_where(pod), "--format=value(state.state)")
    return node_state(pod, pod.name)


def node_state(pod: Pod, node: str) -> Command:
    """Prints the state of one TPU VM, and what it is."""
    return (*_TPU_VM, "describe", node, *_where(pod), "--format=value(state,acceleratorType)")


def reasons(pod: Pod) -> Command:
    """Prints everything known about the state of a queued request."""
    return (*_QUEUED, "describe", pod.name, *_where(pod), "--format=yaml(state)")


def delete(pod: Pod) -> Command:
    """Deletes the TPU VM, or the queued resource with its TPU VMs."""
    if pod.queued:
        # `--force` deletes the TPU VMs too; without it gcloud refuses while they exist.
        return (*_QUEUED, "delete", pod.name, *_where(pod), "--force", "--quiet")
    return (*_TPU_VM, "delete", pod.name, *_where(pod), "--quiet")


def listing(zone: str, project: str | None) -> tuple[Command, Command]:
    """List the TPU VMs and the queued resources of a zone."""
    where = (f"--zone={zone}", *_optional("project", project))
    return (*_TPU_VM, "list", *where), (*_QUEUED, "list", *where)


def ssh(pod: Pod, node: str, command: str) -> Command:
    """Runs a command on all hosts of one slice, at once."""
    return (*_TPU_VM, "ssh", node, *_where(pod), "--worker=all", *_iap(pod), "--quiet", f"--command={command}")


def scp(pod: Pod, node: str, folder: Path, to: str) -> Command:
    """Copies a folder into a folder of all hosts of one slice."""
    return (
        *_TPU_VM,
        "scp",
        str(folder),
        f"{node}:{to}",
        "--recurse",
        *_where(pod),
        "--worker=all",
        *_iap(pod),
        "--quiet",
    )


def _where(pod: Pod) -> Command:
    return (f"--zone={pod.zone}", *_optional("project", pod.project))


def _iap(pod: Pod) -> Command:
    return ("--tunnel-through-iap",) if pod.internal_ips else ()


def _optional(flag: str, value: str | None) -> Command:
    return (f"--{flag}={value}",) if value else ()


def _kind(pod: Pod) -> Command:
    """By the size's name if that implies the topology, else by family and topology."""
    accelerator = pod.accelerator
    family = accelerator.generation
    if accelerator.topology == default_topologies(family).get(accelerator.chips_per_slice):
        return (f"--accelerator-type={accelerator.libtpu_accelerator_type}",)
    return (f"--type={family.name}", f"--topology={'x'.join(map(str, accelerator.topology))}")


def shell_text(command: Sequence[str]) -> str:
    """The command as it is typed: long ones with one flag a line, the home folder as `~`."""
    line = " ".join(map(_quoted, command))
    if len(line) <= 100:
        return line
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(_quoted(word))
    return " \\\n    ".join(map(" ".join, lines))


def _quoted(word: str) -> str:
    home = os.path.expanduser("~")
    if word.startswith(home + "/"):
        # `~` must stay outside of the quotes, or the shell would not expand it.
        return "~/" + shlex.quote(word[len(home) + 1 :])
    name, equals, value = word.partition("=")
    if word.startswith("--") and equals:
        return f"{name}={shlex.quote(value)}"
    return shlex.quote(word)
