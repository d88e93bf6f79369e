"""What plans and verdicts say, as facts for golden files: bytes, places, names, and the numbers in their sentences."""

import re
from collections import defaultdict
from collections.abc import Sequence

from helpers.golden import Json, figures, fragments
from helpers.plan_cases import Case

from haliax_ext.meshspec import MeshSpec
from haliax_ext.plan_report import placed_shape
from haliax_ext.planner import Finding, ShardingPlan
from levanter.plan.aot import Compiled, Refused
from levanter.plan.load_budget import LoadBudget
from levanter.plan.verdict import ProgramVerdict, Verdict

EXCUSES = ("data parallelism", "allow_replicated", "declared", "below", "not checked")
"""Why an array may be replicated, each by a word that its sentence has."""


def mesh_facts(mesh: MeshSpec) -> dict[str, Json]:
    """Sizes, and which axes cross DCN."""
    return {"axes": mesh.shape, "dcn": list(mesh.dcn)}


def sharding_facts(plan: ShardingPlan, *, arrays: bool) -> dict[str, Json]:
    """A plan: mesh, mappings, totals, findings, and where things lie.

    Args:
        plan: of parameters or of activations.
        arrays: every array with its place; otherwise the bytes of each module.
    """
    mappings = plan.mappings
    return {
        "mesh": mesh_facts(plan.mesh),
        "mappings": {
            "params": str(mappings.params),
            **{f"params at {pattern}": str(rule) for pattern, rule in mappings.overrides},
            "compute": str(mappings.compute),
            "residual": str(mappings.residual),
            **({"attention": str(mappings.attention)} if mappings.attention else {}),
            **({"zigzag": list(mappings.zigzag)} if mappings.zigzag else {}),
        },
        "total_bytes": plan.total_bytes,
        "bytes_on_a_device": plan.bytes_per_device,
        "repeated_bytes": plan.replicated_bytes,
        "memory_of_a_device": plan.hbm_bytes,
        **({"arrays": array_facts(plan)} if arrays else {"number_of_arrays": len(plan.leaves), **_modules(plan)}),
        "errors": len(plan.errors),
        "findings": [_finding(plan, finding) for finding in plan.findings],
    }


def array_facts(plan: ShardingPlan) -> dict[str, Json]:
    """Every array: dtype, named shape with its places, number of pieces, bytes on a device."""
    return {
        each.leaf.path: [
            each.leaf.dtype.name,
            placed_shape(each),
            plan.mesh.ways(tuple(axis for axes in each.mesh_axes for axis in axes)),
            each.bytes_per_device,
        ]
        for each in plan.leaves
    }


def _modules(plan: ShardingPlan) -> dict[str, Json]:
    """Bytes on a device of what each module holds; a module is the path above an array's owner."""
    sums: dict[str, int] = defaultdict(int)
    for each in plan.leaves:
        parts = each.leaf.path.split(".")
        sums[".".join(parts[:-2] or parts[:-1]) or each.leaf.path] += each.bytes_per_device
    return {"modules": dict(sums)}


def _finding(plan: ShardingPlan, finding: Finding) -> dict[str, Json]:
    facts: dict[str, Json] = {
        "path": finding.path,
        "kind": finding.kind,
        "severity": finding.severity,
        "repeated_bytes": finding.nbytes,
        "figures": figures(finding.message),
    }
    if finding.kind == "replicated":
        # A finding names an array of the model, whose path in a training state is longer.
        placed = next(each for each in plan.leaves if each.leaf.path.endswith(finding.path))
        facts["whole_over"] = list(placed.replicated_over)
    if finding.kind == "replicated" and finding.error is None:
        facts["excuses"] = _excuses(finding.message)
    if finding.error is not None:
        facts["offers"] = fragments(finding.error.suggestion or "")
    return facts


