"""What a run shows of itself: metrics, norms, facts, a profile; and that steps are left out as configured."""

import json
import re

import jax
import numpy as np
import pytest

from levanter.checkpoint import find_checkpoints
from levanter.commands.train import monitoring
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe, main, train
from levanter.config import load
from levanter.plan.attention_blocks import SequenceLayout
from levanter.runplan import OK, Target
from levanter.trainer.metrics import Peak

RUN = """
data:
  tokenizer: passthrough
  vocab_size: 61
  cache_dir: null
  components: {{numbers: {{type: direct, datasets: {{train: ["{text}"]}}}}}}
model: {{type: llama, max_seq_len: 16, hidden_dim: 16, intermediate_dim: 32, num_layers: 2, num_heads: 2,
        num_kv_heads: 2}}
optimizer: {{learning_rate: 0.01, warmup: 2}}
z_loss_weight: 0.001
trainer:
  id: seen
  tracker: {{type: json_file, output_path: {folder}/numbers}}
  require_accelerator: false
  log_dir: {folder}/logs
  num_train_steps: 7
  train_batch_size: 8
  skip_nonfinite_steps: 3
  watch: {{interval: 3, include_histograms: true, watch_targets: [grads, params]}}
  profiler: {{enabled: true, start_step: 3, num_steps: 2, create_perfetto_trace: true, process_index: 0}}
  checkpointer: {{base_path: {folder}/checkpoints, keep: []}}
  mesh: {{axes: {{data: 4, model: 2}}, shared_mapping: {{vocab: model}}}}
"""


def config_of(folder, *overrides):
    path = folder / "run.yaml"
    path.write_text(RUN.format(text=" ".join(str(n * n % 61) for n in range(1200)), folder=folder))
    return load(TrainLmConfig, ["--config_path", str(path), *overrides])


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """One run with everything on, on devices whose peak is made up: its folder, and what it logged."""
    folder = tmp_path_factory.mktemp("seen")
    with pytest.MonkeyPatch.context() as patch:
        made_up = Peak(kind="made up", devices=8, flops_per_device=1e9)
        patch.setattr(monitoring, "device_peak", lambda plan, mesh: made_up)
        assert main(config_of(folder)) == OK
    lines = [json.loads(line) for line in (folder / "numbers/metrics.jsonl").read_text().splitlines()]
    return folder, lines


def test_the_configuration_the_plan_and_the_versions_are_logged_once(seen):
    _, lines = seen
    (facts,) = [line["hparams"] for line in lines if "hparams" in line]
    assert facts["config"]["model"]["hidden_dim"] == 16 and facts["config"]["trainer"]["id"] == "seen"
    # What was not written is resolved.
    assert facts["config"]["model"]["rope"]["type"] == "default"
    assert facts["plan"]["programs"] == ["init_state", "train_step", "train_step_watched"]
    assert facts["plan"]["parameters"] == 2 * 62 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16) + 16
    assert facts["plan"]["bytes_per_device"]["optimizer"] > 0
    assert facts["versions"]["jax"] == jax.__version__ and "python" in facts["versions"]


def test_every_step_has_its_numbers_under_upstreams_names(seen):
    _, lines = seen
    steps = {line["step"]: line["metrics"] for line in lines if "metrics" in line}
    assert list(steps) == list(range(7))
    names = {
        "train/loss", "train/z_loss", "optim/learning_rate", "grad/norm/total", "params/norm/total",
        "updates/norm/total", "global_step", "run_progress", "throughput/duration", "throughput/loading_time",
        "throughput/hook_time", "throughput/total_tokens", "throughput/total_gflops", "throughput/tokens_per_second",
        "throughput/examples_per_second", "throughput/gflops_per_second", "throughput/mfu", "throughput/mfu_causal",
        "throughput/p50_duration", "throughput/p90_duration", "throughput/p99_duration", "throughput/seconds_left",
        "memory/host_rss_bytes", "optim/skipped_step", "optim/skipped_steps",
    }  # fmt: skip
    last = steps[5]
    assert names <= last.keys(), names - last.keys()
    weights = 2 * (4 * 16 * 16 + 3 * 16 * 32) + 61 * 16
    full, causal = (3 * (2 * weights + 4 * 2 * 16 * keys) for keys in (16, 17 / 2))
    tokens = 8 * 16
    assert last["throughput/gflops_per_second"] == pytest.approx(tokens * full / last["throughput/duration"] / 1e9)
    for name, flops in (("mfu", full), ("mfu_causal", causal)):
        expected = 100 * tokens * flops / last["throughput/duration"] / 8e9
        assert last[f"throughput/{name}"] == pytest.approx(expected)
    assert last["throughput/total_tokens"] == 6 * tokens
    assert steps[6]["throughput/seconds_left"] == 0
    summary = {k: v for line in lines if "summary" in line for k, v in line["summary"].items()}
    assert summary["throughput/device_kind"] == "made up" and summary["num_devices"] == 8
    assert summary["optim/skipped_steps"] == 0 and summary["throughput/p50_mfu"] > 0


