"""The launcher against a stand-in for gcloud (no cloud, no gcloud): the scripts on the hosts run for real."""

import os
import stat
import sys
import tarfile
from pathlib import Path

import pytest
from helpers import stand_in_gcloud as recorded
from helpers.stand_in_gcloud import StandIn

from levanter.infra.host_scripts import like_here
from levanter.infra.launch import main

ZONE = "us-east5-b"
POD = ("--tpu_name", "books", "--tpu_type", "v6e-4", "--zone", ZONE)
AT_ONCE = ("--plan_first=false", "--retry_seconds", "0", "--poll_seconds", "0", "--run_id", "r1")
READY = ["describe", "create", "describe"]
SETUP = ["ssh mkdir", "scp", "ssh setup.sh"]
TAKEN_BACK = {"match": "worker.sh", "when": "step 2", "preempt": "PREEMPTED"}


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a stand-in with so many hosts a slice."""

    def made(hosts: int = 1) -> StandIn:
        stand_in = StandIn(tmp_path / "cloud", hosts=hosts)
        monkeypatch.setenv("PATH", f"{stand_in.bin}:{os.environ['PATH']}")
        return stand_in

    return made


def launch(*flags: str, run: str, tpu: str = "v6e-4") -> int:
    """Launches some Python on a pod; nothing waits."""
    return main([*POD[:2], "--tpu_type", tpu, *POD[4:], *AT_ONCE, "--setup", "none", *flags, "--", "python", "-c", run])


STEPS = "import time\nfor step in range(4):\n    print('step', step, flush=True)\n    time.sleep(0.4)"


def test_stand_in_success_on_four_hosts(cloud, capsys):
    stand_in = cloud(hosts=4)
    assert launch(run="import os; print('hello', os.environ['RUN_ID'])", tpu="v4-32") == 0
    assert stand_in.verbs() == [*READY, *SETUP, "ssh worker.sh"]
    shown = capsys.readouterr()
    assert sorted(line for line in shown.out.splitlines() if "hello" in line) == [f"[{n}] hello r1" for n in range(4)]
    assert "launch: done" in shown.err
    assert "delete --tpu_name books --zone us-east5-b" in shown.err, "an idle pod is billed; it says how to end that"


def test_stand_in_autodelete(cloud):
    stand_in = cloud()
    assert launch("--autodelete", run="pass") == 0
    assert stand_in.verbs()[-1] == "delete"


def test_stand_in_stockout_is_asked_again_with_backoff(cloud, capsys):
    stand_in = cloud()
    stand_in.rules(
        {"match": "tpu-vm create", "times": 2, "stderr": recorded.STOCKOUT},
        {"match": "tpu-vm create", "stderr": recorded.RATE},
    )
    assert launch(run="pass") == 0
    assert stand_in.verbs().count("create") == 4
    assert capsys.readouterr().err.count("no capacity in us-east5-b") == 2


def test_stand_in_stockout_ends_some_time(cloud, capsys):
    stand_in = cloud()
    stand_in.rules({"match": "tpu-vm create", "times": 9, "stderr": recorded.STOCKOUT})
    assert launch("--create_retries", "2", run="pass") == 5
    assert stand_in.verbs().count("create") == 3
    assert "There is no more capacity in the zone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"), [(recorded.QUOTA, "quota for v6e spot"), (recorded.DENIED, "gcloud refuses")]
)
def test_stand_in_quota_and_permission_are_shown_whole_and_not_retried(cloud, capsys, text, says):
    stand_in = cloud()
    stand_in.rules({"match": "tpu-vm create", "times": 9, "stderr": text})
    assert launch("--spot", run="pass") == 2
    assert stand_in.verbs() == ["describe", "create"]
    shown = capsys.readouterr().err
    assert says in shown and text.format(zone=ZONE, name="books").strip() in shown


def test_stand_in_preempted_in_the_middle_is_run_again(cloud, capsys):
    stand_in = cloud(hosts=2)
    stand_in.rules(TAKEN_BACK)
    assert launch("--spot", run=STEPS, tpu="v4-16") == 0
    verbs = stand_in.verbs()
    assert verbs.count("create") == 2 and verbs.count("delete") == 1 and verbs.count("ssh worker.sh") == 2
    assert verbs.index("delete") > verbs.index("ssh worker.sh")
    shown = capsys.readouterr()
    assert "attempt 1: lost: the pod was preempted; 10 attempts left" in shown.err
    assert "[1] step 3" in shown.out and "launch: done" in shown.err


@pytest.mark.slow
def test_stand_in_preempted_too_often(cloud, capsys):
    stand_in = cloud()
    stand_in.rules(TAKEN_BACK | {"times": 5})
    assert launch("--retries", "1", run=STEPS) == 5
    assert stand_in.verbs().count("create") == 2
    assert "attempt 2: lost: the pod was preempted; no attempts left" in capsys.readouterr().err


def test_stand_in_a_dropped_connection_is_taken_up_again(cloud, capsys, tmp_path):
    stand_in = cloud()
    stand_in.rules({"match": "worker.sh", "when": "step 1", "drop": True})
    assert launch(run=f"open({str(tmp_path / 'started')!r}, 'a').write('x')\n{STEPS}") == 0
    assert (tmp_path / "started").read_text() == "x", "the run went on by itself and was not started again"
    verbs = stand_in.verbs()
    assert verbs.count("ssh worker.sh") == 2 and verbs.count("create") == 1
    shown = capsys.readouterr()
    assert "lost the connection to books, which is READY" in shown.err and "[0] step 3" in shown.out


def test_stand_in_a_laptop_without_network_for_a_while(cloud, capsys):
    """The log breaks off, and nobody can tell what the pod's state is."""
    stand_in = cloud()
    stand_in.rules(
        {"match": "worker.sh", "when": "step 1", "drop": True},
        # The first two questions are those of the beginning.
        {"match": "describe", "times": 2, "pass": True},
        {"match": "describe", "times": 2, "stderr": recorded.OFFLINE},
    )
    assert launch(run=STEPS) == 0
    verbs = stand_in.verbs()
    assert verbs.count("ssh worker.sh") == 2 and verbs.count("create") == 1
    assert capsys.readouterr().err.count("could not query the state of books") == 2


