"""A stand-in for gcloud: an executable that records every call, keeps a little cloud in a folder, and can misbehave.

It is no gcloud: what a call does to the cloud is made up here. What it prints when something fails is what users of the
real one have published. The hosts of a TPU VM are folders: `ssh --command` really runs the command there, with that
folder as home, and `scp` really copies, so the scripts of a launch run for real.

    calls.jsonl     one line a call: its words
    cloud.json      the TPU VMs and queued resources
    rules.json      what goes wrong next, and when
    hosts/NODE/N/   the home of host N of a slice
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

QUEUE = ("WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
STOCKOUT = """\
Create request issued for: [{name}]
Waiting for operation [projects/p/locations/{zone}/operations/operation-1756107470419-63d2ba1f634f4-1870ab42-710b6c51] \
to complete...failed.
ERROR: (gcloud.compute.tpus.tpu-vm.create) {{
  "code": 8,
  "message": "There is no more capacity in the zone \\"{zone}\\"; you can try in another zone where Cloud TPU Nodes \
are offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0xe1d1ce9f2eae7a03]"
}}
"""
QUOTA = """\
ERROR: (gcloud.compute.tpus.tpu-vm.create) HTTPError 429: {{
  "error": {{
    "code": 429,
    "message": "Quota limit 'TPUV6EPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone {zone}.",
    "status": "RESOURCE_EXHAUSTED"
  }}
}}
"""
RATE = """\
ERROR: (gcloud.compute.tpus.tpu-vm.create) RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'CreateNode requests' \
and limit 'CreateNode requests per minute' of service 'tpu.googleapis.com' for consumer 'project_number:1'.
"""
DENIED = """\
ERROR: (gcloud.compute.tpus.tpu-vm.create) PERMISSION_DENIED: Permission denied on 'locations/{zone}' (or it may not \
exist). This command is authenticated as someone@example.com which is the active account specified by the \
[core/account] property.
"""
RESERVED = """\
ERROR: (gcloud.compute.tpus.tpu-vm.create) {{
  "code": 9,
  "message": "Insufficient reserved capacity. Contact customer support to increase your reservation. \
[EID: 0x2f8bc266e74261a]"
}}
"""
PREEMPTED_WHILE_MADE = """\
ERROR: (gcloud.compute.tpus.tpu-vm.create) {{
  "code": 3,
  "message": "Cloud TPU received a bad request. update is not supported while in state PREEMPTED \
[EID: 0x73013519f5b7feb2]"
}}
"""
NOT_FOUND = """\
ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource 'projects/p/locations/{zone}/nodes/{name}' was not \
found
"""
OFFLINE = """\
ERROR: (gcloud.compute.tpus.tpu-vm.describe) There was a problem refreshing your current auth tokens: Unable to find \
the server at oauth2.googleapis.com
"""
FAILED = """\
state:
  failedData:
    error:
      code: {code}
      message: {message}
  state: FAILED
  stateInitiator: SERVICE
"""
DROPPED = """\
ssh: connect to host 34.162.99.201 port 22: Connection timed out
ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255].
"""
UNUSABLE = """\
ERROR: (gcloud.compute.tpus.tpu-vm.ssh) This TPU has terminal state "PREEMPTED", so it cannot be used anymore.
"""


class StandIn:
    """The test's side: installs the executable, says what goes wrong, reads what was called.

    Args:
        folder: for everything it keeps.
        hosts: of each slice.
    """

    def __init__(self, folder: Path, *, hosts: int = 1):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir(parents=True)
        (folder / "settings.json").write_text(json.dumps({"hosts": hosts}))
        executable = self.bin / "gcloud"
        executable.write_text(
            f"#!{sys.executable} -SE\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            f"import stand_in_gcloud\nsys.exit(stand_in_gcloud.main({str(folder)!r}, sys.argv[1:]))\n"
        )
        executable.chmod(0o755)

    def rules(self, *rules: dict) -> None:
        """What goes wrong: each rule is used once (or `times`), by the first call whose words contain `match`.

        A rule has `stderr` and `code`; or `stdout`; or `states` (what a queued resource goes through); or `when` (a
        text in what the hosts print) with `drop` (the connection is lost) or `preempt` (the slice is taken back, and
        is in that state then, its queued resource in `queue`); or `pass`: it goes well.
        """
        (self.folder / "rules.json").write_text(json.dumps(rules))

    @property
    def calls(self) -> list[list[str]]:
        """The words of every call so far."""
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def verbs(self) -> list[str]:
        """The calls in short: `create`, `scp`, `ssh setup.sh`, …"""
        names = []
        for words in self.calls:
            group = [word for word in words if not word.startswith("-")]
            verb = group[group.index("tpu-vm" if "tpu-vm" in group else "queued-resources") + 1]
            command = next((word for word in words if word.startswith("--command=")), "")
            script = next((name for name in ("mkdir", "setup.sh", "worker.sh") if name in command), "")
            names.append(f"{verb} {script}".strip())
        return names

    def home(self, node: str, host: int) -> Path:
        """The home folder of a host."""
        return self.folder / "hosts" / node / str(host)

    def everything(self) -> str:
        """All calls, as one text."""
        path = self.folder / "calls.jsonl"
        return path.read_text() if path.exists() else ""


def main(folder: str, argv: list[str]) -> int:
    """The executable's side."""
    cloud = _Cloud(Path(folder))
    with cloud.locked():
        with (cloud.folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps(argv) + "\n")
        rule = cloud.rule(" ".join(argv))
    words = argv[1:] if argv[0] == "alpha" else argv
    group, verb = words[2], words[3]
    name = words[4] if len(words) > 4 and not words[4].startswith("--") else ""
    zone = _flag(words, "zone")
    if rule and "stderr" in rule:
        sys.stderr.write(rule["stderr"].format(name=name, zone=zone))
        return rule.get("code", 1)
    if rule and "stdout" in rule:
        sys.stdout.write(rule["stdout"])
        return 0
    if verb in ("ssh", "scp"):
        return cloud.ssh(name, _flag(words, "command"), rule) if verb == "ssh" else cloud.scp(words)
    with cloud.locked():
        return cloud.manage(group, verb, name, words, (rule or {}).get("states", QUEUE))


