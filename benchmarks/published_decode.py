"""Published speeds of generating text compared with modelled ones of our own Programs, for the same shapes. No TPU.

    python benchmarks/published_decode.py [llama3.3_70b_v6e-8_64 …] [--from-figures] [--write] [--missing] [--fit]

Each case is a model on a pod under a load that somebody published. The decode step and a part of a prompt, as
`levanter.main.generate` would run them, are compiled for the pod by the real TPU compiler; their times are modelled
from what the compiler prints (`levanter.plan.cost`). A published time a token has both in it: while a row gets its
tokens, prompts of others are taken. So

    time a token = decode(rows) + rows / output × prompt(input)

with as many rows as were in flight on average, which is the published tokens/s times the published time a token. The
cache of the compiled step holds what a row has on average while it is generated: its prompt and half of its output.

The sums that times consist of are stored in `tests/golden/published_decode.json`; `--from-figures` starts from them and
needs no compiler, `--write` rewrites them. Which cases calibrate (*c*) and which test (*t*) was decided before any of
them was compiled.
"""

import argparse
import importlib.metadata
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.generate import describe
from levanter.config import load_written
from levanter.hardware import parse_accelerator
from levanter.inference.served import Served
from levanter.plan.aot import Compiled, compile_programs
from levanter.plan.calibration import GENERATING_SCALE
from levanter.plan.comms import Network
from levanter.plan.cost import step_time
from levanter.plan.kept import KeptAnswers
from levanter.plan.targets import target_of_pod

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "tests" / "golden" / "published_decode.json"
PREFILL = 2048
"""Tokens of a prompt that a call takes at most."""
NEAR = 0.25
"""How far a modelled time may be from a published one that did not calibrate it."""
SCALES = tuple(hundredths / 100 for hundredths in range(30, 201))
"""What is tried as a scale of the compiler's cycles."""


