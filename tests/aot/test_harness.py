"""A list of tasks on a v4-64, with the real TPU compiler: each bucket's memory, as docs/performance.md shows it."""

import importlib.util
from pathlib import Path

import pytest

from levanter.commands.harness.config import EvalHarnessConfig
from levanter.commands.harness.eval_harness import ENTRY_POINT
from levanter.config import load_written
from levanter.eval.harness import task_discovery
from levanter.eval.harness.tasks import UnavailableTaskError
from levanter.plan.aot import Compiled
from levanter.plan.preflight.pipeline import preflight
from levanter.plan.preflight.state import Question

CONFIG = Path(__file__).parents[2] / "config" / "harness" / "llama3.1_8b.yaml"
GIB = 1 << 30
PEAKS = {
    "score_512": 1.72,
    "score_1024": 1.72,
    "score_2048": 1.72,
    "score_4096": 1.72,
    "score_1024_all": 1.82,
    "score_4096_all": 1.82,
}
"""GiB on a chip at the peak, jax 0.10.2's compiler."""
pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]


def test_every_bucket_takes_what_the_page_says(monkeypatch):
    def absent(*_: object):
        raise UnavailableTaskError("eval_harness.task_spec: hellaswag: its documents cannot be had here")

    monkeypatch.setattr(task_discovery, "load_tasks", absent)
    argv = ["--config_path", str(CONFIG)]
    loaded = load_written(EvalHarnessConfig, argv)
    verdict = preflight(
        Question(
            target="v4-64",
            describe=lambda target: ENTRY_POINT.describe(loaded.config, target, written=loaded.written),
            provider="levanter.main.plan:describe",
            payload={"entry_point": "eval_harness", "argv": argv},
        )
    )
    assert verdict.exit_code == 0, verdict.headline
    outcomes = {each.name: each.outcome for each in verdict.programs if each.name in PEAKS}
    assert outcomes.keys() == PEAKS.keys()
    for name, outcome in outcomes.items():
        assert isinstance(outcome, Compiled) and outcome.figures is not None
        assert outcome.peak_bytes / GIB == pytest.approx(PEAKS[name], rel=0.03), name
