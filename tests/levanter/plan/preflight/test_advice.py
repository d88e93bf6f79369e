"""Advice on runs that do not fit: what is tried, in which order, and that the compiler decides what would fit."""

from dataclasses import replace

import pytest
from helpers.drawn_steps import REFUSED, question

from haliax_ext.hlo import MemoryFigures, OutOfMemory
from levanter.hardware import parse_accelerator
from levanter.plan.aot import CompileCrash, Compiled, Refused
from levanter.plan.preflight import advice
from levanter.plan.preflight.pipeline import preflight

GIB = 1 << 30


def advised(name: str, *, compile: bool = False, **changes) -> tuple[str, ...]:
    """The lines of advice on a step; those of its explanation come first."""
    asked = replace(question(REFUSED[name]), compile=compile, **changes)
    # Arithmetic refuses these steps, so that the step itself is not compiled.
    verdict = preflight(replace(asked, compile=False) if not compile else asked)
    (step,) = [program for program in verdict.programs if program.name == "train_step"]
    assert verdict.exit_code == 3
    return tuple(
        line for line in step.why_not if line.split(" ", 1)[0] in ("may", "would", "does", "unknown:", "no", "none")
    )


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that needs given GiB, one suggestion after another; None crashes."""

    def installed(*needs: float | None) -> list[str]:
        waiting, payloads = list(needs), []

        def compiled(provider, payload, *, target, programs, kept, plan):
            payloads.append(" ".join(payload["overrides"][1:]))
            needed, limit = waiting.pop(0), plan.target.limit_bytes
            if needed is None:
                raise CompileCrash(target.name, programs[0], "failed", ())
            times = {"lower_seconds": 1.0, "compile_seconds": 1.0}
            size = round(needed * GIB)
            if size > limit:
                refusal = OutOfMemory(needed=size, available=limit, allocations=(), message="")
                return (Refused(name=programs[0], mesh=plan.mesh, refusal=refusal, **times),)
            memory = MemoryFigures(argument=0, output=0, alias=0, temp=size, generated_code=0, peak=size)
            return (
                Compiled(
                    name=programs[0], mesh=plan.mesh, memory=memory, figures=None, text_error=None,
                    coordinates=((0, 0, 0, 0),), **times,
                ),
            )  # fmt: skip

        monkeypatch.setattr(advice, "compile_programs", compiled)
        monkeypatch.setattr(advice, "has_compiler", lambda pod: True)
        monkeypatch.setattr("levanter.plan.preflight.compile.compile_programs", _refuses)
        return payloads

    return installed


def _refuses(provider, payload, *, plan, programs, **options):
    refusal = OutOfMemory(needed=60 * GIB, available=plan.target.limit_bytes, allocations=(), message="")
    return (Refused(name="train_step", mesh=plan.mesh, refusal=refusal, lower_seconds=1.0, compile_seconds=1.0),)


def test_without_a_compiler_a_suggestion_may_fit_and_its_line_says_how_far_bounds_were_off():
    """64 rows a device of Llama 3.1 8B: how many fewer is searched."""
    (line,) = advised("llama3_8b_v5e-64_64_rows")
    assert line.startswith("may fit: trainer: {per_device_parallelism: 8}  # at least ")
    assert line.endswith("× their bound when compiled")


def test_parameters_are_sharded_between_slices_where_nothing_else_helps():
    """Llama 70B on two slices of 32: 29.13 of 31.25 GiB when compiled."""
    (line,) = advised("llama3_70b_2xv6e-32")
    assert line.startswith("may fit: trainer: {mesh: {param_mapping: {embed: [replica_dcn, data]}}}  # ")


def test_an_optimizer_with_less_state_is_tried():
    """Llama 1B on one chip: 11.14 of 15.75 GiB when compiled."""
    (line,) = advised("llama3_1b_v5e-1")
    assert line.startswith("may fit: optimizer: {type: adafactor}  # ")


def test_the_compiler_decides_and_the_first_that_fits_is_the_advice(compiler):
    payloads = compiler(15.8, 10.0)
    refused, line = advised("llama3_8b_v5e-64_64_rows", compile=True)
    # 60 GiB of the configured step are less than its bound, so the bound counts.
    assert "per_device_parallelism=8" in payloads[0] and "per_device_parallelism=4" in payloads[1]
    assert refused == "does not fit: trainer: {per_device_parallelism: 8}  # 15.80 of 15.75 GiB a chip, compiled"
    assert line == "would fit: trainer: {per_device_parallelism: 4}  # 10.00 of 15.75 GiB a chip, compiled"


def test_nothing_within_two_percent_of_a_chip_is_suggested(compiler):
    compiler(15.5, 9.0)
    refused, line = advised("llama3_8b_v5e-64_64_rows", compile=True)
    assert refused.endswith("15.50 of 15.75 GiB a chip, compiled: no room")
    assert line.startswith("would fit: trainer: {per_device_parallelism: 4}")


def test_at_most_three_suggestions_are_compiled(compiler):
    payloads = compiler(None, None, None)
    lines = advised("llama3_8b_v5e-64_64_rows", compile=True)
    assert len(payloads) == 3
    assert not any(line.startswith("would fit") for line in lines)
    # The reader learns why three suggestions have no answer.
    failures = [line for line in lines if line.startswith("unknown: trainer: ")]
    assert len(failures) == 3 and all("  # the compiler failed: " in line for line in failures)


def test_pods_of_the_same_kind_with_as_many_slices():
    names = [pod.name for pod in advice.larger_pods(parse_accelerator("2xv6e-16"))]
    assert names == ["2xv6e-32", "2xv6e-64", "2xv6e-128"]
    assert [pod.name for pod in advice.larger_pods(parse_accelerator("h100x8"))] == ["h100x16", "h100x32", "h100x64"]
