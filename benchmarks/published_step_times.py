"""Published training speeds compared with modelled ones of our own train step, for the same shapes. No TPU.

    python benchmarks/published_step_times.py [llama2_7b_v4-32 …] [--from-figures] [--write] [--also=--key=value …]

Each case is a config of `config/train/published/`: the train step of `levanter.main.train_lm` is compiled for the pod
by the real TPU compiler, and the time is modelled from what the compiler prints (`levanter.plan.step_time_model`). The
sums that the time consists of are stored in `tests/golden/published_step_times.json`; `--from-figures` starts from
them and needs no compiler, `--write` rewrites them.

Published runs that offload activations to host memory are compiled with those activations saved on the chip, at a depth
of `SHALLOW` layers, at which they fit; their loops over layers are then counted with the true depth. (Compiled as
published they take the compiler over half an hour.) The transfers to the host are thus assumed to be hidden.

Which half of the cases calibrates the model and which half tests it was decided before the second half was compiled:
the smaller models calibrate, the larger ones test.
"""

import argparse
import importlib.metadata
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from haliax_ext.hlo import read_figures
from haliax_ext.meshspec import MeshSpec
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.config import parse
from levanter.hardware import parse_accelerator
from levanter.hardware.compiler import CompilerMode
from levanter.models.registry import LmConfig
from levanter.plan.aot import Compiled, compile_programs
from levanter.plan.calibration import KERNEL_EFFICIENCY, calibration
from levanter.plan.comms import Network
from levanter.plan.compile_cache import CompileCache
from levanter.plan.step_time_model import CYCLE_SCALE, LinkUse, StepTime, mfu, step_time
from levanter.plan.target_from_name import pod_target

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "tests" / "golden" / "published_step_times.json"
TOGETHER = (("v4",), ("v5p", "v6e"))
"""Generations that share a scale of the compiler's cycles."""
SHALLOW = 7
"""Layers of a shallow compile: a number of turns that no other loop of a train step has."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published speed.

    Attributes:
        config: of `config/train/published`, without `.yaml`.
        target: the pod.
        tokens: published tokens/s/chip.
        mfu: published share of peak.
        counts: whether that counts attention in full or its causal half.
        half: what the case is for.
        source: who published it.
    """

    config: str
    target: str
    tokens: float
    mfu: float
    counts: Literal["full", "causal"]
    half: Literal["calibration", "test"]
    source: str

    @property
    def path(self) -> Path:
        return ROOT / "config" / "train" / "published" / f"{self.config}.yaml"