def _model(kind: str, embed: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    sizes = {"hidden_dim": embed, "intermediate_dim": mlp, "num_layers": layers}
    of_heads = {"num_heads": heads, "num_kv_heads": kv_heads}
    return {"type": kind, **sizes, **of_heads, "vocab_size": vocab, "tie_word_embeddings": False}


LLAMA_3_70B = _model("llama", 8192, 28672, 80, 64, 8, 128256)
LLAMA_3_8B = _model("llama", 4096, 14336, 32, 32, 8, 128256)
LLAMA_2_7B = _model("llama", 4096, 11008, 32, 32, 32, 32000)
LLAMA_2_13B = _model("llama", 5120, 13824, 40, 40, 40, 32000)
LLAMA_2_70B = _model("llama", 8192, 28672, 80, 64, 8, 32000)
QWEN_3_8B = _model("qwen3", 4096, 12288, 36, 32, 8, 151936) | {"head_dim": 128}
QWEN_3_32B = _model("qwen3", 5120, 25600, 64, 64, 8, 151936) | {"head_dim": 128}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published load, or one that is only planned.

    Attributes:
        name: of the case.
        model: the architecture.
        target: the pod.
        rows: in flight; of a published load, as many as were asked for.
        prompt: tokens of a prompt.
        output: tokens of an answer.
        seconds: published, a token of a row; None where nothing is published.
        tokens_per_second: published, of all rows; None where it follows from `seconds`.
        half: what the case is for.
        int8: whether weights are int8; the cache is bfloat16 always.
        whole: positions of a row that every step reads, where the publisher's cache is static.
        mesh: axes of the mesh.
        source: who published it.
    """

    name: str
    model: Mapping[str, Any] = field(repr=False)
    target: str
    rows: int
    prompt: int
    output: int
    seconds: float | None = None
    tokens_per_second: float | None = None
    half: Literal["c", "t", "planned"] = "planned"
    int8: bool = False
    whole: int | None = None
    mesh: Mapping[str, int] = field(default_factory=lambda: {"data": 1, "model": -1})
    source: str = ""

    @property
    def in_flight(self) -> int:
        """Rows that were running on average."""
        if self.seconds is None or self.tokens_per_second is None:
            return self.rows
        return round(self.tokens_per_second * self.seconds)

    @property
    def context(self) -> int:
        """Positions of a row while it is generated, on average."""
        # Rows of a multiple of 128 positions are read without being moved.
        return self.whole or -(-(self.prompt + self.output // 2) // 128) * 128

    def document(self, *, prompts: bool) -> dict[str, Any]:
        """The configuration of `generate` for one of the two Programs."""
        tensor = ["model", "group"] if "group" in self.mesh else "model"
        return {
            "model": {**self.model, "max_seq_len": max(self.context, self.prompt)},
            "tokenizer": "passthrough",
            "inference": {
                "max_rows": 1 if prompts else self.in_flight,
                "max_seq_len": self.prompt if prompts else self.context,
                "prefill_chunk": min(PREFILL, self.prompt),
                "penalties": False,
            },
            "trainer": {
                "mp": "bfloat16",
                "mesh": {
                    "axes": dict(self.mesh),
                    "shared_mapping": {"vocab": tensor, "mlp": tensor, "heads": tensor},
                },
            },
            **({"quantize": "int8"} if self.int8 else {}),
        }


_VLLM = "vLLM on v6e-8, 1,000 in and 1,000 out"
_SGLANG = "sglang-jax on v6e-4"
_SEED = "PyTorch/XLA, Llama 2 inference on TPU v5e"
GROUPED = {"data": 1, "model": 8, "group": 2}
CASES = (
    Case(name="llama3.3_70b_v6e-8_64", model=LLAMA_3_70B, target="v6e-8", rows=64, prompt=1000, output=1000,
         seconds=25.35e-3, tokens_per_second=2495, half="c", source=_VLLM),
    Case(name="llama3.3_70b_v6e-8_128", model=LLAMA_3_70B, target="v6e-8", rows=128, prompt=1000, output=1000,
         seconds=35.12e-3, tokens_per_second=3544, half="t", source=_VLLM),
    Case(name="qwen3_8b_v6e-4_1k", model=QWEN_3_8B, target="v6e-4", rows=64, prompt=1024, output=1024,
         seconds=11.11e-3, tokens_per_second=5297, half="c", source=_SGLANG),
    Case(name="qwen3_8b_v6e-4_4k", model=QWEN_3_8B, target="v6e-4", rows=64, prompt=4096, output=1024,
         seconds=21.13e-3, tokens_per_second=2529, half="t", source=_SGLANG),
    Case(name="qwen3_8b_v6e-4_8k", model=QWEN_3_8B, target="v6e-4", rows=64, prompt=8192, output=1024,
         seconds=31.98e-3, tokens_per_second=1459, half="t", source=_SGLANG),
    Case(name="qwen3_32b_v6e-4_16", model=QWEN_3_32B, target="v6e-4", rows=16, prompt=1024, output=1024,
         seconds=16.89e-3, tokens_per_second=834, half="t", source=_SGLANG),
    Case(name="llama3.1_8b_v6e-4_16", model=LLAMA_3_8B, target="v6e-4", rows=16, prompt=1024, output=1024,
         seconds=9.94e-3, tokens_per_second=1449, half="t", source=_SGLANG),
    Case(name="llama2_70b_v5e-16_1", model=LLAMA_2_70B, target="v5e-16", rows=1, prompt=1048, output=1000, whole=2048,
         seconds=17e-3, half="c", int8=True, mesh=GROUPED, source=_SEED),
    Case(name="llama2_70b_v5e-16_32", model=LLAMA_2_70B, target="v5e-16", rows=32, prompt=1048, output=1000, whole=2048,
         seconds=47.6e-3, half="t", int8=True, mesh=GROUPED, source=_SEED),
)  # fmt: skip
EXCLUDED: Mapping[str, str] = {
    "Llama 2 7B bf16 on v5e-4, 1.2 ms a token": "below the floor of 4.1 ms; the same source's 201 tokens/s/chip is "
    "4.97 ms, 4 × 1.24",
    "Qwen3-32B on v6e-4, batch 256": "weights and cache take 42 GB a chip of 33.5; 73 rows were in flight",
    "Qwen3-32B on v6e-4, 64 rows at 8K": "15 rows were in flight",
    "the scaling book's 52 int8 caches on v5e 4×2": "128 GB less 70 of weights is 58, not 68: 43 caches",
    "the scaling book's 67 int4 caches on v5e 4×2": "the same subtraction",
    "JetStream, Llama 2 7B on v5e, 3,062 tokens/s": "the chips are not named, and a mean of 5 s a token stands "
    "beside a median of 0.16",
}
"""Published rows that are no anchors, and why."""


def _planned() -> tuple[Case, ...]:
    """Llama 2 on v5e with a static cache: no row of these is published but the two above."""
    found = []
    for name, model, target, mesh in (
        ("llama2_7b_v5e-1", LLAMA_2_7B, "v5e-1", {"data": 1, "model": 1}),
        ("llama2_13b_v5e-4", LLAMA_2_13B, "v5e-4", {"data": 1, "model": 4}),
        ("llama2_70b_v5e-16", LLAMA_2_70B, "v5e-16", GROUPED),
    ):
        for int8 in (False, True):
            for context in (256, 2048):
                for rows in (1, 8, 32, 64):
                    kind = "int8" if int8 else "bf16"
                    found.append(
                        Case(name=f"{name}_{kind}_{context}_{rows}", model=model, target=target, rows=rows,
                             prompt=context // 2, output=context, int8=int8, mesh=mesh)
                    )  # fmt: skip
    return tuple(found)


PLANNED = _planned()


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


def _compiled(case: Case, *, prompts: bool, keep_text: Path | None = None) -> tuple[Sums | None, Served, float]:
    """A Program's sums, what the run holds, and GiB of a chip."""
    pod = parse_accelerator(case.target)
    with TemporaryDirectory(prefix="published-") as scratch:
        path = Path(scratch) / "run.yaml"
        path.write_text(json.dumps(case.document(prompts=prompts)))
        loaded = load_written(GenerateConfig, ["--config_path", str(path)])
        plan = describe(loaded.config, target_of_pod(pod), written=loaded.written)
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
            kept=KeptAnswers.here(),
            plan=plan,
        )
    if not isinstance(outcome, Compiled) or outcome.figures is None:
        return None, served, held / (1 << 30)
    work = next(each for each in plan.workloads if each.program == name)
    time = step_time(outcome.figures, Network.of(outcome.mesh, pod, outcome.coordinates), model_flops=work.flops_causal)
    assert time is not None
    calls = math.ceil(case.prompt / served.prefill[longest][1]) if prompts else 1
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
        plan = describe(loaded.config, target_of_pod(pod), written=loaded.written)
    served = plan.work.serving
    held = served.weights.total + served.cache_bytes
    front = f"| {case.name} | {held / (1 << 30):.2f} of {pod.hbm_bytes / (1 << 30):.2f} GiB "
    if held > pod.hbm_bytes:
        most = served.fitting(pod.hbm_bytes, case.context)
        return f"{front}| does not fit: {most} rows do | | |"
    floor = served.decode_floor(case.rows, case.context, bandwidth=pod.hbm_bandwidth, peak=pod.peak_flops())
    rate = case.rows / floor.seconds / pod.chips
    return f"{front}| {1e3 * floor.seconds:.2f} ms | {rate:,.3g} | {floor.binds} |"


