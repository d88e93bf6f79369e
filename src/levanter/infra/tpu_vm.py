"""A run on TPU VMs, from nothing to its end: acquire the pod, prepare its hosts, run, and again after a preemption.

    nothing ──create──► READY ──setup──► prepared ──worker.sh──► done
       ▲  ▲                                  │
       │  └── capacity: wait, twice as long each time
       └───── preempted: delete, create again (at most `retries` times)

Every gcloud command comes from `levanter.infra.gcloud`. What gcloud says is read by `gcloud_errors`; what the hosts'
processes end with is judged by `outcomes`.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from levanter.infra import gcloud
from levanter.infra.caller import Called, Caller
from levanter.infra.console import Console
from levanter.infra.errors import PEER_LOST, LaunchError
from levanter.infra.gcloud import Command
from levanter.infra.gcloud_errors import Meaning, meaning_of, worker_codes
from levanter.infra.outcomes import Judgement, Outcome, judge
from levanter.infra.pods import Pod
from levanter.infra.remote import FOLDER, Remote

HINTS = {"gcloud": "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install) and `gcloud auth login`"}
_SSH_FAILED = 255
_MOST_SECONDS = 600.0
_CHATTER = ("Using ssh batch size", "Using scp batch size", "SSH: Attempting to connect", "SCP: Attempting to connect")
_GONE = {"PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDDEN", "SUSPENDED", "SUSPENDING", "FAILED"}
_LEAVING = {"DELETING", "STOPPING", "HIDING", "SUSPENDING"}


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often and how long something is tried again.

    Attributes:
        retries: further attempts after a preemption or a lost host.
        create_retries: further requests after `no more capacity`.
        ssh_retries: further connections after a dropped one, and questions that could not be asked.
        wait: seconds before the second try; twice as many before each further one, at most ten minutes.
        poll: seconds between looks at a queued request.
    """

    retries: int = 10
    create_retries: int = 20
    ssh_retries: int = 10
    wait: float = 30.0
    poll: float = 30.0

    def seconds(self, times: int) -> float:
        """How long to wait before try number `times` (from 1)."""
        return min(self.wait * 2 ** (times - 1), _MOST_SECONDS)


