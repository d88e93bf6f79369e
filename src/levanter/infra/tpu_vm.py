"""A run on TPU VMs, start to finish: create the pod, set up its hosts, run, and start over after a preemption.

    nothing ──create──► READY ──setup──► prepared ──worker.sh──► done
       ▲  ▲                                  │
       │  └── capacity: wait, doubling each time
       └───── preempted: delete, create again (at most `retries` times)

Every gcloud command comes from `levanter.infra.gcloud`. `classify_error` classifies what gcloud prints, and
`restart_policy` decides from the exit codes of the hosts whether the run starts over.

The kinds of error (`Meaning`): *capacity*: Google has no free chips of this type now; *transient*: a failure or a rate
limit of the API that passes; *preempted*: Google reclaimed the VM; *ssh*: a host could not be reached; *not_found* and
*exists*: the name. *quota* is not retried, because a retry does not raise it. Everything else is *other* and is shown
in full. The patterns match the texts of Google's API and of gcloud that users have published.
"""

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from levanter.infra import gcloud
from levanter.infra.console import Console
from levanter.infra.errors import PEER_LOST, LaunchError
from levanter.infra.gcloud import Command
from levanter.infra.host_scripts import FOLDER, Remote
from levanter.infra.pods import Pod
from levanter.infra.restart_policy import Judgement, Outcome, judge
from levanter.infra.subprocesses import Called, Caller

HINTS = {"gcloud": "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install) and `gcloud auth login`"}
_SSH_FAILED = 255
_MOST_SECONDS = 600.0
_CHATTER = ("Using ssh batch size", "Using scp batch size", "SSH: Attempting to connect", "SCP: Attempting to connect")
_GONE = {"PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDDEN", "SUSPENDED", "SUSPENDING", "FAILED"}
_LEAVING = {"DELETING", "STOPPING", "HIDING", "SUSPENDING"}


Meaning = Literal["capacity", "quota", "transient", "preempted", "ssh", "not_found", "exists", "other"]

# Order matters: the first match wins. Specific texts come before general codes, which they may contain.
_PATTERNS: tuple[tuple[Meaning, re.Pattern[str]], ...] = (
    # A per-minute request limit is worded as a quota too, but passes by itself.
    ("transient", re.compile(r"requests per minute|RATE_LIMIT_EXCEEDED|rateLimitExceeded", re.I)),
    (
        "transient",
        re.compile(
            r"Unable to find the server|Max retries exceeded|Network is unreachable|failure in name resolution"
            r"|gcloud crashed \((?:ConnectionError|TransportError|TimeoutError|SSLError|RemoteDisconnected)"
        ),
    ),
    ("quota", re.compile(r"quota limit|quota .{0,80}(?:exceeded|exhausted)", re.I)),
    (
        "capacity",
        re.compile(
            r"no more capacity in the zone|insufficient (?:reserved )?capacity|not have enough resources available"
            r"|RESOURCE_POOL_EXHAUSTED|STOCKOUT|is currently unavailable in the",
            re.I,
        ),
    ),
    ("preempted", re.compile(r'terminal state "(?:PREEMPTED|TERMINATED)"|in state (?:PREEMPTED|TERMINATED)')),
    ("preempted", re.compile(r'This TPU has state "(?:STOPPED|STOPPING|DELETING|HIDDEN)"')),
    ("not_found", re.compile(r"NOT_FOUND|was not found|could not be found")),
    ("exists", re.compile(r"ALREADY_EXISTS|already exists", re.I)),
    (
        "ssh",
        re.compile(
            r"exited with return code \[255\]|Could not SSH into the instance|connect to host \S+ port 22"
            r"|Connection (?:timed out|refused|reset|closed)|Broken pipe|client_loop: send disconnect"
            r"|maintenance event, and is currently unavailable|unable to connect to this TPU using IAP",
            re.I,
        ),
    ),
    ("transient", re.compile(r'"code": (?:4|13|14)\b|\b(?:UNAVAILABLE|INTERNAL|DEADLINE_EXCEEDED)\b')),
    ("capacity", re.compile(r'"code": 8\b|RESOURCE_EXHAUSTED')),
)
_WORKER_CODE = re.compile(r"Command execution on worker (\d+) failed with exit status (\d+)")


def classify_error(text: str) -> Meaning:
    """Classifies the text of an error by the first pattern that matches it."""
    for meaning, pattern in _PATTERNS:
        if pattern.search(text):
            return meaning
    return "other"