def compiled(case: Case, before: Figures | None = None, *, keep_text: Path | None = None) -> Figures:
    """Compiles both Programs of a case, or, where there are figures from before, the decode step alone; of one that is
    only planned, the decode step. With a folder for the compiler's text, that is kept."""
    pod = parse_accelerator(case.target)
    decode, served, gib = _compiled(case, prompts=False, keep_text=keep_text)
    if case.half == "planned" or decode is None:
        prompt = None
    else:
        prompt = _compiled(case, prompts=True)[0] if before is None else before.prompt
    floor = served.decode_floor(case.in_flight, case.context, bandwidth=pod.hbm_bandwidth, peak=pod.peak_flops())
    return Figures(
        decode=decode,
        prompt=prompt,
        floor=floor.seconds,
        binds=floor.binds,
        gib=gib,
        libtpu=importlib.metadata.version("libtpu"),
    )


def token_seconds(case: Case, figures: Figures, scale: float) -> float:
    """The modelled time a token, with the share of prompts that are taken meanwhile."""
    assert figures.decode is not None
    prompt = 0.0 if figures.prompt is None else figures.prompt.seconds(scale)
    return figures.decode.seconds(scale) + case.in_flight / case.output * prompt


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
            return sum((deviation(case, kept[case.name], scale)) ** 2 for case in cases)

        found[name] = min(SCALES, key=error)
    return dict(sorted(found.items()))