def _excuses(message: str) -> dict[str, Json]:
    """`(model: declared, K and V; data: it shards no parameter (data parallelism))` by mesh axis."""
    reasons = re.search(r" \(([^()]*(?:\([^()]*\)[^()]*)*)\)$", message)
    assert reasons, message
    found: dict[str, Json] = {}
    for reason in re.split(r"; (?=\w+: )", reasons[1]):
        axis, _, why = reason.partition(": ")
        kinds = [word for word in EXCUSES if word in why]
        assert len(kinds) == 1, f"an excuse of another kind: {reason}"
        found[axis] = kinds[0]
    return found


def verdict_facts(case: Case, verdict: Verdict) -> dict[str, Json]:
    """A verdict without the compiler: a function of the config and the target alone."""
    facts: dict[str, Json] = {
        "command": case.command,
        "exit_code": verdict.exit_code,
        "headline": figures(verdict.headline),
        # What the first stage finds on this machine (files, tokenizers) is not a function of the config.
        "stages": {stage.name: [stage.status, *figures(stage.message)] for stage in verdict.stages[1:]},
    }
    if verdict.plan is None:
        findings = [finding for stage in verdict.stages for finding in stage.findings]
        return {**facts, "findings": [{"figures": figures(f), "offers": fragments(f)} for f in findings]}
    return {
        **facts,
        "notes": [figures(note) for note in verdict.notes],
        "bytes": _budget_facts(verdict),
        "sharding": sharding_facts(verdict.plan.sharding, arrays=False),
        "loading": _loading_facts(verdict.load),
    }


def _budget_facts(verdict: Verdict) -> dict[str, Json]:
    budget = verdict.budget
    assert budget is not None
    return {
        "inputs": dict(budget.arguments),
        "of": budget.largest,
        "groups": dict(budget.groups),
        "whole_on_every_chip": budget.replicated_bytes,
        "largest": [[r.path, r.dtype, r.spec, r.nbytes] for r in budget.residents[:5]],
    }


def _loading_facts(load: LoadBudget | None) -> dict[str, Json] | None:
    if load is None:
        return None
    leaf, extra = load.device_transient
    return {
        "source_bytes": load.source_bytes,
        "hosts": len(load.bytes_by_host),
        "most_bytes_of_a_host": max(load.bytes_by_host),
        "amplification": round(load.amplification, 6),
        "seconds": round(load.seconds, 3),
        "peak_of_a_device": load.device_peak,
        "beyond_the_shards": [extra, leaf],
        "peak_of_a_host": load.host_peak,
    }


def compiled_facts(case: Case, verdict: Verdict) -> dict[str, Json]:
    """What the compiler said: memory and communication of each Program. Times are modelled from these."""
    return {
        "command": case.command,
        "exit_code": verdict.exit_code,
        "programs": {program.name: _outcome(program) for program in verdict.programs if program.outcome is not None},
    }


def _outcome(program: ProgramVerdict) -> dict[str, Json]:
    outcome = program.outcome
    if isinstance(outcome, Refused):
        return {"refused": True, "needed": outcome.refusal.needed, "available": outcome.refusal.available}
    assert isinstance(outcome, Compiled), outcome
    memory = outcome.memory
    facts: dict[str, Json] = {
        "peak": program.peak_bytes,
        "inputs": memory.argument,
        "outputs": memory.output,
        "reused": memory.alias,
        "temporaries": memory.temp,
    }
    if program.time is not None:
        over = {f"{link.over} ({link.network})": link.total_bytes for link in program.time.links}
        facts["bytes_over"] = dict(sorted(over.items()))
        facts["without_an_estimate"] = _unknown(program.time.unknown)
    return facts


def _unknown(sentences: Sequence[str]) -> dict[str, Json]:
    """`160 executions of sort: the compiler gives no estimate` as sort → 160; other sentences as they are."""
    found: dict[str, Json] = {}
    for sentence in sentences:
        counted = re.match(r"(\d+) executions? of ([\w.-]+): ", sentence)
        found |= {counted[2]: int(counted[1])} if counted else {sentence: None}
    return dict(sorted(found.items()))
