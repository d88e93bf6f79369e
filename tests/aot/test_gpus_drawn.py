"""Ten shapes that no figure was tuned on, drawn by a seed: the plan's memory against a count from the compiled text."""

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.golden import Json, assert_golden_compiled
from helpers.gpu_buffers import count

from levanter.commands.catalog import ENTRY_POINTS
from levanter.config import load_written
from levanter.hardware import parse_accelerator
from levanter.plan.aot import Compiled
from levanter.plan.compile_cache import CompileCache
from levanter.plan.compilers import cuda_plugin
from levanter.plan.hbm_lower_bound import program_lower_bound
from levanter.plan.preflight.pipeline import preflight
from levanter.plan.preflight.state import Question
from levanter.plan.verdict import Verdict

SEED = 20261128
TARGETS = (
    "h100x8", "l4x8", "h200x16", "a100-40x8", "b200x8", "h100x64", "a100x16", "gb200x8", "rtx6000prox4", "h100x32",
)  # fmt: skip
pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(cuda_plugin() is None, reason="JAX's CUDA plugin is not installed (the `plan-gpu` extra)"),
]


def drawn(number: int) -> dict[str, Any]:
    """A training run: a family, sizes, a layout and rows, drawn for one of the targets."""
    choice = random.Random(f"{SEED} {number}").choice
    pod = parse_accelerator(TARGETS[number])
    family = choice(("llama", "llama", "mixtral", "qwen3", "gpt2"))
    head_size, heads = choice((64, 128)), choice((8, 16, 24, 32))
    kv_heads = heads if family == "gpt2" else choice([n for n in (4, 8) if heads % n == 0])
    hidden = head_size * heads
    ways = choice([n for n in (1, 1, 2, 4) if kv_heads % n == 0 and pod.chips_per_host % n == 0])
    inside = choice(("data", "all")) if pod.slices > 1 else "data"
    model = {
        "type": family,
        "hidden_dim": hidden,
        "num_heads": heads,
        "num_layers": choice((2, 3, 4, 6)),
        "vocab_size": choice((32000, 50432, 128256, 151936, 262144)),
        "max_seq_len": choice((1024, 2048, 4096, 8192)),
        "gradient_checkpointing": choice((True, True, False)),
    }
    if family != "gpt2":
        model |= {"num_kv_heads": kv_heads, "intermediate_dim": choice((2, 3, 4)) * hidden}
    if family == "mixtral":
        model |= {"n_routed_experts": choice((4, 8, 16)), "intermediate_dim": hidden}
    rows = choice((4, 8, 16, 32, 64)) * pod.devices // ways
    if family == "mixtral":
        # Kernels of experts take the assembler ten minutes at 512 rows.
        rows //= 4
    embed = ["replica_dcn", "data"] if inside == "all" else "data"
    return {
        "model": model,
        "data": {"tokenizer": "no-such/tokenizer", "components": {"a": {"source": {"train_urls": ["a.txt"]}}}},
        "trainer": {
            "mp": choice(("p=f32,c=bfloat16", "p=f32,c=bfloat16", "bfloat16")),
            "train_batch_size": rows,
            "num_train_steps": 1,
            "mesh": {
                "axes": {"model": ways},
                "shared_mapping": {"mlp": "model", "heads": "model", "vocab": "model"},
                "param_mapping": {"embed": embed},
            },
        },
    }  # fmt: skip


def planned(number: int, folder: Path) -> Verdict:
    """The plan of a drawn run; the compiler's text of its step stays in the folder."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(drawn(number)))
    reference, argv = ENTRY_POINTS["train_lm"], ["--config_path", str(path)]
    loaded = load_written(reference.config_class(), argv)
    entry = reference.load()
    question = Question(
        target=TARGETS[number],
        describe=lambda target: entry.describe(loaded.config, target, written=loaded.written),
        provider="levanter.commands.planning:describe",
        payload={"entry_point": "train_lm", "argv": argv},
        scope="timed",
        keep_text=folder,
        kept=CompileCache.here(),
    )
    return preflight(question)


# One that does not fit: its step keeps what every layer makes.
IN_CI = 3


@pytest.mark.golden
@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=pytest.mark.ci if n == IN_CI else pytest.mark.slow) for n in range(len(TARGETS))],
    ids=lambda number: TARGETS[number],
)
def test_a_drawn_shape_needs_what_its_buffers_take(number, tmp_path):
    verdict = planned(number, tmp_path)
    assert verdict.plan is not None and verdict.budget is not None
    limit = verdict.plan.target.hbm_bytes
    (step,) = (program for program in verdict.programs if program.name == "train_step")
    assert isinstance(step.outcome, Compiled) and step.peak_bytes is not None and limit is not None, verdict.headline
    memory, counted = step.outcome.memory, count((tmp_path / "train_step.hlo.txt").read_text())
    assert memory.argument == counted.inputs == verdict.budget.arguments["train_step"]
    # The state is written over the old one. What remains are scalars, and the table of a result tuple.
    assert 0 <= memory.output - memory.alias - counted.results < 1 << 10
    assert memory.output - memory.alias < 1 << 16
    # XLA packs buffers of other sizes into gaps, and pads what it cannot pack.
    assert counted.temporaries == pytest.approx(memory.temp, rel=0.07)
    total = counted.inputs + counted.results + counted.temporaries
    assert verdict.exit_code == (3 if total > limit else 0), verdict.headline
    bound = program_lower_bound(verdict.plan, "train_step", hbm_bytes=limit)
    assert bound.total <= step.peak_bytes
    facts: dict[str, Json] = {
        "model": drawn(number)["model"],
        "rows": drawn(number)["trainer"]["train_batch_size"],
        "limit": limit,
        "at_least": bound.total,
        "inputs": memory.argument,
        "temporaries": memory.temp,
        "temporaries_counted": counted.temporaries,
        "peak": step.peak_bytes,
    }
    assert_golden_compiled(f"compiled/gpu_drawn_{TARGETS[number]}.json", facts, compiler="jax-cuda13-plugin")