def deviation(case: Case, figures: Figures, scale: float) -> float:
    """By how much the modelled time is above the published one, as a share of it."""
    assert case.seconds is not None
    return token_seconds(case, figures, scale) / case.seconds - 1


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
        off = f"{100 * deviation(case, figures, scales.get(generation(case), 1.0)):+.0f} %"
    return (
        f"{front}| {figures.gib:.1f} of {pod.hbm_bytes / (1 << 30):.2f} GiB | {1e3 * seconds:.2f} ms | {rate:,.3g} "
        f"| {1e3 * figures.floor:.2f} ms, {figures.binds} | {published} | {off} {case.half if off else ''} |"
    )


def tested(kept: Mapping[str, Figures], scales: Mapping[str, float]) -> str:
    """One line: how many rows of the test half are near what was published, and which are not."""
    half = [case for case in CASES if case.half == "t" and case.name in kept]
    off = {case.name: deviation(case, kept[case.name], scales.get(generation(case), 1.0)) for case in half}
    missed = [f"{name} ({100 * each:+.0f} %)" for name, each in off.items() if abs(each) > NEAR]
    absent = [case.name for case in CASES if case.half == "t" and case.name not in kept]
    said = f"test half: {len(half) - len(missed)} of {len(half)} rows within {NEAR:.0%}"
    said += f"; missed: {', '.join(missed)}" if missed else ""
    return said + (f"; not compiled: {', '.join(absent)}" if absent else "")


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
    chosen = [*(PLANNED if asked.planned else CASES)]
    if asked.cases:
        chosen = [case for case in (*CASES, *PLANNED) if any(case.name.startswith(word) for word in asked.cases)]
    if asked.missing:
        chosen = [case for case in chosen if case.name not in kept]
    if asked.from_figures:
        chosen = [case for case in chosen if case.name in kept]
    print("| case | pod | rows × positions | a chip | a token | tokens/s/chip | floor | published | off |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in chosen:
        if not asked.from_figures:
            kept[case.name] = compiled(case, kept.get(case.name) if asked.steps else None, keep_text=asked.keep_text)
            if asked.write:
                # Another run may have kept others meanwhile.
                kept |= {name: each for name, each in _kept().items() if name != case.name}
                FIGURES.write_text(json.dumps({name: asdict(each) for name, each in kept.items()}, indent=1) + "\n")
        print(row(case, kept[case.name], GENERATING_SCALE), flush=True)
    if not asked.planned and not asked.cases:
        print("\nno anchors:")
        for what, why in EXCLUDED.items():
            print(f"- {what}: {why}")
        print(f"\n{tested(kept, GENERATING_SCALE)}")
    if asked.fit:
        print(f"best fit of the calibrating cases: cycles of each generation × {fitted(kept)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
