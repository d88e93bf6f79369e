"""Published speeds of generating text compared with modelled ones of our own Programs, for the same shapes. No TPU.

    python benchmarks/published_decode.py [llama3.3_70b_v6e-8_64 …] [--from-figures] [--write] [--missing] [--fit]

Each case is a model on a pod under a load that somebody published. The decode step and a part of a prompt, as
`levanter.main.generate` would run them, are compiled for the pod by the real TPU compiler; their times are modelled
from what the compiler prints (`levanter.plan.step_time_model`). A published time a token has both in it: while a row
gets its tokens, prompts of others are taken. So

    time a token = max(decode(rows) + repeated, host) + rows / output × prompt(input)

with as many rows as were in flight on average, which is the published tokens/s times the published time a token. The
cache of the compiled step holds what a row has on average while it is generated: its prompt and half of its output.
*host* is the least that a step of the server takes by another figure of its publisher; *repeated* what the publisher's
program writes and reads beyond ours if its code is taken literally, at the full rate of memory. Both are mostly 0, are
said in `published_loads.py`, and no plan has them: a plan is of our Program. Loads in which either decides are
*excluded* from a second count of our step alone, by that rule and with the reason; the count of all comes first.

The sums that times consist of are stored in `tests/golden/published_decode.json`; `--from-figures` starts from them and
needs no compiler, `--write` rewrites them. Which cases calibrate (*c*) and which test (*t*) was decided before any of
them was compiled.
"""

import argparse
import importlib.metadata
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from published_loads import CASES, EXCLUDED, LATER, PLANNED, Case

from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.generate import describe
from levanter.config import load_written
from levanter.hardware import parse_accelerator
from levanter.inference.capacity import DecodeCost
from levanter.plan.aot import Compiled, compile_programs
from levanter.plan.calibration import GENERATING_SCALE
from levanter.plan.comms import Network
from levanter.plan.compile_cache import CompileCache
from levanter.plan.step_time_model import step_time
from levanter.plan.target_from_name import pod_target

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "tests" / "golden" / "published_decode.json"
NEAR = 0.25
"""How far a modelled time may be from a published one that did not calibrate it."""
SCALES = tuple(hundredths / 100 for hundredths in range(30, 201))
"""What is tried as a scale of the compiler's cycles."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What the time of one Program consists of, in seconds before any scale.

    Attributes:
        cycles: the compiler's, over the clock.
        kernels: of hand-written kernels, and of copies that have no cycles.
        memory: HBM traffic over bandwidth.
        busy: of the busiest links.
        exposed: of communication that nothing hides.
        peak: the model's FLOPs at peak.
        temporaries: bytes that it makes beside its inputs.
        unknown: what has no estimate.
        options: what it was compiled with; None where they were not kept.
    """

    cycles: float
    kernels: float
    memory: float
    busy: float
    exposed: float
    peak: float
    temporaries: int
    unknown: tuple[str, ...] = ()
    options: Mapping[str, str] | None = None

    def seconds(self, scale: float) -> float:
        """With a scale of the compiler's cycles; never less than a lower bound."""
        return max(scale * self.cycles + self.kernels + self.exposed, self.memory, self.busy, self.peak)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What is kept of a case.

    Attributes:
        decode: one token of every row in flight; None where it does not fit.
        prompt: all calls for one prompt.
        floor: least seconds of the decode step.
        binds: what sets them.
        gib: on a chip, inputs and what the decode step makes.
        libtpu: the compiler's version.
    """

    decode: Sums | None
    prompt: Sums | None
    floor: float
    binds: str
    gib: float
    libtpu: str

    @staticmethod
    def read(values: Mapping[str, Any]) -> "Figures":
        """From JSON."""
        sums = {
            name: None if values[name] is None else Sums(**{**values[name], "unknown": tuple(values[name]["unknown"])})
            for name in ("decode", "prompt")
        }
        return Figures(**{**values, **sums})


def read() -> dict[str, Figures]:
    """The figures that are kept, by case."""
    return {name: Figures.read(each) for name, each in json.loads(FIGURES.read_text()).items()}


def _compiled(case: Case, *, prompts: bool, keep_text: Path | None = None) -> tuple[Sums | None, DecodeCost, float]:
    """A Program's sums, what the run holds, and GiB of a chip."""
    pod = parse_accelerator(case.target)
    with TemporaryDirectory(prefix="published-") as scratch:
        path = Path(scratch) / "run.yaml"
        path.write_text(json.dumps(case.document(prompts=prompts)))
        loaded = load_written(GenerateConfig, ["--config_path", str(path)])
        plan = describe(loaded.config, pod_target(pod), written=loaded.written)
        if plan.errors:
            raise SystemExit(f"{case.name}: {plan.errors}")
        served = plan.work.serving
        assert plan.resident_bytes is not None
        held = sum(plan.resident_bytes.values())
        if held > pod.hbm_bytes:
            return None, served, held / (1 << 30)
        longest = max(served.prefill, key=lambda name: served.prefill[name][1])
        name = longest if prompts else served.decoding(served.rows)
        (outcome,) = compile_programs(
            "levanter.main.plan:describe",
            {"entry_point": "generate", "argv": ["--config_path", str(path)]},
            target=pod,
            programs=(name,),
            keep_text=keep_text and keep_text / case.name,
            kept=CompileCache.here(),
            plan=plan,
        )
    if not isinstance(outcome, Compiled) or outcome.figures is None:
        return None, served, held / (1 << 30)
    work = next(each for each in plan.workloads if each.program == name)
    time = step_time(outcome.figures, Network.of(outcome.mesh, pod, outcome.coordinates), model_flops=work.flops_causal)
    assert time is not None
    calls = math.ceil(case.taken / served.prefill[longest][1]) if prompts else 1
    made = outcome.peak_bytes - outcome.memory.argument
    return (
        Sums(
            cycles=calls * time.cycles,
            kernels=calls * (time.kernels_expected + time.copies),
            memory=calls * time.memory,
            busy=calls * max((link.busy for link in time.links), default=0.0),
            exposed=calls * time.exposed,
            peak=calls * time.peak,
            temporaries=made,
            unknown=time.unknown,
            options=dict(plan.program(name).compiler_options),
        ),
        served,
        (held + made) / (1 << 30),
    )


