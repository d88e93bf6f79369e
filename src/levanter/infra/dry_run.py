"""What a launch would do, as text: every command in order, and the scripts that are copied."""

from collections.abc import Sequence
from pathlib import Path

from levanter.infra import gcloud
from levanter.infra.environment import Environment
from levanter.infra.gcloud import shell_text
from levanter.infra.host_scripts import FOLDER, Remote
from levanter.infra.pods import Pod


def text(
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