def test_norms_and_histograms_come_every_so_many_steps(seen):
    _, lines = seen
    steps = {line["step"]: line["metrics"] for line in lines if "metrics" in line}
    norm, hist = "grad/norm/transformer.layers.1.mlp.up_proj.weight", "params/hist/transformer.norm.weight"
    assert [n for n in steps if norm in steps[n]] == [0, 3, 6] == [n for n in steps if hist in steps[n]]
    assert sum(steps[3][hist]["counts"]) == 16
    for kind in ("grad", "params"):
        squares = sum(
            value**2
            for name, value in steps[3].items()
            if name.startswith(f"{kind}/norm/") and not name.endswith("/total")
        )
        assert squares**0.5 == pytest.approx(steps[3][f"{kind}/norm/total"], rel=1e-5)


def test_the_profile_lies_beside_the_logs_and_holds_its_steps_only(seen):
    folder, lines = seen
    (artifact,) = [line["artifact"] for line in lines if "artifact" in line]
    assert artifact["path"] == str(folder / "logs/seen/profiler")
    found = sorted((folder / "logs/seen/profiler").rglob("*.xplane.pb"))
    assert len(found) == 1 and found[0].stat().st_size > 1000
    # Step 3 is the watched one, step 4 a plain one; nothing else ran.
    runs = set(re.findall(rb"PjitFunction\((\w+)\)", found[0].read_bytes()))
    assert runs & {b"train_step", b"train_step_watched", b"init_state"} == {b"train_step", b"train_step_watched"}


def test_the_second_program_is_there_only_for_histograms(tmp_path):
    local = Target(name="local", platform="cpu", kind="cpu", devices=8)
    names = lambda *changes: [p.name for p in describe(config_of(tmp_path, *changes), local).programs]  # noqa: E731
    assert names("--trainer.watch.include_histograms", "false") == ["init_state", "train_step"]
    assert names("--trainer.watch.interval", "0") == ["init_state", "train_step"]
    assert names("--optimizer.type", "muon") == ["init_state", "train_step", "train_step_watched"]


@pytest.mark.slow
def test_muon_runs_and_resumes(tmp_path):
    changes = ("--trainer.watch.interval", "0", "--trainer.profiler.enabled", "false", "--trainer.mesh.axes.model", "2")
    muon = ("--optimizer.type", "muon", "--trainer.num_train_steps")
    assert train(config_of(tmp_path, *changes, *muon, "3")).taken == 3
    rest = train(config_of(tmp_path, *changes, *muon, "4"))
    assert rest.taken == 4 and rest.loss is not None
    (ref, *_) = find_checkpoints(str(tmp_path / "checkpoints/seen"))
    paths = [path for path in ref.leaves if path.endswith("mlp.up_proj.weight")]
    # Momentum only, and no second moment, for a hidden matrix.
    assert len(paths) == 2
    assert len([path for path in ref.leaves if path.endswith("lm_head.weight")]) == 3


@pytest.mark.slow
def test_a_batch_schedule_runs_and_resumes_in_its_second_stage(tmp_path):
    stages = "[{start: 0, value: 4}, {start: 2, value: 16}]"
    # A constant rate does not depend on the run's length, which the first attempt has shorter.
    constant = ("--optimizer.lr_schedule", "constant", "--optimizer.warmup", "0")
    changes = ("--trainer.watch.interval", "0", "--trainer.profiler.enabled", "false", *constant)
    schedule = (*changes, "--trainer.train_batch_size", stages, "--trainer.per_device_parallelism", "1")

    def run(name, steps):
        train(config_of(tmp_path, *schedule, "--trainer.id", name, "--trainer.num_train_steps", str(steps)))
        lines = [json.loads(line) for line in (tmp_path / "numbers/metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["metrics"] for line in lines if "metrics" in line}

    straight = run("straight", 5)
    # 4 rows are one microbatch of 4 ways; 16 are four, whose gradients are added up.
    assert [straight[n]["throughput/total_tokens"] // 16 for n in range(5)] == [4, 8, 24, 40, 56]
    (tmp_path / "numbers/metrics.jsonl").unlink()
    run("stopped", 3)
    both = run("stopped", 5)
    for step in range(5):
        for name in ("throughput/total_tokens", "train/loss", "grad/norm/total", "optim/learning_rate"):
            assert both[step][name] == straight[step][name], (name, step)


@pytest.mark.slow
def test_what_the_busiest_device_has_of_real_rows_is_logged(tmp_path, monkeypatch):
    """Positions over four devices in a ring: of each step the figure for its own rows, by their documents."""
    asked = []

    def counted(self, window, segments=None):
        asked.append(segments)
        return 1.0 + len(asked) / 100

    monkeypatch.setattr(SequenceLayout, "imbalance", counted)
    options = {
        "model.max_seq_len": "1024",
        "trainer.num_train_steps": "2",
        "trainer.train_batch_size": "2",
        "trainer.profiler.enabled": "false",
        "trainer.mesh.axes": "{data: 2, context: 4, model: 1}",
        "trainer.mesh.compute_mapping": "{position: context}",
        "trainer.mesh.attention_mapping": "ring",
    }
    overrides = [word for key, value in options.items() for word in (f"--{key}", value)]
    assert main(config_of(tmp_path, *overrides)) == OK
    lines = [json.loads(line) for line in (tmp_path / "numbers/metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["metrics"] for line in lines if "metrics" in line}
    assert [steps[step]["throughput/attention_imbalance"] for step in (0, 1)] == [1.01, 1.02]
    # Documents of 1,200 tokens (and what is put between them), numbered from 0 in every row.
    assert [segments.shape for segments in asked] == [(2, 1024)] * 2
    assert all(set(np.unique(segments)) <= {0, 1} for segments in asked)