def test_stand_in_ssh_that_fails_while_preparing_is_tried_again(cloud):
    stand_in = cloud()
    stand_in.rules({"match": "mkdir", "times": 2, "stderr": recorded.DROPPED, "code": 255})
    assert launch(run="pass") == 0
    assert stand_in.verbs()[len(READY) :] == ["ssh mkdir", "describe", "ssh mkdir", "describe", *SETUP, "ssh worker.sh"]


@pytest.mark.parametrize(("run", "code"), [("raise SystemExit(2)", 2), ("raise ValueError('a bug')", 1)])
def test_stand_in_an_error_of_the_run_ends_the_launch(cloud, capsys, run, code):
    stand_in = cloud(hosts=2)
    # The other host misses its peer.
    run = f"import socket, subprocess, sys\nif subprocess.getoutput('hostname').endswith('0'): sys.exit(5)\n{run}"
    assert launch(run=run, tpu="v4-16") == code
    assert stand_in.verbs().count("ssh worker.sh") == 1
    shown = capsys.readouterr()
    assert "process 1 on books, worker 1: exit code" in shown.err
    assert code == 2 or "[1] ValueError: a bug" in shown.out


@pytest.mark.slow
def test_stand_in_a_run_that_saved_is_started_again_on_the_same_pod(cloud, tmp_path):
    stand_in = cloud()
    once = tmp_path / "once"
    assert (
        launch(run=f"import os, sys\nif not os.path.exists({str(once)!r}): open({str(once)!r}, 'w'); sys.exit(75)") == 0
    )
    assert stand_in.verbs().count("create") == 1 and stand_in.verbs().count("ssh worker.sh") == 2


def test_stand_in_a_pod_that_is_there_is_taken_and_one_that_was_preempted_is_not(cloud):
    stand_in = cloud()
    (stand_in.folder / "cloud.json").write_text(
        '{"nodes": {"books": {"state": "READY", "kind": "v6e-4"}}, "queued": {}}'
    )
    assert launch(run="pass") == 0
    assert "create" not in stand_in.verbs()
    (stand_in.folder / "cloud.json").write_text(
        '{"nodes": {"books": {"state": "PREEMPTED", "kind": "v6e-4"}}, "queued": {}}'
    )
    assert launch(run="pass") == 0
    again = stand_in.verbs()
    assert again[again.index("delete") + 1] == "create"


