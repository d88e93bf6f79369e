"""A list of tasks, planned for a pod: buckets, Programs, how often they run. Figures are by hand."""

from pathlib import Path

import pytest

from levanter.commands.harness.config import EvalHarnessConfig
from levanter.commands.harness.plan import describe
from levanter.config import load_written
from levanter.eval.harness import task_discovery
from levanter.eval.harness.tasks import UnavailableTaskError
from levanter.plan.target_from_name import pod_target

CONFIG = Path(__file__).resolve().parents[4] / "config" / "harness" / "llama3.1_8b.yaml"


@pytest.fixture
def plan(monkeypatch):
    """Of Llama 3.1 8B on a v4-64, without the tasks' documents and without a tokenizer."""

    def absent(*_: object):
        raise UnavailableTaskError("eval_harness.task_spec: hellaswag: its documents are not available here")

    monkeypatch.setattr(task_discovery, "load_tasks", absent)
    loaded = load_written(EvalHarnessConfig, ["--config_path", str(CONFIG)])
    return describe(loaded.config, pod_target("v4-64"), written=loaded.written)


def test_buckets_programs_and_runs(plan):
    assert not plan.errors and plan.target.devices == 32
    # 16,384 tokens a chip, on 32 chips, in rows of six shapes.
    shapes = {name: 32 * 16384 // length for name, length in LENGTHS.items()}
    assert [program.name for program in plan.computing] == list(LENGTHS)
    for program in plan.computing:
        batch = {each.name: [axis.size for axis in each.value.axes] for each in program.inputs[1:]}
        length, slots = LENGTHS[program.name], LENGTHS[program.name] // (1 if "all" in program.name else 4)
        assert batch["tokens"] == [shapes[program.name], length] and batch["targets"] == [shapes[program.name], slots]
    # 57,606 requests of 128 tokens, four to a row of 512.
    runs = {each.program: each.executions for each in plan.workloads}
    assert {each.reason for each in plan.workloads} == {"57,606 requests (plan.assume_requests)"}
    assert runs == {**dict.fromkeys(LENGTHS, 0), "score_512": -(-57_606 // 4 // 1024)}


LENGTHS = {
    "score_512": 512,
    "score_1024": 1024,
    "score_2048": 2048,
    "score_4096": 4096,
    "score_1024_all": 1024,
    "score_4096_all": 4096,
}


def test_flops_of_a_batch_are_those_of_its_tokens(plan):
    # Two per weight: q and o, k and v, three of the feed-forward part; the head for a quarter of the positions.
    weights = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    (work,) = [each for each in plan.workloads if each.program == "score_512"]
    scores = 32 * 4 * 4096 * 512
    expected = 1024 * (512 * (2 * weights + scores) + 128 * 2 * 4096 * 128256)
    assert work.flops_full == pytest.approx(expected, rel=1e-6)
