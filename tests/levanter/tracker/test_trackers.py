"""Trackers: what each writes, and that none stops a run."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading

import draccus
import fsspec
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from levanter.io import OutputError
from levanter.tracker import (
    CompositeTracker,
    JsonFileTrackerConfig,
    JsonLoggerConfig,
    MetricsTable,
    NoopConfig,
    NoopTracker,
    TensorboardConfig,
    Tracker,
    TrackerConfig,
    TrackioConfig,
    WandbConfig,
    start_trackers,
)
from levanter.tracker.background import BackgroundTracker
from levanter.tracker.base import as_json, as_plain

pytestmark = pytest.mark.quick


class Recorder(Tracker):
    name = "recorder"

    def __init__(self, fail_on=None):
        self.calls, self.fail_on = [], fail_on

    def _record(self, *call):
        if call[0] == self.fail_on:
            raise ConnectionError("the service is gone")
        self.calls.append(call)

    def log_hyperparameters(self, hparams):
        self._record("hparams", hparams)

    def log(self, metrics, *, step, commit=None):
        self._record("log", metrics, step)

    def log_summary(self, metrics):
        self._record("summary", metrics)

    def log_artifact(self, path, *, name=None, type=None):
        self._record("artifact", path, name, type)

    def finish(self):
        self._record("finish")


def lines_of(path):
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in path.read_text().splitlines()]


def test_blocks_parse_as_upstream_writes_them():
    decoded = draccus.decode(
        TrackerConfig | tuple[TrackerConfig, ...],
        [
            {"project": "p", "tags": ["a"]},
            {"type": "tensorboard", "logdir": "x"},
            {"type": "json_file"},
            {"type": "noop"},
        ],
    )
    assert [type(block) for block in decoded] == [WandbConfig, TensorboardConfig, JsonFileTrackerConfig, NoopConfig]
    assert set(TrackerConfig.get_known_choices()) == {
        "wandb",
        "tensorboard",
        "trackio",
        "json_logger",
        "json_file",
        "noop",
        "telemetry",
    }


def test_values_become_plain():
    values = {
        "jax": jnp.float32(1.5),
        "bf16": np.array(0.5, ml_dtypes.bfloat16),
        "list": [np.int64(3), (1, None)],
        "array": np.arange(3),
        "path": os.path,
    }
    plain = as_plain(values)
    assert plain["jax"] == 1.5 and plain["bf16"] == 0.5 and plain["list"] == [3, [1, None]]
    assert plain["array"] == [0, 1, 2] and isinstance(plain["path"], str)
    assert as_json({"a": [np.float32("nan"), float("inf")], "b": -float("inf")}) == {
        "a": ["NaN", "Infinity"],
        "b": "-Infinity",
    }


def test_json_lines(tmp_path):
    tracker = JsonFileTrackerConfig(output_path=str(tmp_path / "out")).init("run")
    tracker.log_hyperparameters({"trainer": {"seed": 0}})
    tracker.log({"eval/loss": jnp.float32(2.0)}, step=1)
    tracker.log({"eval/loss": np.nan}, step=2)
    tracker.log_summary({"tokens": 7})
    tracker.log_artifact("plan.txt", name="plan", type="text")
    tracker.finish()
    tracker.finish()
    assert lines_of(tmp_path / "out" / "metrics.jsonl") == [
        {"hparams": {"trainer": {"seed": 0}}},
        {"step": 1, "metrics": {"eval/loss": 2.0}},
        {"step": 2, "metrics": {"eval/loss": "NaN"}},
        {"summary": {"tokens": 7}},
        {"artifact": {"path": "plan.txt", "name": "plan", "type": "text"}},
    ]
    assert json.loads((tmp_path / "out" / "eval_results.json").read_text()) == {"eval/loss": "NaN", "tokens": 7}


def test_json_lines_survive_a_kill_and_go_on(tmp_path):
    program = (
        "import os, signal, sys\n"
        "from levanter.tracker import JsonFileTrackerConfig\n"
        "tracker = JsonFileTrackerConfig(output_path=sys.argv[1]).init('run')\n"
        "for step in range(100): tracker.log({'x': step}, step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    path = tmp_path / "metrics.jsonl"
    assert [line["step"] for line in lines_of(path)] == list(range(100))
    path.write_bytes(path.read_bytes() + b'{"time": 1, "step": 100, "met')  # what a crash of the machine may leave
    tracker = JsonFileTrackerConfig(output_path=str(tmp_path)).init("run")
    tracker.log({"x": 100}, step=100)
    tracker.finish()
    assert [line["step"] for line in lines_of(path)] == list(range(101))


def test_json_lines_on_a_remote_store():
    fs = fsspec.filesystem("memory")
    for first in (0, 2):  # the second run goes on where the first one ended
        tracker = JsonFileTrackerConfig(output_path="memory://bucket/run").init("run")
        for step in (first, first + 1):
            tracker.log({"x": step}, step=step)
        tracker.finish()
    steps = [json.loads(line)["step"] for line in fs.cat("/bucket/run/metrics.jsonl").splitlines()]
    assert steps == [0, 1, 2, 3]
    fs.store.clear()


def test_json_in_the_log(caplog):
    caplog.set_level(logging.INFO, logger="some.logger")
    tracker = JsonLoggerConfig(logger_name="some.logger").init(None)
    tracker.log({"a": np.float32(1)}, step=3)
    assert json.loads(caplog.messages[-1]) == {"event": "metrics", "step": 3, "metrics": {"a": 1.0}}


def test_tensorboard_files_hold_the_numbers(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    tracker = TensorboardConfig(logdir=str(tmp_path / "tb")).init("run")
    tracker.log_hyperparameters({"seed": 1})
    tracker.log({"eval/loss": jnp.float32(2.5), "nested": {"x": 1}, "hist": np.arange(4.0)}, step=4)
    tracker.log({"samples": MetricsTable(columns=("prompt", "text"), rows=(("a|b", "日本\nx"), ("c", None)))}, step=6)
    (tmp_path / "plan.txt").write_text("plan")
    tracker.log_artifact(str(tmp_path / "plan.txt"))
    tracker.finish()
    (events,) = (tmp_path / "tb" / "run").glob("events.*")
    content, found = events.read_bytes(), {}
    while content:  # records: length, its checksum, payload, its checksum
        length = int.from_bytes(content[:8], "little")
        payload = content[12 : 12 + length]
        assert masked_crc32c(payload) == int.from_bytes(content[12 + length : 16 + length], "little")
        event = Event.FromString(payload)
        for value in event.summary.value:
            found[value.tag] = (event.step, value)
        content = content[16 + length :]
    assert found["eval/loss"][0] == 4 and found["eval/loss"][1].simple_value == 2.5
    assert found["nested/x"][1].simple_value == 1 and found["hist"][1].histo.num == 4
    table = "| prompt | text |\n| --- | --- |\n| a\\|b | 日本<br>x |\n| c |  |"
    assert found["samples/text_summary"][0] == 6
    assert found["samples/text_summary"][1].tensor.string_val[0].decode() == table
    assert b'"seed": 1' in found["config/text_summary"][1].tensor.string_val[0]
    assert (tmp_path / "tb" / "run" / "artifacts" / "plan.txt").read_text() == "plan"


@pytest.mark.parametrize(
    ("config", "module", "install"),
    [
        (TensorboardConfig(), "tensorboardX", r"pip install 'levanter-fork\[tensorboard\]'"),
        (TrackioConfig(), "trackio", "pip install trackio"),
    ],
)
def test_missing_packages_are_named(monkeypatch, config, module, install):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=install):
        config.init("run")


def test_trackio_receives_the_calls(monkeypatch):
    class Run:
        def __init__(self, **arguments):
            self.arguments, self.config, self.calls = arguments, dict(arguments["config"]), []

        def log(self, metrics, step=None):
            self.calls.append((metrics, step))

        def finish(self):
            self.calls.append("finish")

    class Module:
        init = Run

    monkeypatch.setitem(sys.modules, "trackio", Module())
    tracker = TrackioConfig(mode="offline", space_id="me/space", config={"a": 1}, background=False).init("run-7")
    tracker.log_hyperparameters({"seed": np.int64(3)})
    tracker.log({"x": np.float32(2)}, step=5)
    tracker.log_summary({"tokens": 7})
    tracker.finish()
    run = tracker.run
    assert run.arguments["name"] == "run-7" and run.arguments["space_id"] is None and run.arguments["resume"] == "allow"
    assert run.config == {"a": 1, "seed": 3}
    assert run.calls == [({"x": 2.0}, 5), ({"summary/tokens": 7}, None), "finish"]
    assert isinstance(TrackioConfig(mode="disabled").init(None), NoopTracker)
    automatic = TrackioConfig(resume="auto", background=False)
    assert automatic.init("run-7").run.arguments["resume"] == "allow"
    assert automatic.init(None).run.arguments["resume"] == "never"


def test_telemetry_of_upstreams_cluster_records_nothing_and_says_so(caplog):
    config = draccus.decode(TrackerConfig, {"type": "telemetry"})
    assert isinstance(config.init("run"), NoopTracker)
    assert "records nothing" in caplog.text


def test_a_list_goes_to_all_and_one_failure_stops_none():
    first, broken, last = Recorder(), Recorder(fail_on="log"), Recorder()
    tracker = CompositeTracker([first, broken, last])
    tracker.log_hyperparameters({"a": 1})
    with pytest.raises(ConnectionError, match="the service is gone") as info:
        tracker.log({"x": 1}, step=0)
    assert info.value.__notes__ == ["in tracker recorder, log"]
    tracker.finish()
    assert first.calls == last.calls == [("hparams", {"a": 1}), ("log", {"x": 1}, 0), ("finish",)]
    with pytest.raises(ExceptionGroup, match="2 trackers failed in finish"):
        CompositeTracker([Recorder("finish"), Recorder("finish")]).finish()


def test_the_background_keeps_order_and_finishes():
    recorder = Recorder()
    tracker = BackgroundTracker(recorder, max_queue_size=3, finish_timeout=100)
    metrics = np.zeros(1)
    for step in range(50):
        metrics[0] = step
        tracker.log({"x": metrics}, step=step)  # the value at the time of the call counts
    tracker.finish()
    tracker.finish()
    assert recorder.calls == [("log", {"x": float(step)}, step) for step in range(50)] + [("finish",)]


def test_a_failing_service_does_not_stop_the_run(caplog):
    tracker = BackgroundTracker(Recorder(fail_on="log"), max_queue_size=2, finish_timeout=100)
    for step in range(20):
        tracker.log({"x": 1}, step=step)
    tracker.finish()
    assert "tracker recorder failed; nothing more is tracked there" in caplog.text
    assert sum("failed" in message for message in caplog.messages) == 1


def test_a_hanging_service_is_given_up(caplog):
    release = threading.Event()

    class Hanging(Recorder):
        def log(self, metrics, *, step, commit=None):
            release.wait(250)

    idle = BackgroundTracker(Hanging(), max_queue_size=10, finish_timeout=0.1)
    idle.log({"x": 1}, step=0)
    idle.finish()
    assert "not finished after 0.1 s" in caplog.text
    full = BackgroundTracker(Hanging(), max_queue_size=1, finish_timeout=0.1)
    for step in range(100):  # the run is not held up for ever
        full.log({"x": 1}, step=step)
    full.finish()
    assert caplog.text.count("has accepted no call for 0.1 s") == 1
    release.set()


def test_only_the_first_process_tracks(tmp_path):
    blocks = (
        JsonFileTrackerConfig(output_path=str(tmp_path / "a")),
        JsonFileTrackerConfig(output_path=str(tmp_path / "b")),
    )
    assert isinstance(start_trackers(blocks, run_id="r", process_index=1), NoopTracker)
    assert not list(tmp_path.iterdir())
    with start_trackers(blocks, run_id="r", process_index=0) as tracker:
        tracker.log({"x": 1}, step=0)
    assert lines_of(tmp_path / "a" / "metrics.jsonl") == lines_of(tmp_path / "b" / "metrics.jsonl") != []
    assert isinstance(start_trackers((), run_id="r", process_index=0), NoopTracker)


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    """Lines wait in memory until there is room, the half of one that was written before it included."""
    tracker = JsonFileTrackerConfig(output_path=str(tmp_path)).init("x")
    room, write = [20], os.write

    def limited(descriptor, content):
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, bytes(content)[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            tracker.log({"loss": step}, step=step)
    assert [record.message.count("No space left on device") for record in caplog.records] == [1]
    assert "the run continues" in caplog.text
    room[0] = 10_000
    tracker.log({"loss": 3}, step=3)
    tracker.finish()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["metrics"]["loss"] for line in lines] == [0, 1, 2, 3]


def test_a_disk_that_stays_full_is_an_error_at_the_end(tmp_path, monkeypatch):
    tracker = JsonFileTrackerConfig(output_path=str(tmp_path)).init("x")

    def full(descriptor, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    tracker.log({"loss": 1.0}, step=0)
    with pytest.raises(OutputError, match=r"metrics.jsonl: cannot be written \(No space left on device\)"):
        tracker.finish()
    # What another file takes is there.
    assert json.loads((tmp_path / "eval_results.json").read_text()) == {"loss": 1.0}


SCRIPT = """
import time
from levanter.tracker.background import BackgroundTracker
from levanter.tracker import NoopTracker

class Slow(NoopTracker):
    name = "slow"
    def log(self, metrics, *, step, commit=None):
        time.sleep(0.02)
        print(step, flush=True)
    def finish(self):
        print("finished", flush=True)

import atexit
atexit.register(print, "the service's own hook")  # services register theirs when they start, before we get them
tracker = BackgroundTracker(Slow(), max_queue_size=100, finish_timeout=200.0)
for step in range(20):
    tracker.log({}, step=step)
"""


def test_a_script_that_ends_behind_its_last_number_loses_none():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=250)
    assert done.stdout.split("\n") == [*map(str, range(20)), "finished", "the service's own hook", ""]
    assert "Traceback" not in done.stderr