def floor_row(case: Case) -> str:
    """A line of the table of floors: no compiler, what no program exceeds."""
    pod = parse_accelerator(case.target)
    with TemporaryDirectory(prefix="published-") as scratch:
        path = Path(scratch) / "run.yaml"
        path.write_text(json.dumps(case.document(prompts=False)))
        loaded = load_written(GenerateConfig, ["--config_path", str(path)])
        plan = describe(loaded.config, pod_target(pod), written=loaded.written)
    served = plan.work.serving
    held = served.weights.total + served.cache_bytes
    front = f"| {case.name} | {held / (1 << 30):.2f} of {pod.hbm_bytes / (1 << 30):.2f} GiB "
    if held > pod.hbm_bytes:
        most = served.fitting(pod.hbm_bytes, case.context)
        return f"{front}| does not fit: {most} rows do | | |"
    floor = served.decode_floor(case.rows, case.context, bandwidth=pod.hbm_bandwidth, peak=pod.peak_flops())
    rate = case.rows / floor.seconds / pod.chips
    return f"{front}| {1e3 * floor.seconds:.2f} ms | {rate:,.3g} | {floor.binds} |"


def compiled(case: Case, prompt: Sums | None = None, *, keep_text: Path | None = None) -> Figures:
    """Compiles both Programs of a case, or, where the sums of a prompt are there, the decode step alone; of one that is
    only planned, the decode step. With a folder for the compiler's text, that is kept."""
    pod = parse_accelerator(case.target)
    decode, served, gib = _compiled(case, prompts=False, keep_text=keep_text)
    if case.half == "planned" or decode is None:
        prompt = None
    elif prompt is None:
        prompt = _compiled(case, prompts=True)[0]
    floor = served.decode_floor(case.in_flight, case.context, bandwidth=pod.hbm_bandwidth, peak=pod.peak_flops())
    return Figures(
        decode=decode,
        prompt=prompt,
        floor=floor.seconds,
        binds=floor.binds,
        gib=gib,
        libtpu=importlib.metadata.version("libtpu"),
    )


