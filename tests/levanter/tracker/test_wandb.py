"""wandb without a key: recorded offline, nothing asked, resumed under the same id."""

import json
import os
import subprocess
import sys
from typing import ClassVar

import pytest

from levanter.tracker import NoopTracker, WandbConfig
from levanter.tracker.wandb import ARTIFACT_NAME_LIMIT, _artifact_name, git_commit

TABLE = [["a|b", "日本\n", 0.5], ["c", "", None]]
PROGRAM = """
import json, sys
from levanter.io import setup_logging
from levanter.tracker import MetricsTable, WandbConfig, start_trackers
setup_logging()
assert "wandb" not in sys.modules
config = WandbConfig(project="p", mode={mode!r}, replicate_path=sys.argv[1] + "/copy", tags=["t"])
tracker = start_trackers(config, run_id="run-1", process_index=0)
tracker.log_hyperparameters({{"trainer": {{"seed": 3}}}})
for step in (0, 5, 2):  # a step in the past is dropped, with one warning
    tracker.log({{"eval/loss": step + 0.5}}, step=step)
tracker.log({{"samples": MetricsTable(columns=("prompt", "text", "score"), rows={table!r})}}, step=5)
tracker.log_summary({{"tokens": 7}})
open(sys.argv[1] + "/plan.txt", "w").close()
tracker.log_artifact(sys.argv[1] + "/plan.txt", type="text")
tracker.finish()
"""


def run_offline(tmp_path, mode):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_DIR": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(mode=mode, table=TABLE), str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


def test_without_a_key_the_run_is_offline(tmp_path):
    done = run_offline(tmp_path, "online")  # even where online is asked for: a question would hang the job
    assert done.returncode == 0, done.stderr
    assert "no API key ($WANDB_API_KEY or `wandb login`), so the run is recorded offline" in done.stderr
    (folder,) = tmp_path.glob("wandb/offline-run-*-run-1")
    assert f"`wandb sync {folder}` uploads it" in done.stderr
    assert (folder / "run-run-1.wandb").stat().st_size > 0
    assert "step 2 is before the run's step 5" in done.stderr
    copy = json.loads((tmp_path / "copy" / "tracker_metrics.jsonl").read_text())
    assert copy["config"] == {"trainer": {"seed": 3}}
    assert copy["summary"]["eval/loss"] == 5.5 and copy["summary"]["tokens"] == 7 and "samples" not in copy["summary"]
    (table,) = folder.glob("files/media/table/samples*.table.json")
    assert json.loads(table.read_text()) == {"columns": ["prompt", "text", "score"], "data": TABLE}


def test_modes(monkeypatch):
    monkeypatch.setattr("levanter.tracker.wandb._has_credentials", lambda: True)
    for asked, environment, expected in (
        (None, None, "online"),
        (None, "offline", "offline"),
        ("offline", "online", "offline"),
        ("disabled", None, "disabled"),
    ):
        if environment is None:
            monkeypatch.delenv("WANDB_MODE", raising=False)
        else:
            monkeypatch.setenv("WANDB_MODE", environment)
        assert WandbConfig(mode=asked)._mode() == expected
    monkeypatch.setenv("WANDB_MODE", "onlin")
    with pytest.raises(ValueError, match="'onlin'; expected online, offline or disabled"):
        WandbConfig()._mode()
    assert isinstance(WandbConfig(mode="disabled").init("run"), NoopTracker)


def test_a_fork_starts_from_a_step_of_another_run(monkeypatch):
    """The service refuses `fork_from` and `resume` in one call."""
    calls = []

    class Run:
        summary: ClassVar[dict] = {}
        dir = "/runs/1/files"

    monkeypatch.setattr("wandb.init", lambda **keys: calls.append(keys) or Run())
    WandbConfig(mode="offline", fork_from="old?_step=500", save_code=False, background=False).init("new")
    WandbConfig(mode="offline", save_code=False, background=False).init("new")
    assert calls[0]["fork_from"] == "old?_step=500" and "resume" not in calls[0]
    assert calls[1]["resume"] == "allow" and "fork_from" not in calls[1]
    for wrong in ("old", "old?_step=", "?_step=5", "old?_step=-1", "old?_step=1x"):
        with pytest.raises(ValueError, match=r"fork_from: expected RUN\?_step=N"):
            WandbConfig(fork_from=wrong)
    with pytest.raises(ValueError, match="an id of its own"):
        WandbConfig(id="old", fork_from="old?_step=1")


def test_long_artifact_names_stay_distinct():
    first, second = _artifact_name("a/" + "x" * 200), _artifact_name("a/" + "x" * 201)
    assert len(first) == len(second) == ARTIFACT_NAME_LIMIT and first != second
    assert _artifact_name("plan v1.txt") == "plan-v1.txt"


def test_the_commit_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert git_commit(str(tmp_path)) is None
    monkeypatch.setenv("GIT_COMMIT", "abc")
    assert git_commit(str(tmp_path)) == "abc"


def test_xla_dumps_need_their_flag(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    from levanter.tracker.wandb import _xla_dump_folder

    with pytest.raises(ValueError, match="no --xla_dump_to"):
        _xla_dump_folder()
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --xla_dump_to=/dumps --b=2")
    assert _xla_dump_folder() == "/dumps"
