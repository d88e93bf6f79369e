"""Steps of published shapes, compiled for the GPUs that they were run on: modelled speeds against the published ones.

The other code is PyTorch with flash attention, so ours runs cuDNN's kernel and sees whole rows. A step that does not
fit here says nothing about theirs and is left out: without recomputation ours saves more.
"""

from pathlib import Path

import pytest
import yaml
from helpers.published_gpu import HELD_OUT, ROWS, Published, document, published_seconds

from levanter.commands.catalog import ENTRY_POINTS
from levanter.config import load_written
from levanter.plan.aot import Compiled
from levanter.plan.compile_cache import CompileCache
from levanter.plan.compilers import cuda_plugin
from levanter.plan.preflight.pipeline import preflight
from levanter.plan.preflight.state import Question

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(cuda_plugin() is None, reason="JAX's CUDA plugin is not installed (the `plan-gpu` extra)"),
]
CALIBRATING = (ROWS[1], ROWS[4], ROWS[6])
"""What the shares of matmuls in `gpu_kernel_time` were read off; all others test them."""
TESTING = (ROWS[3], *(row for row in HELD_OUT if row.recomputed))


def written(row: Published, folder: Path) -> list[str]:
    """The words of the run's command line, with its configuration in a file."""
    run = document(row)
    run["model"] = {**run["model"], "attn_backend": "cudnn"}
    run["data"] = {**run["data"], "block_cross_document_attention": False}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return ["--config_path", str(path)]


@pytest.mark.parametrize("row", [*CALIBRATING, *TESTING], ids=lambda row: f"{row.size}-{row.target}-{row.seq}")
def test_modelled_speeds(row, tmp_path):
    reference, argv = ENTRY_POINTS["train_lm"], written(row, tmp_path)
    loaded = load_written(reference.config_class(), argv)
    entry = reference.load()
    question = Question(
        target=row.target,
        describe=lambda target: entry.describe(loaded.config, target, written=loaded.written),
        provider="levanter.commands.planning:describe",
        payload={"entry_point": "train_lm", "argv": argv},
        kept=CompileCache.here(),
    )
    verdict = preflight(question)
    assert verdict.exit_code == 0 and verdict.plan is not None, verdict.headline
    step = next(program for program in verdict.programs if program.name == "train_step")
    assert isinstance(step.outcome, Compiled) and step.time is not None and not step.time.unknown
    published = published_seconds(row, verdict.plan)
    assert step.time.low < published < step.time.high
    share = 0.1 if row in CALIBRATING else 0.25
    assert step.time.expected == pytest.approx(published, rel=share)