def test_stand_in_another_pod_of_that_name_is_left_alone(cloud, capsys):
    stand_in = cloud()
    (stand_in.folder / "cloud.json").write_text(
        '{"nodes": {"books": {"state": "READY", "kind": "v4-8"}}, "queued": {}}'
    )
    assert launch(run="pass") == 2
    assert stand_in.verbs() == ["describe"] and "books exists and is a v4-8, not a v6e-4" in capsys.readouterr().err


def test_stand_in_two_slices_through_a_queued_resource(cloud, capsys):
    stand_in = cloud(hosts=2)
    assert launch("--spot", run="print('here')", tpu="2xv4-16") == 0
    create = next(words for words in stand_in.calls if "create" in words)
    assert "queued-resources" in create and "--node-count=2" in create and "--spot" in create
    shown = capsys.readouterr()
    lines = sorted(line for line in shown.out.splitlines() if "here" in line)
    assert lines == ["[0/0] here", "[0/1] here", "[1/0] here", "[1/1] here"]
    assert "books is WAITING_FOR_RESOURCES" in shown.err and "--queued" in shown.err


QUOTA_MESSAGE = "Quota limit 'TPUV6EPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone us-east5-b."


@pytest.mark.parametrize(
    ("failed", "code", "creates"),
    [
        (recorded.FAILED.format(code=8, message='There is no more capacity in the zone "us-east5-b"'), 0, 2),
        (recorded.FAILED.format(code=8, message=QUOTA_MESSAGE), 2, 1),
    ],
)
def test_stand_in_a_queued_request_that_failed(cloud, capsys, failed, code, creates):
    stand_in = cloud()
    stand_in.rules(
        {"match": "queued-resources create", "states": ["WAITING_FOR_RESOURCES", "FAILED"]},
        {"match": "yaml(state)", "stdout": failed},
    )
    assert launch("--queued", run="pass") == code
    assert stand_in.verbs().count("create") == creates
    shown = capsys.readouterr().err
    assert "failed for lack of capacity" in shown if code == 0 else QUOTA_MESSAGE in shown


def test_stand_in_a_queued_request_that_was_suspended_while_waiting(cloud):
    stand_in = cloud()
    stand_in.rules({"match": "queued-resources create", "states": ["PROVISIONING", "SUSPENDING", "SUSPENDED"]})
    assert launch("--queued", run="pass") == 0
    verbs = stand_in.verbs()
    assert verbs.count("create") == 2 and verbs.index("delete") < len(verbs) - verbs[::-1].index("create")


@pytest.mark.slow
@pytest.mark.parametrize("queue", ["SUSPENDED", "ACTIVE"])
def test_stand_in_one_of_two_slices_taken_back(cloud, queue):
    stand_in = cloud()
    stand_in.rules({"match": "worker.sh 1 run 1/", "when": "step 2", "preempt": "PREEMPTED", "queue": queue})
    assert launch(run=STEPS, tpu="2xv6e-4") == 0
    assert stand_in.verbs().count("create") == 2 and stand_in.verbs().count("delete") == 1


def test_stand_in_detached_and_its_log(cloud, capsys):
    stand_in = cloud()
    assert launch("--foreground=false", run="print('quiet work')") == 0
    assert "quiet work" not in capsys.readouterr().out
    assert main(["logs", *POD]) == 0
    assert "[0] quiet work" in capsys.readouterr().out
    assert main(["exec", *POD, "--", "echo", "pong"]) == 0
    assert "pong" in capsys.readouterr().out
    assert main(["list", "--zone", ZONE]) == 0
    assert "books" in capsys.readouterr().out
    assert main(["delete", "--tpu_name", "books", "--zone", ZONE]) == 0
    assert stand_in.verbs()[-1] == "delete"


