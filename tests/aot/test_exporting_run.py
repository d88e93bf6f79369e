"""A run that trains Gemma 3 27B on v5e and exports it: everything that it does fits, by the TPU compiler.

Its embedding, whole in float32, needed 15.85 GiB of an empty chip's 15.75: a run whose steps fitted ended when it
exported. The verdict is over the export too, and the export brings pieces.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from haliax_ext.replica_slices import PROGRAM_NAME
from levanter.commands.train.lm import train_lm
from levanter.config import load_written
from levanter.plan.aot import Compiled, compile_programs
from levanter.plan.compile_cache import CompileCache
from levanter.plan.preflight.pipeline import preflight
from levanter.plan.preflight.state import Question
from levanter.plan.target_from_name import pod_target
from levanter.runplan import RunPlan, Target

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]
CONFIGS = Path(__file__).parents[2] / "config"
TARGET = "v5e-64"
RUN = """
extends: [{configs}/mesh/default.yaml, {configs}/model/gemma3_27b.yaml]
data: {{tokenizer: google/gemma-3-27b-pt}}
model: {{max_seq_len: 2048, gradient_checkpointing: true}}
optimizer: {{type: adam, learning_rate: 1.0e-5, weight_decay: 0.1, warmup: 100}}
hf_save_path: exports
trainer:
  mp: p=f32,c=bfloat16
  train_batch_size: 32
  num_train_steps: 1000
  mesh: {{axes: {{data: -1, model: 4}}}}
"""
EMBEDDING = 262_208 * 5_376 * 4
GIB = 1 << 30


def described(payload: dict[str, Any], target: Target) -> RunPlan:
    """What the compile worker calls."""
    loaded = load_written(train_lm.TrainLmConfig, ["--config_path", payload["config"]])
    return train_lm.describe(loaded.config, target, written=loaded.written)


def the_run(folder: Path) -> dict[str, Any]:
    path = folder / "gemma3_27b.yaml"
    path.write_text(RUN.format(configs=CONFIGS))
    return {"config": str(path)}


def is_export(name: str) -> bool:
    """Whether a Program brings a piece of an array to the hosts."""
    return name.startswith("save.") and name != PROGRAM_NAME


def test_its_exports_fit_beside_the_state(tmp_path):
    """Every Program of the run that exports, and what lies on a chip while it does: parameters and both moments."""
    payload, target = the_run(tmp_path), pod_target(TARGET)
    plan = described(payload, target)
    names = [program.name for program in plan.programs if is_export(program.name)]
    state = 3 * plan.sharding.bytes_per_device
    assert names and state > 4 * GIB and target.hbm_bytes is not None
    provider = f"{__file__}:described"
    found = compile_programs(provider, payload, target=TARGET, programs=names, kept=CompileCache.here())
    assert {each.name for each in found} == set(names)
    for outcome in found:
        assert isinstance(outcome, Compiled), outcome.name
        # What is made on a chip is a piece, however large the array is, and fits beside everything.
        made = outcome.memory.output + outcome.memory.temp
        assert made < GIB < EMBEDDING / 4 and state + made < target.hbm_bytes, outcome.name


def test_all_that_the_run_does_fits(tmp_path):
    payload = the_run(tmp_path)
    verdict = preflight(
        Question(
            target=TARGET,
            describe=lambda target: described(payload, target),
            provider=f"{__file__}:described",
            payload=payload,
            kept=CompileCache.here(),
            scope="run",
        )
    )
    assert verdict.exit_code == 0, verdict.headline
    names = [program.name for program in verdict.programs]
    assert "train_step" in names and any(map(is_export, names))
