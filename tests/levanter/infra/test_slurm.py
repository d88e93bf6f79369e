"""The batch script, and what it does under stand-ins for Slurm's own commands (there is no Slurm here)."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.golden import assert_golden

from levanter.infra.launch import main

pytestmark = pytest.mark.quick

TRAIN = ["python", "-m", "levanter.main.train_lm", "--config_path", "config/train/demo.yaml", "--trainer.id", "a b"]


@pytest.mark.golden
def test_reviewed_script(capsys, monkeypatch):
    monkeypatch.chdir("/")
    flags = ["--job_name", "llama", "--nodes", "4", "--gpus_per_node", "8", "--cpus_per_task", "64", "--mem", "0",
             "--time", "12:00:00", "--partition", "gpu", "--account", "lab", "--sbatch=--exclusive", "--run_id", "l-1",
             "-e", "WANDB_API_KEY=wandb-f00dfeed"]  # fmt: skip
    assert main(["slurm", "--dry_run", *flags, "--", *TRAIN]) == 0
    text = capsys.readouterr().out
    assert "wandb-f00dfeed" not in text
    assert_golden("launch/slurm.sbatch", text)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins: `srun` starts as many processes as there are tasks here, with their numbers."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nworst=0\n'
        'for i in $(seq 0 $((SLURM_NTASKS - 1))); do SLURM_PROCID=$i "$@" & done\n'
        'for job in $(jobs -p); do wait "$job"; code=$?; [ $code -le $worst ] || worst=$code; done\nexit $worst\n',
        "scontrol": 'if [ "$1" = requeue ]; then echo "requeued $2"; else printf "n07\\nn08\\n"; fi\n',
        "sbatch": 'echo "Submitted batch job 41 ($1)"\n',
    }.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_script(path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    job = {"SLURM_JOB_NODELIST": "n[07-08]", "SLURM_JOB_ID": "40123", "SLURM_NTASKS": "2", **more}
    return subprocess.run(["bash", str(path)], capture_output=True, text=True, env={**os.environ, **job})


def test_stand_in_each_process_is_told_its_place_and_given_its_secrets(slurm, capsys):
    # One write a line: both processes have the same output here.
    names = ("LEVANTER_COORDINATOR", "LEVANTER_NUM_PROCESSES", "LEVANTER_PROCESS_ID", "RUN_ID", "MY_TOKEN")
    run = f"import os, sys; sys.stdout.write(' '.join(os.environ[n] for n in {names}) + '\\n')"
    assert main(["slurm", "--nodes", "2", "-e", "MY_TOKEN=$(touch evil) x", "--submit", "--", "python", "-c", run]) == 0
    shown = capsys.readouterr()
    assert "Submitted batch job 41" in shown.out and "evil" not in shown.out + shown.err
    assert stat.S_IMODE((slurm / "levanter.environment").stat().st_mode) == 0o600
    assert "evil" not in (slurm / "levanter.sbatch").read_text()
    done = run_script(slurm / "levanter.sbatch")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "n07:20123 2 0 levanter $(touch evil) x",
        "n07:20123 2 1 levanter $(touch evil) x",
    ]
    assert not (slurm / "evil").exists()


@pytest.mark.parametrize(("code", "restarts", "requeued"), [(75, "0", True), (75, "3", False), (2, "0", False)])
def test_stand_in_preempted_is_requeued_so_often(slurm, code, restarts, requeued):
    assert main(["slurm", "--retries", "3", "--", "python", "-c", f"raise SystemExit({code})"]) == 0
    done = run_script(slurm / "levanter.sbatch", SLURM_RESTART_COUNT=restarts)
    assert done.returncode == code and ("requeued 40123" in done.stdout) == requeued


def test_what_is_wrong(capsys):
    assert main(["slurm", "--job_name", "two words", "--nodes", "0", "--", "true"]) == 2
    error = capsys.readouterr().err
    assert "--job_name" in error and "--nodes 0" in error
    assert main(["slurm"]) == 2