class TpuVmLauncher:
    """Runs one command on a pod of TPU VMs.

    Args:
        pod: what is asked for.
        remote: what runs on its hosts.
        staged: the local folder with the scripts, the environment and the source.
        patience: how often something is tried again.
        console: where lines go.
        sleep: waits; a test passes its own.
    """

    def __init__(
        self,
        pod: Pod,
        remote: Remote,
        staged: Path,
        *,
        console: Console,
        patience: Patience | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.pod, self.remote, self.staged = pod, remote, staged
        self.console, self.patience, self.sleep = console, patience or Patience(), sleep
        self.caller = Caller(console, HINTS)

    def run(self, *, follow: bool = True) -> Judgement:
        """Acquires, prepares and runs, again after what is worth another start.

        Args:
            follow: stay until the command ends; otherwise it is only started, and nothing is tried again.

        Raises:
            LaunchError: quota, permission, a wrong name, no capacity for long: with all that gcloud said.
        """
        for attempt in range(1, self.patience.retries + 2):
            self.acquire()
            if not self.prepare():
                judgement = _lost("was taken back while its hosts were prepared")
            elif not follow:
                return self.start(attempt)
            else:
                self.console.say(f"attempt {attempt} on {self.pod.accelerator}")
                judgement = self.follow(attempt)
            if not judgement.again:
                return judgement
            left = self.patience.retries + 1 - attempt
            if left == 0:
                self.console.say(
                    f"attempt {attempt}: {judgement}; no attempts are left (--retries {self.patience.retries})"
                )
                return judgement
            self.console.say(f"attempt {attempt}: {judgement}; {left} attempts are left")
        raise AssertionError("the last attempt returns")

    def acquire(self) -> None:
        """Sees to it that the pod is there: takes the one of this name, or creates it, waiting for capacity."""
        failures = 0
        while True:
            state = self._state()
            if state in _LEAVING:
                self.sleep(self.patience.poll)
                continue
            if state == "ACTIVE" and self._lost_a_slice():
                state = "without one of its slices"
            elif state is not None and state not in _GONE:
                if self._wait_until_ready(state):
                    return
                state = self._state()
            if state is not None:
                self.console.say(f"{self.pod.name} is {state}: deleting it")
                self.delete()
            made = self.caller.show(gcloud.create(self.pod))
            if made.code == 0:
                self.console.say(f"asked for {self.pod.described}")
                if self._wait_until_ready(None):
                    return
                failures = self._wait_again(failures, "preempted", f"{self.pod.name} ended before it was ready")
                continue
            meaning = meaning_of(made.text)
            if meaning not in ("capacity", "transient", "preempted"):
                raise LaunchError(_advice(meaning, self.pod, made.text))
            failures = self._wait_again(failures, meaning, made.text)

    def prepare(self) -> bool:
        """Copies the folder to every host and sets it up there; False where the pod was taken back meanwhile."""
        folder, remote = self.staged, self.remote
        steps: tuple[Callable[[str], Command], ...] = (
            lambda node: gcloud.ssh(self.pod, node, f"mkdir -p -m 700 {FOLDER}"),
            lambda node: gcloud.scp(self.pod, node, folder, f"{FOLDER}/"),
            lambda node: gcloud.ssh(self.pod, node, remote.setup_call()),
        )
        for number, step in enumerate(steps):
            for tries in range(1, self.patience.ssh_retries + 2):
                failed = [called for called in self._each_node(step) if called.code != 0]
                if not failed:
                    break
                if self._gone():
                    return False
                text = "\n".join(called.text for called in failed)
                unreachable = any(called.code == _SSH_FAILED for called in failed) or meaning_of(text) == "ssh"
                if not unreachable or tries > self.patience.ssh_retries:
                    raise LaunchError(
                        f"{self.pod.name}: step {number + 1} of {len(steps)} of the set-up failed:\n{text.rstrip()}"
                    )
                self.console.say(f"a host could not be reached; again in {self.patience.seconds(tries):.0f} s")
                self.sleep(self.patience.seconds(tries))
        return True

    def follow(self, attempt: int, *, verb: str = "run") -> Judgement:
        """Starts the command on all hosts (where it is not running), shows what they print, and judges their ends."""
        codes: dict[tuple[str, int], int] = {}
        nodes = list(self.pod.nodes)
        for tries in range(1, self.patience.ssh_retries + 2):
            commands = [gcloud.ssh(self.pod, node, self._call(node, attempt, verb)) for node in nodes]
            dropped = []
            for node, called in zip(nodes, self._together(commands), strict=True):
                found = self._codes(called)
                if _SSH_FAILED in found.values():
                    dropped.append(node)
                codes = {key: code for key, code in codes.items() if key[0] != node}
                codes.update({(node, worker): code for worker, code in found.items()})
            if not dropped:
                break
            if self._gone():
                return _lost("was taken back")
            if tries > self.patience.ssh_retries:
                return _lost("could not be reached any more")
            seconds = self.patience.seconds(tries)
            self.console.say(f"lost the connection to {', '.join(dropped)}, which is READY; again in {seconds:.0f} s")
            self.sleep(seconds)
            nodes = dropped
        workers = self.pod.hosts_per_slice
        outcomes = [
            Outcome(
                process=index * workers + worker,
                code=codes.get((node, worker), 0),
                where=f"{node}, worker {worker}" if self.pod.accelerator.hosts > 1 else node,
            )
            for index, node in enumerate(self.pod.nodes)
            for worker in range(workers)
        ]
        judgement = judge(outcomes)
        # A VM that is being taken back first kills what runs on it.
        if judgement.kind not in ("done", "refused") and self._gone():
            return _lost("was taken back")
        return judgement

    def start(self, attempt: int) -> Judgement:
        """Starts the command on all hosts and leaves it alone.

        Raises:
            LaunchError: a host could not be reached.
        """
        called = self._each_node(lambda node: gcloud.ssh(self.pod, node, self._call(node, attempt, "start")))
        if failed := [one for one in called if one.code != 0]:
            raise LaunchError(f"{self.pod.name}: not started on every host:\n{failed[0].text.rstrip()}")
        self.console.say(f"started on {self.pod.accelerator.hosts} hosts; `logs` shows what they print")
        return judge([])

    def delete(self) -> None:
        """Deletes the pod; one that is not there is no error.

        Raises:
            LaunchError: gcloud refuses.
        """
        done = self.caller.show(gcloud.delete(self.pod))
        if done.code != 0 and meaning_of(done.text) != "not_found":
            raise LaunchError(
                f"{self.pod.name} could not be deleted, and is billed while it exists:\n{done.text.rstrip()}"
            )

    def _call(self, node: str, attempt: int, verb: str) -> str:
        label = f"{self.pod.nodes.index(node)}/" if self.pod.slices > 1 else ""
        return self.remote.worker_call(attempt, label, verb=verb)

    def _codes(self, called: Called) -> dict[int, int]:
        """Worker → exit code, of those that did not end with 0."""
        if called.code == 0:
            return {}
        own_words = "\n".join(line for line in called.text.splitlines() if not line.startswith("["))
        found = worker_codes(own_words)
        if found:
            return found
        # One host, or gcloud failed before it reached any.
        reached = self.pod.hosts_per_slice == 1 and "ERROR: (gcloud" not in own_words
        return {0: called.code if reached else _SSH_FAILED}

    def _each_node(self, command: Callable[[str], Command]) -> list[Called]:
        return self._together([command(node) for node in self.pod.nodes])

    def _together(self, commands: Sequence[Command]) -> list[Called]:
        def one(command: Command) -> Called:
            return self.caller.show(command, hide=_CHATTER)

        if len(commands) == 1:
            return [one(commands[0])]
        with ThreadPoolExecutor(len(commands)) as pool:
            futures = [pool.submit(one, command) for command in commands]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self.caller.stop()
                raise

    def _state(self) -> str | None:
        """The pod's state; None: there is none of this name. What passes by itself is waited for."""
        for tries in range(1, self.patience.ssh_retries + 2):
            called = self.caller.capture(gcloud.state(self.pod))
            if called.code == 0:
                words = called.text.split()
                self._check_kind(words)
                return words[0] if words else "UNKNOWN"
            meaning = meaning_of(called.text)
            if meaning == "not_found":
                return None
            if meaning != "transient" or tries > self.patience.ssh_retries:
                raise LaunchError(_advice(meaning, self.pod, called.text))
            seconds = self.patience.seconds(tries)
            self.console.say(f"Google could not be asked about {self.pod.name}; again in {seconds:.0f} s")
            self.sleep(seconds)
        raise AssertionError("the last try returns or raises")

    def _check_kind(self, words: Sequence[str]) -> None:
        if self.pod.queued or len(words) < 2:
            return
        kind, wanted = words[1].rsplit("/", 1)[-1], self.pod.accelerator.libtpu_accelerator_type
        if kind != wanted and ":" not in wanted:
            raise LaunchError(
                f"{self.pod.name} exists and is a {kind}, not a {wanted}: give another --tpu_name, or delete it"
            )

    def _gone(self) -> bool:
        """Whether the pod, or one of its slices, was taken back."""
        return self._state() in (None, *_GONE) or (self.pod.queued and self._lost_a_slice())

    def _lost_a_slice(self) -> bool:
        """Whether a TPU VM of a queued resource is no more; the request itself may still be called active."""
        states = [self.caller.capture(gcloud.node_state(self.pod, node)) for node in self.pod.nodes]
        return any(
            (called.text.split() or [""])[0] in _GONE if called.code == 0 else meaning_of(called.text) == "not_found"
            for called in states
        )

    def _wait_until_ready(self, state: str | None) -> bool:
        """Waits until the pod can be used; False where it ended otherwise."""
        ready, shown = "ACTIVE" if self.pod.queued else "READY", None
        while True:
            state = self._state() if state is None else state
            if state == ready:
                self.console.say(f"{self.pod.name} is {state}")
                return True
            if state in (None, *_GONE):
                if state == "FAILED":
                    self._explain_failure()
                return False
            if state != shown:
                self.console.say(f"{self.pod.name} is {state}; looking every {self.patience.poll:.0f} s")
                shown = state
            self.sleep(self.patience.poll)
            state = None

    def _explain_failure(self) -> None:
        why = self.caller.capture(gcloud.reasons(self.pod)).text
        meaning = meaning_of(why)
        if meaning not in ("capacity", "transient", "preempted"):
            raise LaunchError(_advice(meaning, self.pod, why))
        self.console.say(f"{self.pod.name} failed for want of capacity")

    def _wait_again(self, failures: int, meaning: Meaning, text: str) -> int:
        failures += 1
        if failures > self.patience.create_retries:
            raise LaunchError(
                f"{self.pod.described}: still no capacity after {failures} requests (--create_retries "
                f"{self.patience.create_retries}); a queued resource (--queued) waits for its turn:\n{text.rstrip()}",
                exit_code=PEER_LOST,
            )
        seconds = self.patience.seconds(failures)
        what = {"capacity": "no capacity", "transient": "a passing error", "preempted": "taken back"}[meaning]
        self.console.say(f"{what} in {self.pod.zone}; request {failures + 1} in {seconds:.0f} s")
        self.sleep(seconds)
        return failures


def _lost(what: str) -> Judgement:
    return Judgement(kind="lost", exit_code=PEER_LOST, reason=f"the pod {what}")


def _advice(meaning: Meaning, pod: Pod, text: str) -> str:
    """An error of gcloud, whole, with what it means where that is known."""
    advice = {
        "quota": f"quota for {pod.accelerator.generation.name} {pod.capacity} in {pod.zone} does not suffice; it "
        "is not retried: only a person can raise it, and deleting old queued resources (`launch list`) frees some",
        "exists": f"{pod.name} exists already",
    }.get(meaning, f"gcloud refuses {pod.described}")
    return f"{advice}:\n{text.rstrip()}"