def token_seconds(case: Case, figures: Figures, scale: float, *, ours: bool = False) -> float:
    """The modelled time a token, with the share of prompts that are taken meanwhile.

    Args:
        case: the load.
        figures: what is kept of it.
        scale: of the compiler's cycles.
        ours: without what the publisher's server and program do beyond ours.
    """
    assert figures.decode is not None
    step = figures.decode.seconds(scale)
    if not ours:
        step = max(step + case.repeated_bytes / parse_accelerator(case.target).hbm_bandwidth, case.host)
    prompt = 0.0 if figures.prompt is None else figures.prompt.seconds(scale)
    return step + case.in_flight / case.output * prompt


def prompt_of(case: Case, kept: Mapping[str, Figures]) -> Sums | None:
    """Sums of the same prompt of the same model, of another load whose figures are kept."""

    def what(of: Case) -> tuple[object, ...]:
        return of.model, of.target, of.mesh, of.int8, of.taken

    others = (other for other in (*CASES, *LATER) if other is not case and other.name in kept)
    return next((kept[other.name].prompt for other in others if what(other) == what(case)), None)


def generation(case: Case) -> str:
    """The name of a case's generation of chips."""
    return parse_accelerator(case.target).generation.name


def fitted(kept: Mapping[str, Figures]) -> dict[str, float]:
    """The scale of the compiler's cycles, by generation, that fits the cases that calibrate best: least squares of the
    relative deviation, over hundredths."""
    found: dict[str, float] = {}
    half = [case for case in CASES if case.half == "c" and case.name in kept]
    for name in {generation(case) for case in half}:
        cases = [case for case in half if generation(case) == name]

        def error(scale: float, cases: list[Case] = cases) -> float:
            return sum(deviation(case, kept[case.name], scale, ours=True) ** 2 for case in cases)

        found[name] = min(SCALES, key=error)
    return dict(sorted(found.items()))


def deviation(case: Case, figures: Figures, scale: float, *, ours: bool = False) -> float:
    """By how much the modelled time is above the published one, as a share of it."""
    assert case.seconds is not None
    return token_seconds(case, figures, scale, ours=ours) / case.seconds - 1


def row(case: Case, figures: Figures, scales: Mapping[str, float]) -> str:
    """A line of the table."""
    pod = parse_accelerator(case.target)
    front = f"| {case.name} | {case.target} | {case.in_flight} × {case.context:,} "
    if figures.decode is None:
        return f"{front}| {figures.gib:.1f} of {pod.hbm_bytes / (1 << 30):.2f} GiB | does not fit | | | | |"
    seconds = token_seconds(case, figures, scales.get(generation(case), 1.0))
    rate = case.in_flight / seconds / pod.chips
    published = off = ""
    if case.seconds is not None:
        published = f"{1e3 * case.seconds:.2f} ms"
        found, ours = (
            f"{100 * deviation(case, figures, scales.get(generation(case), 1.0), ours=alone):+.0f} %"
            for alone in (False, True)
        )
        off = found if found == ours else f"{found}, our step alone {ours}"
    return (
        f"{front}| {figures.gib:.1f} of {pod.hbm_bytes / (1 << 30):.2f} GiB | {1e3 * seconds:.2f} ms | {rate:,.3g} "
        f"| {1e3 * figures.floor:.2f} ms, {figures.binds} | {published} | {off} {case.half if off else ''} |"
    )


def tested(kept: Mapping[str, Figures], scales: Mapping[str, float], cases: Sequence[Case], *, ours: bool) -> str:
    """How many rows of the test half are near what was published, and which are not."""
    half = [case for case in cases if case.half == "t" and case.name in kept]
    off = {case.name: deviation(case, kept[case.name], scales.get(generation(case), 1.0), ours=ours) for case in half}
    missed = [f"{name} ({100 * each:+.0f} %)" for name, each in off.items() if abs(each) > NEAR]
    absent = [case.name for case in cases if case.half == "t" and case.name not in kept]
    said = f"{len(half) - len(missed)} of {len(half)} rows within {NEAR:.0%}"
    said += f"; missed: {', '.join(missed)}" if missed else ""
    return said + (f"; not compiled: {', '.join(absent)}" if absent else "")