def test_stand_in_secrets_travel_in_a_file_only(cloud, capsys, monkeypatch, tmp_path, nothing_real):
    stand_in = cloud(hosts=2)
    secrets = {"WANDB_API_KEY": "wandb-f00dfeed" * 3, "HF_TOKEN": "hf_s3cr3ts3cr3t", "MY_PASSWORD": "open sesame $x"}
    monkeypatch.setenv("WANDB_API_KEY", secrets["WANDB_API_KEY"])
    (tmp_path / "more.env").write_text(f"HF_TOKEN={secrets['HF_TOKEN']}\nMY_PASSWORD={secrets['MY_PASSWORD']}\n")
    stand_in.rules(TAKEN_BACK)
    # The run prints what it was given, as careless programs do.
    names = tuple(secrets)
    run = f"import os\nprint([os.environ[n] for n in {names}], sorted(os.environ) == [], flush=True)\n{STEPS}"
    assert launch("--env_file", str(tmp_path / "more.env"), "-e", "PLAIN=shown", run=run, tpu="v4-16") == 0
    shown = capsys.readouterr()
    everywhere = stand_in.everything() + shown.out + shown.err
    for name, value in secrets.items():
        assert value not in everywhere, f"{name} is in a command or a log"
    assert "['***', '***', '***']" in shown.out, "the run had all of them"
    folder = stand_in.home("books", 1) / ".levanter" / "r1"
    assert stat.S_IMODE((folder / "environment").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert set(secrets) < {line.partition("=")[0] for line in (folder / "environment").read_text().splitlines()}
    left = [path for path in nothing_real.rglob("*") if path.is_file()]
    assert left == [], "nothing is left on the machine that launched"


def test_stand_in_a_secret_in_the_command_is_refused(cloud, capsys, monkeypatch):
    stand_in = cloud()
    monkeypatch.setenv("HF_TOKEN", "hf_s3cr3ts3cr3t")
    assert launch(run="login('hf_s3cr3ts3cr3t')") == 2
    assert stand_in.calls == [] and "hf_s3cr3t" not in capsys.readouterr().err


def test_stand_in_the_working_tree_is_installed(cloud, monkeypatch, tmp_path):
    stand_in = cloud()
    tree = tmp_path / "tree"
    (tree / "config").mkdir(parents=True)
    (tree / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (tree / "config" / "run.yaml").write_text("a: 1\n")
    (tree / ".env").write_text("HF_TOKEN=hf_inthetree\n")
    (tree / "big.bin").write_text("ignored")
    (tree / ".gitignore").write_text("*.bin\n")
    os.system(f"git -C {tree} init -q && git -C {tree} add pyproject.toml")
    monkeypatch.chdir(tree)
    code = main([*POD, *AT_ONCE, "--", "python", "-c", "print(open('config/run.yaml').read())"])
    assert code == 0
    home = stand_in.home("books", 0)
    with tarfile.open(home / ".levanter" / "r1" / "source.tar.gz") as archive:
        assert archive.getnames() == [".gitignore", "config/run.yaml", "pyproject.toml"]
    python, (jax,) = like_here()
    assert (home / "uv.log").read_text().splitlines() == [
        f"venv --quiet --python {python} venv",
        f"pip install --quiet --python venv/bin/python -e source[tpu,remote] {jax}",
    ]


def test_stand_in_a_container(cloud, capsys, monkeypatch):
    stand_in = cloud()
    monkeypatch.setenv("HF_TOKEN", "hf_s3cr3ts3cr3t")
    run = "import os; print(os.environ['IMAGE'], os.environ['HF_TOKEN'], os.environ['RUN_ID'])"
    image = "us-docker.pkg.dev/p/levanter/run:1"
    assert main([*POD, *AT_ONCE, "--image", image, "--", "python", "-c", run]) == 0
    assert f"[0] {image} *** r1" in capsys.readouterr().out
    assert (stand_in.home("books", 0) / "docker.log").read_text().splitlines() == [
        "docker ps",
        "gcloud auth configure-docker us-docker.pkg.dev --quiet",
        "docker pull",
        "docker run",
    ]
    assert "hf_s3cr3t" not in stand_in.everything()


def test_no_gcloud(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch(run="pass") == 2
    assert "gcloud is not on PATH: install the Google Cloud CLI" in capsys.readouterr().err


def test_this_folder_reaches_no_real_gcloud(capfd):
    assert launch(run="pass") == 2
    assert "a test called gcloud without a stand-in" in capfd.readouterr().err


def test_interrupted_says_what_goes_on(cloud, tmp_path):
    import signal
    import subprocess
    import time

    stand_in = cloud()
    process = subprocess.Popen(
        [sys.executable, "-m", "levanter.infra.launch", *POD, *AT_ONCE, "--setup", "none", "--", "sleep", "100"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    pid = stand_in.home("books", 0) / ".levanter" / "r1" / "attempt-1" / "pid"
    deadline = time.monotonic() + 200
    while not pid.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "the run continues on the hosts" in err and "delete --tpu_name books" in err
    os.killpg(int(pid.read_text()), signal.SIGKILL)
