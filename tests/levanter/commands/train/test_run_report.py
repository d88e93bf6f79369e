"""The report of a run: its records and its page, over restarts, and what is printed at its end."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from levanter.commands.train.lm.train_lm import TrainLmConfig, main
from levanter.config import load
from levanter.runplan import OK

RUN = """
data:
  tokenizer: passthrough
  vocab_size: 61
  cache_dir: null
  components:
    numbers: {{type: direct, datasets: {{train: ["{text}"], validation: ["{held_out}"]}}}}
model: {{type: llama, max_seq_len: 16, hidden_dim: 16, intermediate_dim: 32, num_layers: 2, num_heads: 2,
        num_kv_heads: 2}}
optimizer: {{learning_rate: 0.01, warmup: 2}}
trainer:
  id: reported
  tracker: {{type: json_file, output_path: {folder}/numbers}}
  require_accelerator: false
  log_dir: {folder}/logs
  num_train_steps: {steps}
  train_batch_size: 8
  steps_per_eval: 2
  watch: {{interval: 1000}}
  checkpointer: {{base_path: {folder}/checkpoints, keep: [{{every: {every}}}]}}
"""


def write_config(folder, *, steps, every=2):
    path = folder / "run.yaml"
    text, held_out = (" ".join(str(n * n % 61) for n in range(start, start + 1200)) for start in (0, 5000))
    path.write_text(RUN.format(text=text, held_out=held_out, folder=folder, steps=steps, every=every))
    return path


def records(folder):
    read = lambda name: json.loads((folder / "logs/reported" / name).read_text())  # noqa: E731
    return read("goodput.json")["attempts"], read("history.json")


def test_a_run_that_is_continued_has_one_report(tmp_path, capsys):
    assert main(load(TrainLmConfig, ["--config_path", str(write_config(tmp_path, steps=4))])) == OK
    capsys.readouterr()
    assert main(load(TrainLmConfig, ["--config_path", str(write_config(tmp_path, steps=7))])) == OK
    out = capsys.readouterr().out
    attempts, history = records(tmp_path)
    assert [(a["first"], a["taken"]) for a in attempts] == [(0, 4), (4, 7)]
    for attempt in attempts:
        spent = attempt["seconds"]
        assert min(spent.values()) >= 0 and sum(spent.values()) <= attempt["until"] - attempt["began"] + 0.02
        assert all(spent[name] > 0 for name in ("steps", "compilation", "loading", "saving", "evaluation"))
    logged = [json.loads(line) for line in (tmp_path / "numbers/metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["metrics"]["train/loss"] for line in logged if "train/loss" in line.get("metrics", {})}
    assert [point["loss"] for point in history["points"]] == pytest.approx([losses[step] for step in range(7)])
    validation = {
        line["step"] + 1: line["metrics"]["eval/loss"] for line in logged if "eval/loss" in line.get("metrics", {})
    }
    assert {point["taken"]: point["loss"] for point in history["evaluations"]} == pytest.approx(validation)
    assert sorted(validation) == [2, 4, 6, 7]
    shares = [line["metrics"]["throughput/goodput"] for line in logged if "train/loss" in line.get("metrics", {})]
    assert len(shares) == 7 and all(0 < share < 1 for share in shares)
    # What the terminal and the page say are these numbers.
    assert f"loss {losses[0]:.4f} → {losses[6]:.4f}  " in out and "in 2 attempts: " in out
    page_path = tmp_path / "logs/reported/report.html"
    assert f"report: {page_path}" in out
    page = page_path.read_text()
    assert f"{losses[6]:.4f}" in page and f"from {losses[0]:.4f}" in page and f"{validation[7]:.4f}" in page
    assert "2 attempts" in page and "between attempts" in page


def test_a_run_that_has_nothing_left_to_do_keeps_its_report(tmp_path, capsys):
    path = write_config(tmp_path, steps=3)
    for _ in range(2):
        assert main(load(TrainLmConfig, ["--config_path", str(path)])) == OK
    _, history = records(tmp_path)
    assert [point["taken"] for point in history["points"]] == [1, 2, 3]
    assert re.findall(r"loss \S+ → \S+", capsys.readouterr().out)[0]


def test_a_line_says_how_to_continue_and_not_that_it_does(tmp_path, capsys):
    assert main(load(TrainLmConfig, ["--config_path", str(write_config(tmp_path, steps=1))])) == OK
    out = capsys.readouterr().out
    assert "if it is interrupted, trainer.id=reported continues it" in out and "resum" not in out


def test_the_page_cannot_be_written(tmp_path, caplog, capsys):
    """The run itself is done: its result counts, and the page's problem is a warning."""
    (tmp_path / "logs/reported/report.html").mkdir(parents=True)
    assert main(load(TrainLmConfig, ["--config_path", str(write_config(tmp_path, steps=1))])) == OK
    out = capsys.readouterr().out
    assert "report.html" in caplog.text and "report:" not in out and "done after 1 of 1 steps" in out


@pytest.mark.slow
def test_killed_runs_have_each_step_once(tmp_path):
    path = write_config(tmp_path, steps=400, every=50)
    command = [sys.executable, "-m", "levanter.main.train_lm", "--config_path", str(path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    for _ in range(2):
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            began, before = time.monotonic(), len(list((tmp_path / "checkpoints").rglob("step-*")))
            while len(list((tmp_path / "checkpoints").rglob("step-*"))) < before + 2:
                assert process.poll() is None and time.monotonic() - began < 300
                time.sleep(0.2)
            process.send_signal(signal.SIGKILL)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    attempts, history = records(tmp_path)
    assert len(attempts) == 3 and "in 3 attempts" in done.stdout
    taken = [point["taken"] for point in history["points"]]
    assert taken == sorted(set(taken)) and taken[-1] == 400
    # Every step of a short run is a point; those behind the last records of a killed process are taken again.
    assert taken == list(range(1, 401))
