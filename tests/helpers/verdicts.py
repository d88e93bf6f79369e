"""Verdicts made by hand: a tiny Llama planned for a v4-16, and what real compilers once said of a small program.

The plan is real (`plan_sharding`), the compiled figures are read from `tests/golden/hlo/`, and the rest is stated here,
so that a report can be checked against numbers that are on this page.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from helpers.golden import GOLDEN
from helpers.tiny_llama import tiny_leaves

from haliax_ext.hlo import MemoryFigures, read_figures, read_out_of_memory
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from levanter.hardware import parse_accelerator
from levanter.plan.aot import Compiled, Refused
from levanter.plan.device_order import pod_coordinates
from levanter.plan.hbm_budget import Budget, Resident, by_group, sharding_text
from levanter.plan.load_budget import LoadBudget
from levanter.plan.step_time_model import LinkUse, StepTime, mfu
from levanter.plan.target_from_name import pod_target
from levanter.plan.verdict import ProgramVerdict, Stage, Verdict
from levanter.runplan import Check, RunPlan, Workload

MESH = MeshSpec.of(data=4, model=2)
POD = parse_accelerator("v4-16")
GIB = 1 << 30
CLOCK = 1.05e9
# Beside the tiny weights, so that bars have something to show.
CACHE, BATCH = 6 * GIB, 3 * GIB // 2
GROUPS = {"embeddings": "embedding", "self_attn": "attention", "mlp": "mlp"}


def tiny_plan(**changes: Any) -> RunPlan:
    """A tiny Llama on data 4 × model 2 of a v4-16."""
    mappings = Mappings(params=AxisMapping({"mlp": "model", "kv_head": "model", "embed": "data"}))
    sharding = plan_sharding(tiny_leaves(), mappings, MESH)
    values: dict[str, Any] = {
        "entry_point": "eval_lm",
        "target": pod_target(POD),
        "mesh": MESH,
        "checks": (
            Check(name="data", status="ok", message="docs: 3 files"),
            Check(name="tokenizer", status="unchecked", message="org/model <not> here & now"),
            Check(name="batch", status="note", message="8 rows of 64 tokens"),
        ),
        "sharding": sharding,
        "activations": plan_sharding([], mappings, MESH),
        "load": None,
        "computing": (),
        "work": None,
        "notes": ("mesh: nothing was said of `data`, so it takes what is left",),
    }
    return RunPlan(**(values | changes))


def tiny_budget(plan: RunPlan, *, more: Sequence[Resident] = ()) -> Budget:
    """The tiny weights and a cache of 6 GiB and a batch of 1.5 GiB."""
    residents = [
        Resident(
            path=f"model.{leaf.leaf.path}",
            group=next((group for name, group in GROUPS.items() if name in leaf.leaf.path), "norm"),
            axes=leaf.leaf.axes,
            dtype=leaf.leaf.dtype.name,
            spec=sharding_text(leaf, MESH),
            nbytes=leaf.bytes_per_device,
            whole_bytes=leaf.leaf.nbytes,
            shard_shape=leaf.shard_shape,
            replicated_over=leaf.replicated_over,
        )
        for leaf in plan.sharding.leaves
    ]
    cache = Resident(
        path="cache.keys",
        group="kv cache",
        axes=(("batch", 64), ("position", 4096)),
        dtype="bfloat16",
        spec="batch → data",
        nbytes=CACHE,
        whole_bytes=4 * CACHE,
        replicated_over=("model",),
    )
    batch = Resident(
        path="tokens",
        group="batch",
        axes=(("batch", 64), ("position", 64)),
        dtype="int32",
        spec="replicated",
        nbytes=BATCH,
        whole_bytes=BATCH,
        replicated_over=("data", "model"),
    )
    found = sorted([*residents, cache, batch, *more], key=lambda resident: -resident.nbytes)
    return Budget(
        arguments={"small": sum(r.nbytes for r in found), "little": 1000},
        groups=by_group(found),
        replicated_bytes=sum(r.nbytes for r in found if r.replicated),
        residents=tuple(found),
        hbm_bytes=POD.hbm_bytes,
        largest="small",
    )


def loading() -> LoadBudget:
    return LoadBudget(
        source_bytes=16 * GIB,
        bytes_by_host=(8 * GIB, 9 * GIB),
        amplification=17 / 16,
        device_transient=("transformer.layers.stacked.mlp.gate_proj.weight", GIB // 2),
        device_peak=5 * GIB,
        host_peak=3 * GIB,
        gigabytes_per_second=2.0,
        seconds=4.83,
    )


def compiled(budget: Budget) -> Compiled:
    """What the v4 compiler said of `described_programs.small`; its memory is stated here."""
    figures = read_figures((GOLDEN / "hlo" / "small_v4.txt").read_text(), MESH)
    inputs = budget.arguments["small"]
    memory = MemoryFigures(
        argument=inputs + 4096, output=GIB, alias=GIB // 2, temp=5 * GIB, generated_code=1 << 20, peak=inputs + 4 * GIB
    )
    return Compiled(
        name="small",
        mesh=MESH,
        memory=memory,
        figures=figures,
        text_error=None,
        coordinates=tuple(tuple(int(c) for c in device) for device in pod_coordinates(MESH, POD)),
        lower_seconds=1.5,
        compile_seconds=12.25,
    )


def refused() -> Refused:
    """The refusal of a v6e compiler that lists its largest allocations."""
    refusal = read_out_of_memory((GOLDEN / "hlo" / "refusal_long.txt").read_text())
    assert refusal is not None
    return Refused(name="small", mesh=MESH, refusal=refusal, lower_seconds=1.5, compile_seconds=9.0)


def fitting_verdict(**changes: Any) -> Verdict:
    """A verdict that fits, with everything in it."""
    plan = changes.pop("plan", None) or tiny_plan()
    budget = changes.pop("budget", None) or tiny_budget(plan)
    outcome = compiled(budget)
    assert outcome.figures is not None
    work = Workload(
        program="small",
        tokens=4_096,
        unit="windows",
        items=64,
        flops_full=3e11,
        flops_causal=2e11,
        executions=100,
        reason="6,400 windows of the book",
    )
    time = StepTime(
        cycles=outcome.figures.total_cycles / CLOCK,
        kernels_at_peak=0.0,
        kernels_expected=0.0,
        memory=25e-6,
        links=(
            LinkUse(over="data", network="ici", busy=350e-6, exposed=300e-6, total_bytes=36 << 20),
            LinkUse(over="model", network="ici", busy=16e-6, exposed=0.0, total_bytes=192 << 10),
        ),
        peak=90e-6,
        cycle_scale=1.25,
        unknown=("2 executions of sort: the compiler gives no estimate",),
    )

    def utilization(flops: float) -> tuple[float, float]:
        return mfu(flops, accelerator=POD, seconds=time.high), mfu(flops, accelerator=POD, seconds=time.low)

    program = ProgramVerdict(
        name="small",
        outcome=outcome,
        time=time,
        workload=work,
        mfu=utilization(work.flops_causal),
        mfu_full=utilization(work.flops_full),
    )
    values: dict[str, Any] = {
        "plan": plan,
        "target": "v4-16",
        "accelerator": POD,
        "budget": budget,
        "load": loading(),
        "programs": (program, ProgramVerdict(name="little", outcome=None)),
        "stages": (
            Stage(name="config", status="unchecked", seconds=0.25, message="sound; 1 not checked here"),
            Stage(name="sharding", status="ok", seconds=0.031, message="7.50 of 30.75 GiB a chip"),
            Stage(name="compile", status="ok", seconds=13.75, message="small compiled"),
        ),
        "exit_code": 0,
        "headline": "fits: 11.50 of 30.75 GiB a chip",
    }
    return Verdict(**(values | changes))


def refused_verdict(**changes: Any) -> Verdict:
    """One that the compiler refused."""
    plan = tiny_plan()
    why = ("small needs 36.93 GiB on a chip", "would take less: {embed: [data, model]}\n  → params:\n      embed: data")
    values: dict[str, Any] = {
        "plan": plan,
        "target": "v6e-8",
        "accelerator": parse_accelerator("v6e-8"),
        "budget": replace(tiny_budget(plan), hbm_bytes=parse_accelerator("v6e-8").hbm_bytes),
        "load": None,
        "programs": (ProgramVerdict(name="small", outcome=refused(), why_not=why),),
        "stages": (
            Stage(
                name="compile",
                status="refused",
                seconds=10.5,
                message="small does not fit",
                findings=("small does not fit: 36.93 GiB > 31.25 GiB",),
            ),
        ),
        "exit_code": 3,
        "headline": "does not fit: 36.93 GiB > 31.25 GiB (small)",
    }
    return Verdict(**(values | changes))


def failed_verdict(**changes: Any) -> Verdict:
    """A run that could not be described at all."""
    values: dict[str, Any] = {
        "plan": None,
        "target": "v5p-128",
        "accelerator": parse_accelerator("v5p-128"),
        "budget": None,
        "load": None,
        "programs": (),
        "stages": (
            Stage(
                name="config",
                status="refused",
                seconds=0.125,
                message="the run cannot be described",
                findings=("heads 12 do not divide by model 8",),
            ),
        ),
        "exit_code": 2,
        "headline": "cannot be planned: heads 12 do not divide by model 8",
    }
    return Verdict(**(values | changes))


# What somebody may have put in a path, a YAML file or an error.
HOSTILE = "</script><script>alert(1)</script> \"'&amp; \x1b[31mred\x07 \u202egnp 日本語 naïve \udc80 {{x}}"


def hostile_verdict(**changes):
    """A verdict whose every text is hostile."""
    plan = tiny_plan(
        entry_point=f"eval_lm{HOSTILE}",
        checks=(Check(name=HOSTILE, status="unchecked", message=HOSTILE),),
        notes=(HOSTILE, f"two\nlines {HOSTILE}"),
    )
    more = Resident(
        path=f"model.{HOSTILE}.weight",
        group="other weights",
        axes=((HOSTILE, 4096),),
        dtype="float32",
        spec=HOSTILE,
        nbytes=2 * GIB,
        whole_bytes=2 * GIB,
        replicated_over=("data",),
    )
    verdict = fitting_verdict(plan=plan, budget=tiny_budget(plan, more=[more]), headline=HOSTILE, **changes)
    stages = tuple(replace(stage, message=HOSTILE, findings=(HOSTILE,)) for stage in verdict.stages)
    first = replace(verdict.programs[0], why_not=(HOSTILE,), name=HOSTILE)
    return replace(verdict, stages=stages, programs=(first, *verdict.programs[1:]), target=HOSTILE, exit_code=3)
