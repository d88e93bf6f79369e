"""Plans for GPUs that are not there, with XLA's real GPU compiler: the run's Programs, their bytes, what is refused.

Verdicts hold with any compiler. Figures are golden for the plugin that their file names.
"""

import re
from pathlib import Path

import pytest
import yaml
from helpers.golden import Json, assert_golden_compiled

from levanter.commands.catalog import ENTRY_POINTS
from levanter.config import load_written
from levanter.plan.aot import Compiled
from levanter.plan.collective_bytes import GATHERED, GRADIENTS, compiled_collective_bytes, step_collective_bytes
from levanter.plan.compile_cache import CompileCache
from levanter.plan.compilers import cuda_plugin
from levanter.plan.hbm_lower_bound import program_lower_bound
from levanter.plan.preflight.pipeline import preflight
from levanter.plan.preflight.state import Question, Scope
from levanter.plan.verdict import ProgramVerdict, Verdict

CONFIGS = Path(__file__).parents[2] / "config"
GIB = 1 << 30
pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(cuda_plugin() is None, reason="JAX's CUDA plugin is not installed (the `plan-gpu` extra)"),
]
SEVEN, SEVENTY = "train/llama2_7b_v4-32", "train/llama2_70b_v4-256"
OVER_HOSTS = "--trainer.mesh.param_mapping={embed: [replica_dcn, data]}"


def planned(entry_point: str, config: str, target: str, *options: str, scope: Scope = "timed") -> Verdict:
    """The verdict on a run, compiled; a user's plan has the scope `run`."""
    reference = ENTRY_POINTS[entry_point]
    argv = ["--config_path", str(CONFIGS / f"{config}.yaml"), *options]
    loaded = load_written(reference.config_class(), argv)
    entry = reference.load()
    question = Question(
        target=target,
        describe=lambda target: entry.describe(loaded.config, target, written=loaded.written),
        provider="levanter.commands.planning:describe",
        payload={"entry_point": entry_point, "argv": argv},
        scope=scope,
        kept=CompileCache.here(),
    )
    return preflight(question)


def compiled_step(verdict: Verdict, name: str = "train_step") -> tuple[ProgramVerdict, Compiled]:
    program = next(each for each in verdict.programs if each.name == name)
    assert isinstance(program.outcome, Compiled), verdict.headline
    return program, program.outcome


def facts(verdict: Verdict, name: str) -> dict[str, Json]:
    program, outcome = compiled_step(verdict, name)
    memory, figures = outcome.memory, outcome.figures
    assert figures is not None
    return {
        "headline": verdict.headline.split(";")[0],
        "peak": program.peak_bytes,
        "inputs": memory.argument,
        "outputs": memory.output,
        "reused": memory.alias,
        "temporaries": memory.temp,
        "bytes_over": {
            " ".join((kind, over, network)): size for (kind, over, network), size in figures.collective_bytes().items()
        },
        "unknown": list(figures.unknown),
    }


@pytest.mark.ci
@pytest.mark.golden
def test_a_train_step_on_one_host():
    """Llama 2 7B under FSDP on eight H100s: inputs to the byte, results in place, every weight gathered three times."""
    verdict = planned("train_lm", SEVEN, "h100x8", "--trainer.train_batch_size=16")
    program, outcome = compiled_step(verdict)
    assert verdict.exit_code == 0 and verdict.headline.startswith("fits: 16."), verdict.headline
    assert verdict.plan is not None and verdict.budget is not None
    memory, figures = outcome.memory, outcome.figures
    # A GPU stores arrays without padding, so arithmetic knows the inputs exactly; the batch is no part of the state.
    assert memory.argument == verdict.budget.arguments["train_step"]
    assert memory.argument - memory.alias < 1 << 17
    # cuDNN's workspace is in no figure of the compiler.
    assert figures is not None and figures.workspace_bytes > 0
    compiled = memory.argument + memory.output - memory.alias + memory.temp + memory.generated_code
    assert program.peak_bytes == compiled + figures.workspace_bytes
    limit = verdict.plan.target.hbm_bytes
    assert limit is not None and program.peak_bytes is not None
    bound = program_lower_bound(verdict.plan, "train_step", hbm_bytes=limit)
    assert bound.total <= program.peak_bytes
    # The compiler's transfers are those that arithmetic expects: weights gathered, gradients scattered, nothing more.
    # It adds gradients up in the 16 bits in which the products make them; arithmetic says float32.
    assert not figures.unknown
    expected = step_collective_bytes(verdict.plan)
    for kind, purpose, share in (("all-gather", GATHERED, 1.0), ("reduce-scatter", GRADIENTS, 0.5)):
        moved = compiled_collective_bytes(outcome.mesh, tuple(c for c in figures.collectives if c.kind == kind))
        assert moved.dcn == 0 and moved.ici == pytest.approx(share * expected[purpose].ici, rel=0.08), kind
    assert_golden_compiled(
        "compiled/gpu_llama2_7b_h100x8.json", facts(verdict, "train_step"), compiler="jax-cuda13-plugin"
    )