def worker_codes(text: str) -> dict[int, int]:
    """The exit codes of the hosts on which a command failed, as `gcloud … ssh --worker=all` reports them."""
    return {int(worker): int(code) for worker, code in _WORKER_CODE.findall(text)}


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Numbers of retries and delays between them.

    Attributes:
        retries: restarts after a preemption or a lost host.
        create_retries: further requests after `no more capacity`.
        ssh_retries: reconnections, and repeated queries that did not get through.
        wait: seconds before the first retry; doubled for each further one, at most ten minutes.
        poll: polling interval of a queued request, in seconds.
    """

    retries: int = 10
    create_retries: int = 20
    ssh_retries: int = 10
    wait: float = 30.0
    poll: float = 30.0

    def seconds(self, times: int) -> float:
        """Seconds to wait before try number `times` (from 1)."""
        return min(self.wait * 2 ** (times - 1), _MOST_SECONDS)


class TpuVmLauncher:
    """Runs one command on a pod of TPU VMs.

    Args:
        pod: the requested slices.
        remote: what runs on its hosts.
        staged: the local folder with the scripts, the environment and the source.
        patience: the retry policy.
        console: where lines go.
        sleep: the sleep function; tests pass their own.
    """

    def __init__(
        self,
        pod: Pod,
        remote: Remote,
        staged: Path,
        *,
        console: Console,
        patience: RetryPolicy | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.pod, self.remote, self.staged = pod, remote, staged
        self.console, self.patience, self.sleep = console, patience or RetryPolicy(), sleep
        self.caller = Caller(console, HINTS)

    def run(self, *, follow: bool = True) -> Judgement:
        """Creates, sets up and runs, and starts over where that may help.

        Args:
            follow: stay until the command ends; otherwise it is only started, and never restarted.

        Raises:
            LaunchError: quota, permission, a wrong name, no capacity for too long; with gcloud's full output.
        """
        for attempt in range(1, self.patience.retries + 2):
            self.acquire()
            if not self.prepare():
                judgement = _lost("was preempted while its hosts were being set up")
            elif not follow:
                return self.start(attempt)
            else:
                self.console.say(f"attempt {attempt} on {self.pod.accelerator}")
                judgement = self.follow(attempt)
            if not judgement.again:
                return judgement
            attempts_left = self.patience.retries + 1 - attempt
            if attempts_left == 0:
                self.console.say(
                    f"attempt {attempt}: {judgement}; no attempts left (--retries {self.patience.retries})"
                )
                return judgement
            self.console.say(f"attempt {attempt}: {judgement}; {attempts_left} attempts left")
        raise AssertionError("the last attempt returns")

    def acquire(self) -> None:
        """Ensures that the pod exists: reuses the one of this name, or creates it, waiting for capacity."""
        failures = 0
        while True:
            state = self._state()
            # A name that is being deleted can be neither used nor created again.
            if state in _LEAVING:
                self.sleep(self.patience.poll)
                continue
            if state == "ACTIVE" and self._lost_a_slice():
                # A queued resource may stay ACTIVE after one of its VMs was
                # preempted; the run needs all of them.
                state = "missing one of its slices"
            elif state is not None and state not in _GONE:
                if self._wait_until_ready(state):
                    return
                state = self._state()
            if state is not None:
                self.console.say(f"{self.pod.name} is {state}: deleting it")
                self.delete()
            creation = self.caller.show(gcloud.create(self.pod))
            if creation.code == 0:
                self.console.say(f"requested {self.pod.described}")
                if self._wait_until_ready(None):
                    return
                failures = self._wait_again(failures, "preempted", f"{self.pod.name} ended before it was ready")
                continue
            meaning = classify_error(creation.text)
            # A retry changes nothing about quota, permissions or a wrong name.
            if meaning not in ("capacity", "transient", "preempted"):
                raise LaunchError(_advice(meaning, self.pod, creation.text))
            failures = self._wait_again(failures, meaning, creation.text)

    def prepare(self) -> bool:
        """Copies the folder to every host and sets it up there; False if the pod was preempted meanwhile."""
        folder, remote = self.staged, self.remote
        steps: tuple[Callable[[str], Command], ...] = (
            lambda node: gcloud.ssh(self.pod, node, f"mkdir -p -m 700 {FOLDER}"),
            lambda node: gcloud.scp(self.pod, node, folder, f"{FOLDER}/"),
            lambda node: gcloud.ssh(self.pod, node, remote.setup_call()),
        )
        for number, step in enumerate(steps):
            for tries in range(1, self.patience.ssh_retries + 2):
                failed = [called for called in self._run_on_nodes(step) if called.code != 0]
                if not failed:
                    break
                # A preempted VM looks like a failed step: the state is queried before the failure is believed.
                if self._gone():
                    return False
                text = "\n".join(called.text for called in failed)
                unreachable = any(called.code == _SSH_FAILED for called in failed) or classify_error(text) == "ssh"
                if not unreachable or tries > self.patience.ssh_retries:
                    raise LaunchError(
                        f"{self.pod.name}: step {number + 1} of {len(steps)} of the setup failed:\n{text.rstrip()}"
                    )
                self.console.say(f"a host could not be reached; retrying in {self.patience.seconds(tries):.0f} s")
                self.sleep(self.patience.seconds(tries))
        return True

    def follow(self, attempt: int, *, verb: str = "run") -> Judgement:
        """Starts the command on all hosts (unless it is running), shows their output, and judges how they ended."""
        codes: dict[tuple[str, int], int] = {}
        nodes = list(self.pod.nodes)
        for tries in range(1, self.patience.ssh_retries + 2):
            commands = [gcloud.ssh(self.pod, node, self._call(node, attempt, verb)) for node in nodes]
            dropped = []
            for node, called in zip(nodes, self._together(commands), strict=True):
                exit_codes = self._codes(called)
                if _SSH_FAILED in exit_codes.values():
                    dropped.append(node)
                # A reconnected node replaces its earlier codes, which were those of the connection.
                codes = {key: code for key, code in codes.items() if key[0] != node}
                codes.update({(node, worker): code for worker, code in exit_codes.items()})
            if not dropped:
                break
            if self._gone():
                return _lost("was preempted")
            if tries > self.patience.ssh_retries:
                return _lost("could no longer be reached")
            seconds = self.patience.seconds(tries)
            self.console.say(
                f"lost the connection to {', '.join(dropped)}, which is READY; reconnecting in {seconds:.0f} s"
            )
            self.sleep(seconds)
            # `worker.sh` of the other nodes has ended, so only the lost ones are followed again.
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
        # A VM that is being preempted first kills what runs on it.
        if judgement.kind not in ("done", "refused") and self._gone():
            return _lost("was preempted")
        return judgement

    def start(self, attempt: int) -> Judgement:
        """Starts the command on all hosts and leaves it alone.

        Raises:
            LaunchError: a host could not be reached.
        """
        called = self._run_on_nodes(lambda node: gcloud.ssh(self.pod, node, self._call(node, attempt, "start")))
        if failed := [one for one in called if one.code != 0]:
            raise LaunchError(f"{self.pod.name}: not started on every host:\n{failed[0].text.rstrip()}")
        self.console.say(f"started on {self.pod.accelerator.hosts} hosts; `logs` shows their output")
        return judge([])

    def delete(self) -> None:
        """Deletes the pod; a missing one is not an error.

        Raises:
            LaunchError: gcloud refuses.
        """
        deletion = self.caller.show(gcloud.delete(self.pod))
        if deletion.code != 0 and classify_error(deletion.text) != "not_found":
            raise LaunchError(
                f"{self.pod.name} could not be deleted, and is billed while it exists:\n{deletion.text.rstrip()}"
            )

    def _call(self, node: str, attempt: int, verb: str) -> str:
        label = f"{self.pod.nodes.index(node)}/" if self.pod.slices > 1 else ""
        return self.remote.worker_call(attempt, label, verb=verb)

    def _codes(self, called: Called) -> dict[int, int]:
        """Worker → exit code, of those that did not exit with 0."""
        if called.code == 0:
            return {}
        # Lines of the run have a prefix in brackets; only the others can be from gcloud.
        worker_output = "\n".join(line for line in called.text.splitlines() if not line.startswith("["))
        codes = worker_codes(worker_output)
        if codes:
            return codes
        # One host, or gcloud failed before it reached any.
        reached = self.pod.hosts_per_slice == 1 and "ERROR: (gcloud" not in worker_output
        return {0: called.code if reached else _SSH_FAILED}

    def _run_on_nodes(self, command: Callable[[str], Command]) -> list[Called]:
        return self._together([command(node) for node in self.pod.nodes])

    def _together(self, commands: Sequence[Command]) -> list[Called]:
        def one(command: Command) -> Called:
            return self.caller.show(command, hide=_CHATTER)

        if len(commands) == 1:
            return [one(commands[0])]
        # One thread a slice: each waits for a gcloud process that runs as long as the attempt.
        with ThreadPoolExecutor(len(commands)) as pool:
            futures = [pool.submit(one, command) for command in commands]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self.caller.stop()
                raise

    def _state(self) -> str | None:
        """The pod's state; None: there is none of this name. Transient errors are waited out."""
        for tries in range(1, self.patience.ssh_retries + 2):
            called = self.caller.capture(gcloud.state(self.pod))
            if called.code == 0:
                words = called.text.split()
                self._check_kind(words)
                return words[0] if words else "UNKNOWN"
            meaning = classify_error(called.text)
            if meaning == "not_found":
                return None
            if meaning != "transient" or tries > self.patience.ssh_retries:
                raise LaunchError(_advice(meaning, self.pod, called.text))
            seconds = self.patience.seconds(tries)
            self.console.say(f"could not query the state of {self.pod.name}; retrying in {seconds:.0f} s")
            self.sleep(seconds)
        raise AssertionError("the last try returns or raises")

    def _check_kind(self, words: Sequence[str]) -> None:
        if self.pod.queued or len(words) < 2:
            return
        kind, wanted = words[1].rsplit("/", 1)[-1], self.pod.accelerator.libtpu_accelerator_type
        # A topology that was named explicitly has no accelerator type to compare with.
        if kind != wanted and ":" not in wanted:
            raise LaunchError(
                f"{self.pod.name} exists and is a {kind}, not a {wanted}: give another --tpu_name, or delete it"
            )

    def _gone(self) -> bool:
        """Whether the pod, or one of its slices, was preempted."""
        return self._state() in (None, *_GONE) or (self.pod.queued and self._lost_a_slice())

    def _lost_a_slice(self) -> bool:
        """Whether a TPU VM of a queued resource is gone; the request itself may still be ACTIVE."""
        states = [self.caller.capture(gcloud.node_state(self.pod, node)) for node in self.pod.nodes]
        return any(
            (called.text.split() or [""])[0] in _GONE
            if called.code == 0
            else classify_error(called.text) == "not_found"
            for called in states
        )

    def _wait_until_ready(self, state: str | None) -> bool:
        """Waits until the pod is usable; False if it ended instead."""
        ready, shown = "ACTIVE" if self.pod.queued else "READY", None
        while True:
            state = self._state() if state is None else state
            if state == ready:
                self.console.say(f"{self.pod.name} is {state}")
                return True
            if state in (None, *_GONE):
                if state == "FAILED":
                    # A failed request may hide a quota or permission, which no further request would get past.
                    self._explain_failure()
                return False
            if state != shown:
                self.console.say(f"{self.pod.name} is {state}; checking every {self.patience.poll:.0f} s")
                shown = state
            self.sleep(self.patience.poll)
            state = None

    def _explain_failure(self) -> None:
        why = self.caller.capture(gcloud.reasons(self.pod)).text
        meaning = classify_error(why)
        if meaning not in ("capacity", "transient", "preempted"):
            raise LaunchError(_advice(meaning, self.pod, why))
        self.console.say(f"{self.pod.name} failed for lack of capacity")

    def _wait_again(self, failures: int, meaning: Meaning, text: str) -> int:
        failures += 1
        if failures > self.patience.create_retries:
            raise LaunchError(
                f"{self.pod.described}: still no capacity after {failures} requests (--create_retries "
                f"{self.patience.create_retries}); a queued resource (--queued) waits for its turn:\n{text.rstrip()}",
                exit_code=PEER_LOST,
            )
        seconds = self.patience.seconds(failures)
        what = {"capacity": "no capacity", "transient": "a transient error", "preempted": "preempted"}[meaning]
        self.console.say(f"{what} in {self.pod.zone}; retrying (request {failures + 1}) in {seconds:.0f} s")
        self.sleep(seconds)
        return failures


def _lost(what: str) -> Judgement:
    return Judgement(kind="lost", exit_code=PEER_LOST, reason=f"the pod {what}")


def _advice(meaning: Meaning, pod: Pod, text: str) -> str:
    """An error of gcloud in full, with its meaning if that is known."""
    advice = {
        "quota": f"quota for {pod.accelerator.generation.name} {pod.capacity} in {pod.zone} is exhausted; this "
        "is not retried: request more, or free some by deleting old queued resources (`launch list`)",
        "exists": f"{pod.name} exists already",
    }.get(meaning, f"gcloud refuses {pod.described}")
    return f"{advice}:\n{text.rstrip()}"
