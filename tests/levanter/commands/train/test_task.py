"""A third kind of training through the seam: it trains, is planned, is killed, resumes, and is refused when changed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.preference_runs import write_model
from helpers.processes import QUICK
from helpers.toy_distillation import ENTRY_POINT, LOCAL, CountingRows, DistillConfig, train

from levanter.checkpoint import checkpoint_at
from levanter.config import parse

POSITIONS = 16


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("teacher") / "model")


def document(folder: Path, teacher: Path, *, steps: int = 4, **more) -> dict:
    trainer = {
        "id": "run",
        "tracker": {"type": "noop"},
        "mp": "f32",
        "watch": {"interval": 0},
        "train_batch_size": 8,
        "steps_per_eval": 2,
        "num_train_steps": steps,
        "checkpointer": {"base_path": str(folder / "checkpoints"), "keep": [{"every": 2}], "save_interval": None},
        "log_dir": str(folder / "logs"),
        "mesh": {"axes": {"data": 4, "model": 2}},
        **more.pop("trainer", {}),
    }
    model = {"type": "llama", "hidden_dim": 16, "intermediate_dim": 32, "num_layers": 1, "num_heads": 4}
    return {
        "data": {"tokenizer": "passthrough", "vocab_size": 320, "cache_dir": None},
        "model": {**model, "num_kv_heads": 2, "max_seq_len": POSITIONS},
        "optimizer": {"learning_rate": 0.01, "warmup": 0, "lr_schedule": "constant"},
        "train_seq_len": POSITIONS,
        "teacher": str(teacher),
        "agreement": 20.0,
        "trainer": trainer,
        **more,
    }


@pytest.fixture(scope="module")
def whole(teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, *train(document(folder, teacher))


def digests(folder: Path, step: int) -> dict:
    metadata = json.loads((folder / f"checkpoints/run/step-{step}/metadata.json").read_text())
    return {path: leaf["digests"] for path, leaf in metadata["leaves"].items()}


def test_the_plan_has_rows_models_programs_and_bytes(whole):
    _, plan, _, _ = whole
    teacher = plan.work.models.reference
    assert [p.name for p in plan.computing] == ["init_state", "train_step", "agreement"]
    assert [i.name for i in plan.program("train_step").inputs] == ["state", "frozen", "reference", "batch"]
    assert plan.resident_bytes["reference"] == teacher.plan.bytes_per_device > 0
    assert plan.second_load is teacher.load and teacher.load.programs == plan.loading
    # By hand: while both models are scored, the two moments, the step, the key and the counters stay.
    moments = sum(
        planned.bytes_per_device
        for planned in plan.work.state_plan.whole.leaves
        if not planned.leaf.path.startswith("model.")
    )
    assert plan.coresident_bytes["agreement"] == moments
    # A step is as much work as that of text, and the teacher's forward pass.
    (step,) = plan.workloads
    per_token = plan.work.model.flops(vocab_size=plan.work.vocab, context_length=POSITIONS, attention="full")
    assert step.flops_full == 8 * POSITIONS * (per_token.training + per_token.scoring)
    assert any(check.message == f"counting modulo {plan.work.vocab}" for check in plan.checks)
    assert any(check.name.startswith("reference ") for check in plan.checks)


def test_it_trains_evaluates_and_records(whole):
    folder, plan, done, tracker = whole
    steps = [tracker.steps[n] for n in range(4)]
    assert done.taken == done.stop == 4
    rows = plan.work.task.build_rows(plan.work, show=False)
    for n, numbers in enumerate(steps):
        assert numbers["rows/mean_id"] == float(rows.take(n).mean())
    assert [n for n in range(4) if "eval/disagreement" in steps[n]] == [1, 3]
    assert done.evaluation.metrics() == {"eval/disagreement": steps[3]["eval/disagreement"]}
    assert done.evaluation.headline in str(done)
    # The term is minimized: with this weight it is most of the sum. Its metric includes the weight.
    assert 0 < steps[3]["train/disagreement"] < steps[0]["train/disagreement"]
    assert steps[0]["train/disagreement"] > steps[0]["train/loss"]
    assert set(checkpoint_at(str(folder / "checkpoints/run/step-4")).metadata["task"]) == {"teacher"}


def test_a_run_that_crashes_resumes_bit_for_bit(whole, teacher, tmp_path):
    """Two steps and a checkpoint, then the attempt ends; the next one takes the last two steps."""
    folder, _, _, tracker = whole
    train(document(tmp_path, teacher, steps=2))
    _, done, rest = train(document(tmp_path, teacher))
    assert done.taken == 4 and sorted(step for step in rest.steps if step is not None) == [2, 3]
    for step in (2, 3):
        same = {"train/loss", "train/disagreement", "rows/mean_id", "eval/disagreement"} & tracker.steps[step].keys()
        assert {name: rest.steps[step][name] for name in same} == {name: tracker.steps[step][name] for name in same}
    assert digests(tmp_path, 4) == digests(folder, 4)


def test_what_changed_is_refused(whole, teacher, tmp_path):
    folder, _, _, _ = whole

    def errors(**changes) -> str:
        plan = ENTRY_POINT.describe(parse(DistillConfig, overrides={**document(folder, teacher), **changes}), LOCAL)
        return "\n".join(map(str, plan.errors))

    # A key that the task does not classify is fixed.
    assert "count_seed: 0 when it was saved, 1 now" in errors(count_seed=1)
    assert not errors(agreement=10.0) and not errors(shown=2)
    other = write_model(tmp_path / "model", seed=7)
    assert f'teacher: "{teacher}" when it was saved, "{other}" now' in errors(teacher=str(other))
    # The same path with other weights: only the task knows.
    weights = next(teacher.glob("*.safetensors"))
    before = weights.read_bytes()
    try:
        weights.write_bytes(next(other.glob("*.safetensors")).read_bytes())
        with pytest.raises(ValueError, match="has other weights than when the run was saved"):
            train(document(folder, teacher, steps=6))
    finally:
        weights.write_bytes(before)


@pytest.mark.slow
def test_a_killed_process_resumes_bit_for_bit(whole, teacher, tmp_path):
    """SIGKILL while step 2 is reported: a checkpoint of step 2 may be complete or not."""
    folder, _, _, tracker = whole
    file = tmp_path / "run.json"
    file.write_text(json.dumps(document(tmp_path, teacher)))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path]),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {QUICK}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "helpers.toy_distillation", str(file)]
    killed = subprocess.run([*command, "2"], env=environment, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL
    subprocess.run([*command, "-1"], env=environment, timeout=300, check=True)
    lines = [json.loads(line) for line in file.with_suffix(".log").read_text().splitlines()]
    losses = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    expected = {step: tracker.steps[step]["train/loss"] for step in range(4)}
    np.testing.assert_allclose([losses[n] for n in range(4)], [expected[n] for n in range(4)], rtol=1e-6)
    assert digests(tmp_path, 4).keys() == digests(folder, 4).keys()


def test_rows_are_a_function_of_seed_and_step():
    from levanter.data.train_dataset import BatchSchedule

    rows = CountingRows(schedule=BatchSchedule.of([(0, 8)]), seed=3, vocab=61, positions=16, shown=0)
    assert (np.diff(rows.take(5).astype(int), axis=1) % 61 < 4).all()
    assert (rows.take(5) == rows.take(5)).all() and (rows.take(5) != rows.take(6)).any()