def _flag(words: list[str], name: str) -> str:
    return next((word.partition("=")[2] for word in words if word.startswith(f"--{name}=")), "")


class _Cloud:
    def __init__(self, folder: Path):
        self.folder = folder
        self.hosts = json.loads((folder / "settings.json").read_text())["hosts"]

    def locked(self):
        return _Lock(self.folder / "lock")

    def _read(self, name: str, default):
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else default

    def rule(self, text: str) -> dict | None:
        rules = self._read("rules.json", [])
        for rule in rules:
            if rule["match"] in text and rule.get("times", 1) > 0:
                rule["times"] = rule.get("times", 1) - 1
                (self.folder / "rules.json").write_text(json.dumps(rules))
                return rule
        return None

    def save(self, cloud: dict) -> None:
        (self.folder / "cloud.json").write_text(json.dumps(cloud))

    def manage(self, group: str, verb: str, name: str, words: list[str], states: list[str]) -> int:
        cloud = self._read("cloud.json", {"nodes": {}, "queued": {}})
        nodes, queued = cloud["nodes"], cloud["queued"]
        kind = _flag(words, "accelerator-type") or f"{_flag(words, 'type')}-?"
        if verb == "list":
            for node, value in (nodes if group == "tpu-vm" else queued).items():
                sys.stdout.write(f"{node}  {value}\n")
        elif verb == "describe":
            known = nodes if group == "tpu-vm" else queued
            if name not in known:
                sys.stderr.write(NOT_FOUND.format(name=name, zone=_flag(words, "zone")))
                return 1
            value = known[name]
            if group == "tpu-vm":
                sys.stdout.write(f"{value['state']}\t{value['kind']}\n")
            else:
                sys.stdout.write(value["states"][0] + "\n")
                if len(value["states"]) > 1:
                    value["states"].pop(0)
        elif verb == "create" and name in (nodes if group == "tpu-vm" else queued):
            sys.stderr.write(f"ERROR: (gcloud.compute.tpus.{group}.create) ALREADY_EXISTS: Resource already exists.\n")
            return 1
        elif verb == "create" and group == "tpu-vm":
            nodes[name] = {"state": "READY", "kind": kind}
            sys.stderr.write(f"Created tpu [{name}].\n")
        elif verb == "create":
            count = int(_flag(words, "node-count") or 1)
            made = [f"{name}-{index}" for index in range(count)] if count > 1 else [_flag(words, "node-id")]
            queued[name] = {"states": list(states), "nodes": made}
            nodes.update({node: {"state": "READY", "kind": kind} for node in made})
        elif verb == "delete":
            gone = queued.pop(name)["nodes"] if group == "queued-resources" else [name]
            for node in gone:
                nodes.pop(node, None)
                shutil.rmtree(self.folder / "hosts" / node, ignore_errors=True)
        else:
            sys.stderr.write(f"ERROR: (gcloud) Invalid choice: {verb!r}\n")
            return 2
        self.save(cloud)
        return 0

    def _home(self, node: str, host: int) -> Path:
        home = self.folder / "hosts" / node / str(host)
        home.mkdir(parents=True, exist_ok=True)
        return home

    def _state(self, node: str) -> str:
        with self.locked():
            return self._read("cloud.json", {"nodes": {}})["nodes"].get(node, {}).get("state", "")

    def scp(self, words: list[str]) -> int:
        source, (node, _, to) = Path(words[4]), words[5].partition(":")
        if self._state(node) != "READY":
            sys.stderr.write(UNUSABLE)
            return 1
        for host in range(self.hosts):
            # copytree keeps modes, as scp does.
            shutil.copytree(source, self._home(node, host) / to / source.name, dirs_exist_ok=True)
        return 0

    def ssh(self, node: str, command: str, rule: dict | None) -> int:
        if self._state(node) != "READY":
            sys.stderr.write(UNUSABLE)
            return 1
        lock = threading.Lock()
        hit = threading.Event()
        codes = [0] * self.hosts
        running: list[subprocess.Popen] = []

        def host(index: int) -> None:
            home = self._home(node, index)
            tools = self._tools(home, index)
            environment = {"HOME": str(home), "PATH": f"{tools}:{os.path.dirname(sys.executable)}:/usr/bin:/bin"}
            with lock:
                process = subprocess.Popen(
                    ["bash", "-c", command], cwd=home, env=environment, text=True, stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
                running.append(process)
            assert process.stdout is not None
            for line in process.stdout:
                with lock:
                    sys.stdout.write(line)
                    sys.stdout.flush()
                if rule and rule["when"] in line and not hit.is_set():
                    hit.set()
                    if "preempt" in rule:
                        self._take_back(node, rule["preempt"], queue=rule.get("queue", "SUSPENDED"))
                    # The connections are gone, and with them the shells at their other ends.
                    for other in running:
                        os.killpg(other.pid, signal.SIGKILL)
            codes[index] = process.wait()

        sys.stderr.write(f"Using ssh batch size of {self.hosts}. Attempting to SSH into 1 nodes.\n")
        threads = [threading.Thread(target=host, args=(index,)) for index in range(self.hosts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if hit.is_set():
            sys.stderr.write(DROPPED)
            return 255
        for index, code in enumerate(codes):
            if code and self.hosts > 1:
                sys.stderr.write(
                    f"##### Command execution on worker {index} failed with exit status {code}. Continuing.\n"
                )
        return next((code for code in codes if code), 0)

    def _take_back(self, node: str, state: str, *, queue: str) -> None:
        with self.locked():
            cloud = self._read("cloud.json", {})
            cloud["nodes"][node]["state"] = state
            for value in cloud["queued"].values():
                if node in value["nodes"]:
                    value["states"] = [queue]
            self.save(cloud)
        for pid in (self.folder / "hosts" / node).glob("*/.levanter/*/attempt-*/pid"):
            try:
                os.killpg(int(pid.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _tools(self, home: Path, index: int) -> Path:
        """What the hosts have: a name, a `uv` that installs nothing, a `docker` that contains nothing."""
        tools = home / "bin"
        if not tools.exists():
            tools.mkdir()
            for name, text in (
                ("hostname", f"echo t1v-n-0a1b2c3d-w-{index}\n"),
                ("sudo", 'exec "$@"\n'),
                # A host has a gcloud of its own; the real one, if there is one here, must not be reached either.
                ("gcloud", 'echo "gcloud $@" >>"$HOME/docker.log"\n'),
                (
                    "docker",
                    'echo "docker $1" >>"$HOME/docker.log"\n'
                    '[ "$1" = run ] || exit 0\n'
                    "shift\n"
                    "while true; do case $1 in\n"
                    '    --env-file) while IFS= read -r line; do export "$line"; done <"$2"; shift 2 ;;\n'
                    "    --name | -v) shift 2 ;;\n"
                    "    -*) shift ;;\n"
                    "    *) break ;;\n"
                    "esac; done\n"
                    'export IMAGE=$1; shift; exec "$@"\n',
                ),
                (
                    "uv",
                    'echo "$@" >>"$HOME/uv.log"\n'
                    '[ "$1" != venv ] || { mkdir -p venv/bin; ln -s "$(command -v python)" venv/bin/python; }\n',
                ),
            ):
                (tools / name).write_text(f"#!/usr/bin/env bash\n{text}")
                (tools / name).chmod(0o755)
        return tools


class _Lock:
    def __init__(self, path: Path):
        self._path = path

    def __enter__(self):
        self._file = self._path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_):
        self._file.close()
