"""N processes here: real ones."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.tiny_runs import make_inputs

from levanter.infra.launch import main


def local(*flags: str, run: str) -> int:
    return main(["local", *flags, "--", "python", "-c", run])


def test_each_is_told_its_place(capsys):
    run = "import os; print(*(os.environ['LEVANTER_' + n] for n in ('COORDINATOR', 'NUM_PROCESSES', 'PROCESS_ID')))"
    assert local("--processes", "3", run=run) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [line[:4] for line in lines] == ["[0] ", "[1] ", "[2] "]
    places = [line[4:].split() for line in lines]
    assert [place[1:] for place in places] == [["3", "0"], ["3", "1"], ["3", "2"]]
    coordinators = {place[0] for place in places}
    assert len(coordinators) == 1 and coordinators.pop().startswith("127.0.0.1:")


def test_the_first_failure_ends_all(capsys, tmp_path):
    # Process 2 fails; process 0 wants to go on, and process 1 does not even listen to SIGTERM.
    run = (
        "import os, signal, sys, time, pathlib\n"
        "me = int(os.environ['LEVANTER_PROCESS_ID'])\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "if me == 1: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "(here / str(me)).write_text(str(os.getpid()))\n"
        "while sum(bool(each.read_text()) for each in here.iterdir()) < 3: time.sleep(0.01)\n"
        "if me == 2: sys.exit(7)\n"
        "time.sleep(1000)\n"
    )
    assert local("--processes", "3", "--grace_seconds", "0.5", run=run) == 7
    assert "process 2: exit code 7 (failed); ending the other 2" in capsys.readouterr().err
    for name in "012":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)


def test_a_killed_process_ends_as_a_shell_says(capsys):
    assert local("--processes", "2", run="import os, signal; os.kill(os.getpid(), signal.SIGKILL)") == 137
    assert "killed by SIGKILL" in capsys.readouterr().err


def test_ctrl_c_is_passed_on_once(tmp_path):
    run = (
        "import pathlib, os, time\n"
        f"here = pathlib.Path({str(tmp_path)!r}) / os.environ['LEVANTER_PROCESS_ID']\n"
        "try:\n    here.write_text('ready'); time.sleep(100)\n"
        "except KeyboardInterrupt:\n    time.sleep(0.3); here.write_text('saved'); print('saved', flush=True)\n"
    )
    words = [sys.executable, "-m", "levanter.infra.launch", "local", "--processes", "2", "--", "python", "-c", run]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 200
    while len([p for p in tmp_path.iterdir() if p.read_text()]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"] and "Traceback" not in out + err


def test_sigterm_ends_all_too(tmp_path):
    run = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    words = [sys.executable, "-m", "levanter.infra.launch", "local", "--processes", "1", "--", "python", "-c", run]
    process = subprocess.Popen(words)
    deadline = time.monotonic() + 200
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=200) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_variables_and_virtual_devices(capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8")
    run = "import os; print(os.environ['XLA_FLAGS'], os.environ['JAX_PLATFORMS'], os.environ['MY_TOKEN'])"
    assert local("--processes", "1", "--cpu_devices", "2", "-e", "MY_TOKEN=verysecret", run=run) == 0
    assert capsys.readouterr().out == "[0] --xla_a=1 --xla_force_host_platform_device_count=2 cpu ***\n"


def test_no_such_program_and_nothing_to_run(capsys):
    assert main(["local", "--", "no-such-program"]) == 2
    assert "no-such-program: No such file" in capsys.readouterr().err
    assert main(["local"]) == 2
    assert main(["local", "--processes", "0", "--", "true"]) == 2


@pytest.mark.slow
def test_a_real_evaluation_over_processes(capsys, tmp_path):
    """Two processes, told their places by the launcher, find the numbers of one."""
    inputs = make_inputs(tmp_path)
    for folder, processes in (("alone", "1"), ("two", "2")):
        words = ["local", "--processes", processes, "--cpu_devices", str(8 // int(processes))]
        assert main([*words, "--", "python", "-m", *inputs.eval_lm(tmp_path / folder)]) == 0
    alone, two = (json.loads((tmp_path / name / "out.json").read_text())["sets"] for name in ("alone", "two"))
    assert {name: each["loss"] for name, each in two.items()} == pytest.approx(
        {name: each["loss"] for name, each in alone.items()}, abs=1e-6
    )
    assert "[0] " in capsys.readouterr().out
