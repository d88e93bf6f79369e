"""Verdicts as plain values, for `--json`.

The keys are a public format: they carry their unit (`_bytes`, `_seconds`), ranges are `{"low": …, "high": …}`, and
unknown values are `null`. `schema` grows when a key is removed or changes its meaning; keys may be added.
"""

import math
from collections.abc import Sequence
from typing import Any

from levanter.plan.aot import Compiled, Refused
from levanter.plan.hbm_budget import Resident
from levanter.plan.report import timing, view
from levanter.plan.report.before_you_pay import cost_values
from levanter.plan.report.serving import serving_values
from levanter.plan.verdict import ProgramVerdict, Verdict


def to_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The verdicts as dictionaries, lists, strings, numbers and nulls."""
    return {
        "schema": view.SCHEMA,
        "times": view.MODELLED,
        "verdicts": [_plain(_verdict(verdict)) for verdict in verdicts],
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    plan, budget = verdict.plan, verdict.budget
    main = view.main_program(verdict)
    return {
        "target": verdict.target,
        "entry_point": None if plan is None else plan.entry_point,
        "state": view.state(verdict),
        "exit_code": verdict.exit_code,
        "fits": verdict.fits,
        "headline": verdict.headline,
        "chips": view.chips(verdict),
        "hosts": None if plan is None else plan.target.hosts,
        "devices": None if plan is None else plan.target.devices,
        "mesh": None if plan is None else {"axes": dict(plan.mesh.axes), "dcn": list(plan.mesh.dcn)},
        "hbm_bytes": None if budget is None else budget.hbm_bytes,
        "peak_bytes": view.most_bytes(verdict),
        "lower_bound_bytes": verdict.lower_bound,
        "main_program": None if main is None else main.name,
        "job_seconds": _range(view.job_seconds(verdict)),
        "stages": [
            {
                "name": stage.name,
                "status": stage.status,
                "seconds": stage.seconds,
                "message": stage.message,
                "findings": list(stage.findings),
            }
            for stage in verdict.stages
        ],
        "findings": list(view.findings(verdict)),
        "why_not": list(view.reasons(verdict)),
        "bytes": _bytes(verdict),
        "arrays": [] if budget is None else [_resident(resident) for resident in budget.residents],
        "loading": _loading(verdict),
        "serving": serving_values(verdict),
        "cost": cost_values(verdict),
        "programs": [_program(verdict, program) for program in verdict.programs],
        "not_checked": list(view.unchecked(verdict)),
        "not_modelled": list(view.unknown(verdict)),
        "notes": list(view.notes(verdict)),
    }


def _bytes(verdict: Verdict) -> dict[str, Any] | None:
    occupancy = view.occupancy(verdict)
    if occupancy is None or verdict.budget is None:
        return None
    return {
        "program": occupancy.program,
        "source": occupancy.source,
        "used_bytes": occupancy.used,
        "limit_bytes": occupancy.limit,
        "groups": {segment.name: segment.nbytes for segment in occupancy.segments},
        "replicated_bytes": verdict.budget.replicated_bytes,
    }


def _resident(resident: Resident) -> dict[str, Any]:
    return {
        "path": resident.path,
        "group": resident.group,
        "axes": [[name, size] for name, size in resident.axes],
        "dtype": resident.dtype,
        "spec": resident.spec,
        "bytes": resident.nbytes,
        "whole_bytes": resident.whole_bytes,
        "replicated": resident.replicated,
        "replicated_over": list(resident.replicated_over),
    }


def _loading(verdict: Verdict) -> dict[str, Any] | None:
    load = verdict.load
    if load is None:
        return None
    leaf, transient = load.device_transient
    ceilings = {ceiling.name: ceiling.gigabytes_per_second for ceiling in load.ceilings}
    from_store = {"store_seconds": load.store_seconds, "ceilings": ceilings} if ceilings else {}
    return {
        "source_bytes": load.source_bytes,
        "bytes_by_host": list(load.bytes_by_host),
        "amplification": load.amplification,
        "device_transient_bytes": transient,
        "device_transient_array": leaf,
        "device_peak_bytes": load.device_peak,
        "host_peak_bytes": load.host_peak,
        "gigabytes_per_second": load.gigabytes_per_second,
        "seconds": load.seconds,
        **from_store,
    }


def _program(verdict: Verdict, program: ProgramVerdict) -> dict[str, Any]:
    outcome = program.outcome
    values: dict[str, Any] = {
        "name": program.name,
        "outcome": {Compiled: "fits", Refused: "refused"}.get(type(outcome), "not compiled"),
        "input_bytes": None if verdict.budget is None else verdict.budget.arguments.get(program.name),
        # Some keys have older names than the attributes; they stay, because programs read them.
        "beside_bytes": program.coresident_bytes,
        "bound_bytes": program.bound,
        "peak_bytes": program.peak_bytes,
        "memory": None,
        "refusal": None,
        "lower_seconds": None if outcome is None else outcome.lower_seconds,
        "compile_seconds": None if outcome is None else outcome.compile_seconds,
        "kept_since_unix_seconds": None if outcome is None else outcome.kept_since,
        "why_not": list(program.why_not),
        "offloaded": None,
        "workload": None,
        "time": _time(program),
        "mfu": _expecting(_range(program.mfu), timing.utilization(program, program.mfu)),
        "mfu_full_attention": _expecting(_range(program.mfu_full), timing.utilization(program, program.mfu_full)),
        "tokens_per_second_per_chip": None,
        "job_seconds": _range(program.job_seconds),
        "collectives": [
            {
                "over": wire.over,
                "network": wire.network,
                "link": wire.link,
                "busy_seconds": wire.busy,
                "exposed_seconds": wire.exposed,
                "kinds": [{"kind": t.kind, "times": t.count, "total_bytes": t.nbytes} for t in wire.kinds],
            }
            for wire in timing.wires(verdict, program)
        ],
    }
    if isinstance(outcome, Compiled):
        memory = outcome.memory
        values["memory"] = {
            "argument_bytes": memory.argument,
            "output_bytes": memory.output,
            "alias_bytes": memory.alias,
            "temporary_bytes": outcome.temporary_bytes,
            "code_bytes": memory.generated_code,
            "peak_bytes": memory.peak,
            "heap_bytes": memory.heap,
        }
    if isinstance(outcome, Refused):
        values["refusal"] = {
            "needed_bytes": outcome.refusal.needed,
            "available_bytes": outcome.refusal.available,
            "message": outcome.refusal.message,
            "largest": [{"bytes": a.nbytes, "kind": a.kind, "op_name": a.op_name} for a in outcome.refusal.allocations],
        }
    if (offloaded := program.offloaded) is not None:
        values["offloaded"] = {
            "names": list(offloaded.names),
            "device_bytes": offloaded.device_bytes,
            "host_bytes": offloaded.host_bytes,
            "host_limit_bytes": offloaded.host_limit,
            "microbatches": offloaded.microbatches,
            "seconds": offloaded.seconds,
        }
    if (work := program.workload) is not None:
        values["workload"] = {
            "tokens": work.tokens,
            "items": work.items,
            "unit": work.unit,
            "flops_full": work.flops_full,
            "flops_causal": work.flops_causal,
            "executions": work.executions,
            "reason": work.reason,
        }
    if (speed := timing.rate(verdict, program)) is not None:
        values["tokens_per_second_per_chip"] = _expecting(_range(speed.tokens_per_second_per_chip), speed.expected)
    return values


def _time(program: ProgramVerdict) -> dict[str, Any] | None:
    time = program.time
    if time is None:
        return None
    return {
        "low_seconds": time.low,
        "high_seconds": time.high,
        "expected_seconds": time.expected,
        "bound_by": time.bound_by,
        "compute_seconds": time.compute,
        "hbm_seconds": time.memory,
        "exposed_seconds": time.exposed,
        "host_transfer_seconds": time.transfers,
        "peak_flops_seconds": time.peak,
        "by_module": [
            {"module": part.name, "seconds": part.seconds, "by_pass": part.during}
            for part in timing.module_times(program)
        ],
        "not_modelled": list(time.unknown),
        "not_calibrated": time.calibration.reason or None,
        "estimate": time.calibration.estimate,
    }


def _range(pair: tuple[float, float] | None) -> dict[str, float] | None:
    # Some pairs go from the high end of the time to the low one (rates): the smaller value is always `low`.
    return None if pair is None else {"low": min(pair), "high": max(pair)}


def _expecting(range_: dict[str, float] | None, expected: float | None) -> dict[str, float] | None:
    """A range with its expected value."""
    return range_ if range_ is None or expected is None else {**range_, "expected": expected}


def _plain(value: object) -> Any:
    """The values as strict JSON: `null` for numbers that are not finite, escapes for lone surrogates in strings."""
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, str):
        # File names that are not UTF-8 come as lone surrogates, which no UTF-8 writer accepts.
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return None if isinstance(value, float) and not math.isfinite(value) else value