_XLA = "PyTorch/XLA, Llama 2 on Cloud TPU v4"
_RECIPES = "MaxText, tpu-recipes"
CASES = (
    Case(
        config="llama2_7b_v4-32", target="v4-32", tokens=3467, mfu=0.53, counts="full", half="calibration",
        source=_XLA,
    ),
    Case(config="llama2_13b_v4-64", target="v4-64", tokens=1808, mfu=0.53, counts="full", half="test", source=_XLA),
    Case(config="llama2_70b_v4-256", target="v4-256", tokens=345, mfu=0.53, counts="full", half="test", source=_XLA),
    Case(
        config="llama3.1_8b_v6e-256", target="v6e-256", tokens=7207, mfu=0.4546, counts="full", half="calibration",
        source=_RECIPES,
    ),
    Case(
        config="llama3.1_70b_v6e-256", target="v6e-256", tokens=960, mfu=0.5033, counts="full", half="calibration",
        source=_RECIPES,
    ),
    Case(
        # The table says "123" beside 38.55 %; these are 134.8 by its own count of FLOPs (docs/performance.md).
        config="llama3.1_405b_v6e-256", target="v6e-256", tokens=134.8, mfu=0.3855, counts="full", half="test",
        source="MaxText, tiering",
    ),
    Case(
        config="llama3.1_405b_v6e-256_fsdp", target="v6e-256", tokens=149.5, mfu=0.4275, counts="full", half="test",
        source=_RECIPES,
    ),
    Case(
        config="llama2_70b_v5p-1024", target="v5p-1024", tokens=692, mfu=0.654, counts="causal", half="calibration",
        source="MaxText, tiering",
    ),
    Case(
        config="llama3.1_405b_v5p-1024", target="v5p-1024", tokens=124.6, mfu=0.685, counts="causal", half="test",
        source=_RECIPES,
    ),
    # What follows was found when every constant was fixed. Speeds that are published as TFLOP/s a chip are given as
    # tokens by our own count of FLOPs; batches and what of a block is kept are ours where the publisher says nothing.
    Case(
        config="maxtext_16b_v5e-256", target="v5e-256", tokens=1192.3, mfu=0.609, counts="full", half="test",
        source="MaxText, 120 TFLOP/s",
    ),
    Case(
        config="maxtext_22b_v4-128", target="v4-128", tokens=1153.3, mfu=0.567, counts="full", half="test",
        source="MaxText, 156 TFLOP/s",
    ),
    Case(
        config="maxtext_32b_v5p-128", target="v5p-128", tokens=1683.4, mfu=0.7146, counts="full", half="test",
        source="MaxText, 328 TFLOP/s",
    ),
    Case(
        config="llama2_70b_v6e-256", target="v6e-256", tokens=943, mfu=0.4566, counts="full", half="test",
        source=_RECIPES,
    ),
    Case(
        config="llama2_7b_v5p-512", target="v5p-512", tokens=6553.6, mfu=0.658, counts="full", half="test",
        source="AXLearn, 2.5 s a step",
    ),
    Case(
        config="nanochat_d24_v6e-8", target="v6e-8", tokens=46313, mfu=0.2666, counts="full", half="test",
        source="nanochat-jax, 1.39 to 1.44 s a step",
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a modelled time is made of, and the work it is for; seconds are of one step.

    Attributes:
        cycles: the compiler's estimate over the clock, as it states it.
        kernels_at_peak: attention kernels at peak.
        memory: HBM traffic over HBM bandwidth.
        busy: of the busiest links.
        exposed: collectives that the schedule does not hide.
        tokens: of one step, over all chips.
        flops_full, flops_causal: model FLOPs of one step, over all chips.
        parameters: of the model; None where they were not kept.
        layers_compiled: depth at which it was compiled.
        peak_gib: on a chip, where compiled at full depth.
        unknown: what the compiler gives no estimate for.
        libtpu: the version of the compiler.
        options: what it was compiled with; None where they were not kept.
        permutes: collective permutes of one step, of which rings of small matmuls are made; None where not kept.
        fitted: cycles, kernels and exposed communication that the scale was fitted to, where today's step has others:
            what makes our step faster than the one that was fitted is in no published run, and a new fit would take
            it away again.
    """

    cycles: float
    kernels_at_peak: float
    memory: float
    busy: float
    exposed: float
    tokens: int
    flops_full: float
    flops_causal: float
    layers_compiled: int
    peak_gib: float | None
    unknown: tuple[str, ...] = ()
    libtpu: str
    parameters: int | None = None
    options: Mapping[str, str] | None = None
    permutes: int | None = None
    fitted: Mapping[str, float] | None = None


def model_of(case: Case) -> LmConfig:
    """The architecture that a case trains."""
    return parse(TrainLmConfig, paths=[str(case.path)]).model


def offloads(policy: Any) -> bool:
    """Whether a `gradient_checkpointing` policy sends anything to host memory."""
    return isinstance(policy, Mapping) and (
        policy.get("save_carries") == "offload" or bool(policy.get("offload_block_internals"))
    )


def on_the_chip(policy: Mapping[str, Any]) -> dict[str, Any]:
    """The policy that keeps on the chip what `policy` sends to host memory."""
    kept = [*(policy.get("save_block_internals") or []), *(policy.get("offload_block_internals") or [])]
    return {"save_carries": True, "save_block_internals": kept, "offload_block_internals": []}


def compiled(
    case: Case,
    *,
    shallow: bool | None = None,
    keep_text: Path | None = None,
    compiler: CompilerMode = "tuned",
    also: Sequence[str] = (),
    policy: Any = None,
    experiment: str | None = None,
) -> tuple[Figures, StepTime]:
    """Compiles a case and models its time.

    Args:
        case: which.
        shallow: compile at `SHALLOW` layers; by default where activations go to host memory.
        keep_text: a folder for the compiler's text.
        compiler: `tuned` as by default, or `default` for a comparison.
        also: more of the run's command line, for an experiment. It may not change what a step works on.
        policy: `model.gradient_checkpointing` in place of the published one, for an experiment.
        experiment: of `step_experiments.py`, which changes the step's functions. No answer is looked for or kept then:
            its key knows nothing of them.
    """
    published = getattr(model_of(case), "gradient_checkpointing", True)
    shallow = offloads(published) if shallow is None else shallow
    argv = ["--config_path", str(case.path), "--trainer.compiler", compiler]
    if shallow:
        argv += ["--model.num_layers", str(SHALLOW)]
    if policy is not None:
        argv += ["--model.gradient_checkpointing", json.dumps(policy)]
    elif isinstance(published, Mapping) and offloads(published):
        argv += ["--model.gradient_checkpointing", json.dumps(on_the_chip(published))]
    argv += also
    changed = {} if experiment is None else {"experiment": experiment}
    with TemporaryDirectory(prefix="published-") as scratch:
        folder = Path(scratch) if keep_text is None else keep_text / case.config
        (outcome,) = compile_programs(
            f"{ROOT / 'benchmarks' / 'step_experiments.py'}:describe" if changed else "levanter.main.plan:describe",
            {"entry_point": "train_lm", "argv": argv} | changed,
            target=case.target,
            programs=("train_step",),
            keep_text=folder,
            kept=None if changed else CompileCache.here(),
        )
        if not isinstance(outcome, Compiled):
            raise SystemExit(f"{case.config}: refused: {outcome.refusal}")
        print(f"{case.config}: compiled in {outcome.compile_seconds:.0f} s", file=sys.stderr, flush=True)
        text = (folder / "train_step.hlo.txt").read_text()
    peak, options = outcome.peak_bytes, options_of(case, compiler)
    return summed(
        case, text, outcome.mesh, coordinates=outcome.coordinates, shallow=shallow, peak=peak, options=options
    )


def options_of(case: Case, compiler: CompilerMode) -> dict[str, str]:
    """What the train step of a case is compiled with."""
    config = parse(TrainLmConfig, paths=[str(case.path)], overrides={"trainer.compiler": compiler})
    plan = describe(config, pod_target(parse_accelerator(case.target)))
    return dict(plan.program("train_step").compiler_options)


def summed(
    case: Case,
    text: str,
    mesh: MeshSpec,
    *,
    coordinates: Sequence[Sequence[int]] | None,
    shallow: bool,
    peak: int,
    options: Mapping[str, str],
) -> tuple[Figures, StepTime]:
    """The sums of a case, and its modelled time, from the compiler's text."""
    pod = parse_accelerator(case.target)
    config = parse(TrainLmConfig, paths=[str(case.path)])
    plan = describe(config, pod_target(pod))
    (work,) = plan.workloads
    assert not isinstance(plan.searchable, str)
    parameters = sum(math.prod(leaf.shape) for leaf in plan.searchable.parameters)
    layers = len(model_of(case).layers)
    found = read_figures(text, mesh, trips={SHALLOW: layers} if shallow else None)
    time = step_time(found, Network.of(mesh, pod, coordinates), model_flops=work.flops_causal)
    assert time is not None
    return Figures(
        cycles=time.cycles,
        kernels_at_peak=time.kernels_at_peak,
        memory=time.memory,
        busy=max((link.busy for link in time.links), default=0.0),
        exposed=time.exposed,
        tokens=work.tokens,
        flops_full=work.flops_full,
        flops_causal=work.flops_causal,
        parameters=parameters,
        layers_compiled=SHALLOW if shallow else layers,
        peak_gib=None if shallow else peak / (1 << 30),
        unknown=time.unknown,
        libtpu=importlib.metadata.version("libtpu"),
        options=options,
        permutes=sum(each.times for each in found.collectives if each.kind == "collective-permute"),
    ), time


def time_of(case: Case, figures: Figures) -> StepTime:
    """The modelled time, from its sums."""
    pod = parse_accelerator(case.target)
    links = LinkUse(over="all", network="ici", busy=figures.busy, exposed=figures.exposed, total_bytes=0)
    return StepTime(
        cycles=figures.cycles,
        cycle_scale=CYCLE_SCALE.get(pod.generation.name, 1.0),
        kernels_at_peak=figures.kernels_at_peak,
        kernels_expected=figures.kernels_at_peak / KERNEL_EFFICIENCY,
        memory=figures.memory,
        links=(links,),
        peak=figures.flops_causal / (pod.devices * pod.peak_flops()),
        unknown=figures.unknown,
        calibration=calibration(pod.generation.name, figures.parameters),
    )


def per_chip(case: Case, figures: Figures, seconds: float) -> float:
    """Tokens/s/chip of a step that takes `seconds`."""
    return figures.tokens / parse_accelerator(case.target).chips / seconds


def deviation(case: Case, figures: Figures) -> float:
    """By how much the modelled tokens/s/chip are above the published ones, as a share of these."""
    return per_chip(case, figures, time_of(case, figures).expected) / case.tokens - 1


def _speed(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 1000 else f"{tokens:.4g}"


def row(case: Case, figures: Figures) -> str:
    """A line of the table."""
    time, pod = time_of(case, figures), parse_accelerator(case.target)
    slow, likely, fast = (per_chip(case, figures, s) for s in (time.high, time.expected, time.low))
    flops = figures.flops_full if case.counts == "full" else figures.flops_causal
    ours = mfu(flops, accelerator=pod, seconds=time.expected)
    return (
        f"| {case.config} | {case.target} | {case.tokens:,.5g} | {100 * case.mfu:.1f} % {case.counts} "
        f"| {_speed(likely)} ({_speed(slow)} to {_speed(fast)}) | {100 * ours:.1f} % "
        f"| {100 * deviation(case, figures):+.1f} % | {time.exposed / time.expected:.0%} | {case.half} |"
    )


def read() -> dict[str, Figures]:
    """The figures that are kept, by case."""
    kept = json.loads(FIGURES.read_text())
    return {name: Figures(**{**values, "unknown": tuple(values["unknown"])}) for name, values in kept.items()}


def fitted(figures: Mapping[str, Figures], *, today: bool = False) -> dict[str, float]:
    """The scale of the compiler's cycles, by generation, that fits the calibration half best.

    Least squares of the relative deviation of the step time, over hundredths; one scale for each of `TOGETHER`.

    Args:
        figures: of the calibration half.
        today: fit to the step as it is, and not as it was when the scales were fixed.
    """
    half = [case for case in CASES if case.half == "calibration" and case.config in figures]

    def error(case: Case, scale: float) -> float:
        f = figures[case.config]
        if f.fitted is not None and not today:
            f = replace(f, **f.fitted)
        published = f.tokens / parse_accelerator(case.target).chips / case.tokens
        return ((scale * f.cycles + f.kernels_at_peak / KERNEL_EFFICIENCY + f.exposed) / published - 1) ** 2

    found = {}
    for group in TOGETHER:
        cases = [case for case in half if parse_accelerator(case.target).generation.name in group]
        scales = (hundredths / 100 for hundredths in range(50, 151))
        best = min(scales, key=lambda scale: sum(error(case, scale) for case in cases))
        found |= dict.fromkeys(group, best)
    return found


def basis(case: Case, before: Figures) -> Mapping[str, float] | None:
    """What a scale was fitted to, of a row that is compiled anew: that stays, whatever the step has become."""
    if case.half != "calibration" or before.fitted is not None:
        return before.fitted
    return {name: getattr(before, name) for name in ("cycles", "kernels_at_peak", "exposed")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="which; all by default")
    parser.add_argument("--from-figures", action="store_true", help="from the sums that are kept, without compiling")
    parser.add_argument("--write", action="store_true", help="keep the sums")
    parser.add_argument("--missing", action="store_true", help="only those whose sums are not kept")
    parser.add_argument("--fit", action="store_true", help="print what fits the calibration half best")
    parser.add_argument("--compiler", choices=("tuned", "default"), default="tuned", help="default: only to compare")
    parser.add_argument("--keep-text", type=Path, help="a folder for the compiler's text")
    parser.add_argument("--also", action="append", default=[], help="more of the run's command line, for an experiment")
    asked = parser.parse_args()
    if asked.write and (asked.compiler != "tuned" or asked.also):
        parser.error("--write keeps what runs by default: leave out --compiler and --also")
    figures = read() if FIGURES.exists() else {}
    chosen = [case for case in CASES if case.config in asked.cases or not asked.cases]
    if asked.missing:
        chosen = [case for case in chosen if case.config not in figures]
    if asked.from_figures:
        chosen = [case for case in chosen if case.config in figures]
    print("| config | pod | published tokens/s/chip | MFU | modelled tokens/s/chip | MFU | off | exposed | half |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in chosen:
        if not asked.from_figures:
            before = figures.get(case.config)
            now, _ = compiled(case, keep_text=asked.keep_text, compiler=asked.compiler, also=asked.also)
            figures[case.config] = now if before is None else replace(now, fitted=basis(case, before))
        print(row(case, figures[case.config]), flush=True)
        if asked.write:
            FIGURES.write_text(json.dumps({name: asdict(each) for name, each in figures.items()}, indent=1) + "\n")
    if asked.fit:
        print(f"best fit of the calibration half: cycles of each generation × {fitted(figures)}")
        print(f"of today's step, not taken (docs/performance.md): {fitted(figures, today=True)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