def beyond(case: Case, figures: Figures, scale: float) -> str:
    """Why a published time is of more than a step like ours, by what its publisher says; empty where it is not.

    Asked of every load alike, whether it is near or not.
    """
    assert figures.decode is not None
    if case.repeats:
        return (
            f"the publisher's program repeats each key and value {case.repeats} times, once for each query of it "
            f"({case.repeated_bytes / 1e9:.1f} GB a step and chip, if they are written and read again); ours does not"
        )
    step = figures.decode.seconds(scale)
    if case.host <= step:
        return ""
    return (
        f"the server's host takes {1e3 * case.host:.1f} ms a step by another figure of its publisher, and its chips "
        f"{1e3 * step:.1f} as modelled: they wait"
    )


def excluded(kept: Mapping[str, Figures], scales: Mapping[str, float], cases: Sequence[Case]) -> dict[str, str]:
    """The loads that test and are of more than a step like ours, and why."""
    half = [case for case in cases if case.half == "t" and case.name in kept]
    found = {case.name: beyond(case, kept[case.name], scales.get(generation(case), 1.0)) for case in half}
    return {name: why for name, why in found.items() if why}


def verdicts(kept: Mapping[str, Figures], scales: Mapping[str, float]) -> list[str]:
    """What became of the loads that test: of all by our step alone, without those of more than it, and of all with
    what publishers say of their own."""
    said = []
    for what, cases in (("test half", CASES), ("rows that nobody tuned to", LATER)):
        said.append(f"{what}, by our step alone: {tested(kept, scales, cases, ours=True)}")
        reasons = excluded(kept, scales, cases)
        said += [f"- excluded, {name}: {why}" for name, why in reasons.items()]
        if reasons:
            rest = [case for case in cases if case.name not in reasons]
            said.append(f"without them, by our step alone: {tested(kept, scales, rest, ours=True)}")
        said.append(f"all, with what publishers say of their own: {tested(kept, scales, cases, ours=False)}")
    return said


def _kept() -> dict[str, Figures]:
    return read() if FIGURES.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="which, or beginnings of their names; the published ones by default")
    parser.add_argument("--from-figures", action="store_true", help="from the sums that are kept, without compiling")
    parser.add_argument("--write", action="store_true", help="keep the sums")
    parser.add_argument("--missing", action="store_true", help="only those whose sums are not kept")
    parser.add_argument(
        "--steps", action="store_true", help="decode steps alone; sums of prompts stay where they are kept"
    )
    parser.add_argument("--planned", action="store_true", help="Llama 2 on v5e, of which little is published")
    parser.add_argument("--floors", action="store_true", help="without a compiler: the floors of the planned ones")
    parser.add_argument("--fit", action="store_true", help="print what fits the cases that calibrate best")
    parser.add_argument("--keep-text", type=Path, help="a folder for the compiler's text")
    asked = parser.parse_args()
    if asked.floors:
        print("| case | a chip | a token, at least | tokens/s/chip, at most | binds |")
        print("|---|---|---|---|---|")
        for case in PLANNED:
            print(floor_row(case), flush=True)
        return 0
    kept = _kept()
    chosen = [*(PLANNED if asked.planned else (*CASES, *LATER))]
    if asked.cases:
        chosen = [
            case for case in (*CASES, *LATER, *PLANNED) if any(case.name.startswith(word) for word in asked.cases)
        ]
    if asked.missing:
        chosen = [case for case in chosen if case.name not in kept]
    if asked.from_figures:
        chosen = [case for case in chosen if case.name in kept]
    print("| case | pod | rows × positions | a chip | a token | tokens/s/chip | floor | published | off |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in chosen:
        if not asked.from_figures:
            prompt = kept[case.name].prompt if asked.steps and case.name in kept else prompt_of(case, kept)
            kept[case.name] = compiled(case, prompt, keep_text=asked.keep_text)
            if asked.write:
                # Another run may have kept others meanwhile.
                kept |= {name: each for name, each in _kept().items() if name != case.name}
                FIGURES.write_text(json.dumps({name: asdict(each) for name, each in kept.items()}, indent=1) + "\n")
        print(row(case, kept[case.name], GENERATING_SCALE), flush=True)
    if not asked.planned and not asked.cases:
        print("\nno anchors:")
        for what, why in EXCLUDED.items():
            print(f"- {what}: {why}")
        print("", *verdicts(kept, GENERATING_SCALE), sep="\n")
    if asked.fit:
        print(f"best fit of the calibrating cases: cycles of each generation × {fitted(kept)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