@pytest.mark.ci
def test_a_train_step_over_hosts():
    """70B on eight hosts: its inputs do not fit if sharded inside of each host; sharded over all of them they do."""
    inside = planned("train_lm", SEVENTY, "h100x64", "--trainer.train_batch_size=64")
    assert inside.exit_code == 3 and "(inputs of train_step alone)" in inside.headline
    assert any("optimizer" in line or "mlp" in line for line in inside.stages[1].findings + inside.programs[-1].why_not)
    verdict = planned("train_lm", SEVENTY, "h100x64", "--trainer.train_batch_size=64", OVER_HOSTS)
    program, outcome = compiled_step(verdict)
    assert verdict.exit_code == 0, verdict.headline
    assert verdict.plan is not None and verdict.budget is not None and outcome.figures is not None
    assert outcome.memory.argument == verdict.budget.arguments["train_step"]
    assert outcome.memory.argument < 13 * GIB
    # The axis between hosts has its own devices of each host: what crosses is seen as such.
    networks = {each.network for each in outcome.figures.collectives if each.members > 1}
    assert "dcn" in networks and "unknown" not in networks
    assert program.peak_bytes is not None and program.peak_bytes < 59.4 * GIB


RUNS = (
    ("eval_lm", "eval/gemma3_27b", ("score",)),
    ("eval_careless_lm", "memorization/llama3.1_8b", ("score",)),
    ("lora_lm", "lora/llama3_8b_v6e-8", ("train_step",)),
    ("train_dpo", "dpo/llama3_8b_v5p-8", ("train_step", "evaluate_pairs")),
    ("serve", "serve/llama3.1_70b_int8", ("decode_256",)),
)
"""The commands besides `train_lm`: a configuration, and Programs of it; of text the largest prefill call too."""
ROWS_OF_64 = {"lora_lm": "--trainer.train_batch_size=64", "train_dpo": "--trainer.train_batch_size=64"}


IN_CI = ("eval_careless_lm", "h100x64")


@pytest.mark.golden
@pytest.mark.parametrize(
    ("entry_point", "config", "programs", "target"),
    [
        pytest.param(*run, target, id=f"{run[0]}-{target}", marks=[pytest.mark.ci] if (run[0], target) == IN_CI else [])
        for run in RUNS
        for target in ("h100x8", "h100x64")
    ],
)
def test_every_kind_of_run(entry_point, config, programs, target):
    """Each command's own Programs compile, and what they take is what arithmetic counts of inputs and more."""
    options = (ROWS_OF_64[entry_point],) if target == "h100x64" and entry_point in ROWS_OF_64 else ()
    verdict = planned(entry_point, config, target, *options, scope="run")
    assert verdict.exit_code == 0 and verdict.headline.startswith("fits: "), verdict.headline
    assert verdict.budget is not None
    compiled = {each.name: each.outcome for each in verdict.programs if isinstance(each.outcome, Compiled)}
    programs += tuple(name for name in compiled if name.startswith("prefill_") and name.endswith("x512"))
    assert set(programs) <= compiled.keys()
    for name in programs:
        # The compiler drops an input that the function never reads.
        assert compiled[name].memory.argument == pytest.approx(verdict.budget.arguments[name], rel=1e-3)
        figures = compiled[name].figures
        assert figures is not None
        assert all(collective.network != "unknown" for collective in figures.collectives if collective.members > 1)
    assert_golden_compiled(
        f"compiled/gpu_{entry_point}_{target}.json",
        {name: facts(verdict, name) for name in programs},
        compiler="jax-cuda13-plugin",
    )


def test_what_does_not_fit_is_refused_with_its_arrays_and_a_way_out_that_fits():
    """Without recomputation 128 rows are too many; the layout that the report suggests is compiled, and fits."""
    options = ("--trainer.train_batch_size=128", "--model.gradient_checkpointing=false")
    verdict = planned("train_lm", SEVEN, "h100x8", *options)
    program, _ = compiled_step(verdict)
    assert verdict.exit_code == 3 and program.peak_bytes is not None and program.peak_bytes > 59.3 * GIB
    text = "\n".join(program.why_not)
    assert "largest activation: " in text and "may fit: " in text
    suggestion = re.search(r"may fit: (.*?)  # ", text)
    assert suggestion is not None
    words = tuple(f"--{key}={value}" for key, value in flat("", yaml.safe_load(f"{{{suggestion[1]}}}")))
    assert planned("train_lm", SEVEN, "h100x8", *options, *words).exit_code == 0


def flat(at: str, value: object) -> list[tuple[str, object]]:
    """Nested options as (dotted name, value)."""
    if isinstance(value, dict):
        return [pair for key, each in value.items() for pair in flat(f"{at}.{key}" if at else key, each)]
    return [(at, value if value is not None else "null")]
