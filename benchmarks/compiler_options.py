"""Compiler options compared: what the TPU compiler makes of a run's own Program with and without them. No TPU.

    python benchmarks/compiler_options.py [train_1b_v6e-8 …] [--compile] [--sets default no_rings …]

Each case is a run on a pod, and the Program that makes up its time. Each *set* is some options of XLA, given to the run
as `trainer.compiler_options`, or `tuned` for `trainer.compiler: tuned`. What the compiler says is kept in
`tests/golden/compiler_options.json`, written after each compilation: begun again, the benchmark goes on where it was.
Without `--compile` only what is kept is printed. `levanter.hardware.compiler` has the options that came of this.

A caution that the figures carry: they are the compiler's own. It does not look into attention kernels, so an option
that gives kernels more memory shows nothing; cycles of a ring of small matmuls leave out what it costs to start them.
"""

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from levanter.commands.catalog import ENTRY_POINTS
from levanter.config import load_written
from levanter.hardware import parse_accelerator
from levanter.hardware.compiler import Layout
from levanter.plan.aot import Compiled, compile_programs
from levanter.plan.comms import Network
from levanter.plan.compile_cache import CompileCache
from levanter.plan.step_time_model import step_time
from levanter.plan.target_from_name import pod_target
from levanter.runplan import RunPlan

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "tests" / "golden" / "compiler_options.json"
GIB = 1 << 30
TUNED = "tuned"
WINDOWED = "xla_jf_spmd_threshold_for_windowed_einsum_mib"

SETS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    # Whole gathers in place of rings of small matmuls.
    "no_rings": {WINDOWED: "1000000"},
    # Memory of a core that one fusion may use, in KiB.
    "vmem_48": {"xla_tpu_scoped_vmem_limit_kib": "49152"},
    "vmem_64": {"xla_tpu_scoped_vmem_limit_kib": "65536"},
    "vmem_96": {"xla_tpu_scoped_vmem_limit_kib": "98304"},
    # Gathers run beside matmuls, as part of the same fusion.
    "async_gather": {
        "xla_enable_async_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
        "xla_tpu_overlap_compute_collective_tc": "true",
    },
    "async_reduce": {
        "xla_enable_async_all_reduce": "true",
        "xla_enable_async_reduce_scatter_fusion": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": "true",
    },
    "data_parallel": {
        "xla_tpu_enable_data_parallel_all_reduce_opt": "true",
        "xla_tpu_data_parallel_opt_different_sized_ops": "true",
    },
    "scatter_layout": {
        "xla_tpu_use_minor_sharding_for_major_trivial_input": "true",
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "1",
        "xla_tpu_assign_all_reduce_scatter_layout": "true",
    },
    "scheduler": {
        "xla_tpu_enable_all_experimental_scheduler_features": "true",
        "xla_tpu_enable_scheduler_memory_pressure_tracking": "true",
        "xla_tpu_enable_ag_backward_pipelining": "true",
        "xla_latency_hiding_scheduler_rerun": "2",
    },
    "rings_if_faster": {"xla_tpu_choose_faster_windowed_einsum_over_mem": "true"},
}
"""Options by what they are for, as publishers of fast runs set them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run whose Program is compiled.

    Attributes:
        name: of its figures.
        entry_point: `train_lm` or `eval_lm`.
        argv: its command line, paths below the repository.
        target: the pod.
        program: what makes up its time.
        what: the run, for people.
        layout: of the run, see `hardware.compiler`.
        held_out: whether the tuned options were chosen without it, so that it says what they are worth elsewhere.
    """

    name: str
    entry_point: str
    argv: tuple[str, ...]
    target: str
    program: str
    what: str
    layout: Layout = "fsdp"
    held_out: bool = False

    @property
    def words(self) -> list[str]:
        """The command line with whole paths."""
        return [str(ROOT / word) if word.startswith("config/") else word for word in self.argv]


_LIKE_8X7B = (
    "--configs", "config/train/llama3_8b_v6e-128.yaml", "config/model/mixtral_8x22b.yaml",
    "--model.max_seq_len=4096", "--model.hidden_dim=4096", "--model.intermediate_dim=14336", "--model.num_heads=32",
    "--data.tokenizer=mistralai/Mixtral-8x22B-v0.1", "--trainer.train_batch_size=64",
)  # fmt: skip
_MIXTRAL = (
    *_LIKE_8X7B, "--model.num_layers=32", "--trainer.mesh.axes.model=4",
    "--trainer.mesh.shared_mapping={expert: model, mlp: null}",
)  # fmt: skip
CASES = (
    Case(
        name="train_1b_v6e-8", entry_point="train_lm", target="v6e-8", program="train_step",
        argv=("--config_path", "config/train/llama_1b_v6e-64.yaml", "--trainer.train_batch_size=64"),
        what="Llama 3.2 1B, FSDP 8",
    ),
    Case(
        name="eval_8b_v6e-8", entry_point="eval_lm", target="v6e-8", program="score",
        argv=(
            "--configs", "config/eval/llama3.1_405b_v4-256.yaml", "config/model/llama3.1_8b.yaml",
            "--hf_checkpoint=meta-llama/Llama-3.1-8B", "--trainer.mesh.axes.model=1",
            "--trainer.per_device_eval_parallelism=16",
        ),
        what="Llama 3.1 8B scored, FSDP 8",
    ),
    Case(
        name="train_8b_v5p-64", entry_point="train_lm", target="v5p-64", program="train_step",
        argv=("--config_path", "config/train/llama3_8b_v6e-128.yaml"),
        what="Llama 3.1 8B, FSDP 32",
    ),
    Case(
        name="train_8b_v5p-16", entry_point="train_lm", target="v5p-16", program="train_step",
        argv=(
            "--config_path", "config/train/llama3_8b_v6e-128.yaml", "--model.max_seq_len=8192",
            "--trainer.train_batch_size=16",
        ),
        what="Llama 3.1 8B, FSDP 8",
    ),
    Case(
        name="train_1b_v5p-8", entry_point="train_lm", target="v5p-8", program="train_step",
        argv=("--config_path", "config/train/llama_1b_v6e-64.yaml", "--trainer.train_batch_size=64"),
        what="Llama 3.2 1B, FSDP 4",
    ),
    Case(
        name="train_16b_v5e-256", entry_point="train_lm", target="v5e-256", program="train_step",
        argv=("--config_path", "config/train/published/maxtext_16b_v5e-256.yaml"),
        what="16 B, FSDP 256",
    ),
    Case(
        name="train_8x7b_v5p-64", entry_point="train_lm", target="v5p-64", program="train_step", argv=_MIXTRAL,
        what="Mixtral 8x7B, FSDP 8 × experts 4", layout="other",
    ),
    Case(
        name="train_32b_v5p-128", entry_point="train_lm", target="v5p-128", program="train_step",
        argv=("--config_path", "config/train/published/maxtext_32b_v5p-128.yaml"),
        what="32 B, FSDP 16 × tensor 4", layout="fsdp_and_tensor",
    ),
    Case(
        name="train_70b_v5p-128", entry_point="train_lm", target="v5p-128", program="train_step",
        argv=(
            "--config_path", "config/train/published/llama2_70b_v5p-1024.yaml", "--trainer.train_batch_size=64",
            "--model.gradient_checkpointing=true", "--trainer.mesh.axes.model=4",
        ),
        what="Llama 2 70B, FSDP 16 × tensor 4", layout="fsdp_and_tensor", held_out=True,
    ),
    Case(
        # As many layers as leave room on eight chips; a scan over more is the same text.
        name="train_moe_v6e-8", entry_point="train_lm", target="v6e-8", program="train_step",
        argv=(
            *_LIKE_8X7B, "--model.num_layers=4", "--trainer.mesh.axes.model=1",
            "--trainer.per_device_parallelism=2",
        ),
        what="4 layers of Mixtral 8x7B, FSDP 8", held_out=True,
    ),
    Case(
        name="train_d24_v6e-8", entry_point="train_lm", target="v6e-8", program="train_step",
        argv=("--config_path", "config/train/published/nanochat_d24_v6e-8.yaml"),
        what="24 layers × 1,536, FSDP 8", held_out=True,
    ),
    Case(
        name="eval_8b_v6e-8_tp2", entry_point="eval_lm", target="v6e-8", program="score",
        argv=(
            "--configs", "config/eval/llama3.1_405b_v4-256.yaml", "config/model/llama3.1_8b.yaml",
            "--hf_checkpoint=meta-llama/Llama-3.1-8B", "--trainer.mesh.axes.model=2",
            "--trainer.per_device_eval_parallelism=16",
        ),
        what="Llama 3.1 8B scored, FSDP 4 × tensor 2", layout="fsdp_and_tensor",
    ),
    Case(
        name="train_8b_v6e-64", entry_point="train_lm", target="v6e-64", program="train_step",
        argv=("--config_path", "config/train/llama3_8b_v6e-128.yaml"),
        what="Llama 3.1 8B, FSDP 64", held_out=True,
    ),
    Case(
        name="train_7b_v4-32", entry_point="train_lm", target="v4-32", program="train_step",
        argv=("--config_path", "config/train/published/llama2_7b_v4-32.yaml"),
        what="Llama 2 7B, FSDP 16",
    ),
    *(
        Case(
            name=f"eval_8b_{target}", entry_point="eval_lm", target=target, program="score",
            argv=(
                "--configs", "config/eval/llama3.1_405b_v4-256.yaml", "config/model/llama3.1_8b.yaml",
                "--hf_checkpoint=meta-llama/Llama-3.1-8B", "--trainer.mesh.axes.model=1",
                "--trainer.per_device_eval_parallelism=16",
            ),
            what=f"Llama 3.1 8B scored, FSDP {chips}",
        )
        for target, chips in (("v5p-8", 4), ("v5e-8", 8))
    ),
    Case(
        name="train_1b_v5e-8", entry_point="train_lm", target="v5e-8", program="train_step",
        argv=("--config_path", "config/train/llama_1b_v6e-64.yaml", "--trainer.train_batch_size=64"),
        what="Llama 3.2 1B, FSDP 8",
    ),
    Case(
        name="train_d24_v5e-8", entry_point="train_lm", target="v5e-8", program="train_step",
        argv=("--config_path", "config/train/published/nanochat_d24_v6e-8.yaml"),
        what="24 layers × 1,536, FSDP 8", held_out=True,
    ),
    *(
        Case(
            name=f"eval_27b_{target}", entry_point="eval_lm", target=target, program="score",
            argv=(
                "--config_path", "config/eval/gemma3_27b.yaml", "--trainer.mesh.axes.model=1",
                "--trainer.per_device_eval_parallelism=4",
            ),
            what="Gemma 3 27B scored, FSDP 8", held_out=True,
        )
        for target in ("v6e-8", "v5e-8")
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the compiler made of a case with a set of options; seconds of one step.

    Attributes:
        cycles: the compiler's estimate over the clock, as it states it.
        kernels: attention and grouped products.
        exposed: collectives that the schedule does not hide.
        busy: of the busiest links.
        collective_gib: bytes of all collectives on a device.
        permutes: collective permutes that run.
        peak_gib: on a chip; what was asked for where it was refused.
        refused: whether it was.
        compile_seconds: on two cores, beside other work.
        options: what it was compiled with.
    """

    cycles: float = 0.0
    kernels: float = 0.0
    exposed: float = 0.0
    busy: float = 0.0
    collective_gib: float = 0.0
    permutes: int = 0
    peak_gib: float = 0.0
    refused: bool = False
    compile_seconds: float = 0.0
    options: Mapping[str, str]

    @property
    def seconds(self) -> float:
        """Of a step, the compiler's cycles as they are: nothing is calibrated for other options."""
        return self.cycles + self.kernels + self.exposed


def argv_of(case: Case, name: str) -> list[str]:
    """The command line of a case with a set of options."""
    if name == TUNED:
        return [*case.words, "--trainer.compiler=tuned"]
    options = {option: value for each in name.split("+") for option, value in SETS[each].items()}
    own = [f"--trainer.compiler_options={json.dumps(options)}"] if options else []
    return [*case.words, "--trainer.compiler=default", *own]


def described(case: Case, name: str) -> RunPlan:
    """The plan of a case with a set of options."""
    entry = ENTRY_POINTS[case.entry_point].load()
    loaded = load_written(entry.config, argv_of(case, name))
    return entry.describe(loaded.config, pod_target(parse_accelerator(case.target)), written=loaded.written)


def compiled(case: Case, name: str, *, keep_text: Path | None = None) -> Answer:
    """Compiles a case with a set of options.

    Args:
        case: which.
        name: a set, several joined by `+`, or `tuned`.
        keep_text: a folder for the compiler's text.
    """
    plan, argv, pod = described(case, name), argv_of(case, name), parse_accelerator(case.target)
    (outcome,) = compile_programs(
        "levanter.main.plan:describe",
        {"entry_point": case.entry_point, "argv": argv},
        target=case.target,
        programs=(case.program,),
        keep_text=keep_text,
        kept=CompileCache.here(),
        plan=plan,
    )
    options = dict(plan.program(case.program).compiler_options)
    if not isinstance(outcome, Compiled):
        needed, spent = outcome.refusal.needed / GIB, outcome.compile_seconds
        return Answer(refused=True, peak_gib=needed, compile_seconds=spent, options=options)
    assert outcome.figures is not None, outcome.text_error
    network = Network.of(outcome.mesh, pod, outcome.coordinates)
    experts = max((dict(each.leaf.axes).get("expert", 0) for each in plan.sharding.leaves), default=0)
    time = step_time(outcome.figures, network, experts=experts or None)
    assert time is not None, f"{case.name}: {case.target} states no cycles"
    collectives = outcome.figures.collectives
    return Answer(
        cycles=time.cycles,
        kernels=time.kernels_expected + time.copies,
        exposed=time.exposed,
        busy=max((link.busy for link in time.links), default=0.0),
        collective_gib=sum(each.total_bytes for each in collectives) / GIB,
        permutes=sum(each.times for each in collectives if each.kind == "collective-permute"),
        peak_gib=outcome.peak_bytes / GIB,
        compile_seconds=outcome.compile_seconds,
        options=options,
    )


def kept() -> dict[str, dict[str, Answer]]:
    """What is kept, by case and set."""
    if not FIGURES.exists():
        return {}
    found = json.loads(FIGURES.read_text())["compiled"]
    return {case: {name: Answer(**values) for name, values in sets.items()} for case, sets in found.items()}


def keep(answers: Mapping[str, Mapping[str, Answer]]) -> None:
    """Writes what is kept."""
    sets = list(SETS)
    rows = {
        case.name: {
            each: asdict(answers[case.name][each])
            for each in sorted(answers[case.name], key=lambda one: sets.index(one) if one in sets else len(sets))
        }
        for case in CASES
        if case.name in answers
    }
    made = {package: importlib.metadata.version(package) for package in ("jax", "libtpu")}
    FIGURES.write_text(json.dumps({"made_with": made, "compiled": rows}, indent=1) + "\n")


HEADER = (
    "| run | options | cycles | exposed | step | against default | GiB a chip | permutes | compiled in |",
    "|---|---|---|---|---|---|---|---|---|",
)


def row(case: Case, name: str, answer: Answer, default: Answer | None) -> str:
    """A line of the table."""
    first = f"| {case.what}, {case.target} | {name.replace('_', ' ')} "
    if answer.refused:
        return f"{first}| – | – | – | refused | {answer.peak_gib:.2f} | – | {answer.compile_seconds:.0f} s |"
    against = (
        "–"
        if name == "default" or default is None or default.refused
        else f"{100 * (answer.seconds / default.seconds - 1):+.1f} %"
    )
    return (
        f"{first}| {answer.cycles:.3f} s | {answer.exposed:.3f} s | {answer.seconds:.3f} s | {against} "
        f"| {answer.peak_gib:.2f} | {answer.permutes:,} | {answer.compile_seconds:.0f} s |"
    )


def table(names: Sequence[str]) -> list[str]:
    """The kept figures of cases, as lines of Markdown."""
    answers, lines = kept(), list(HEADER)
    for case in CASES:
        if case.name in names:
            found = answers.get(case.name, {})
            lines += [row(case, name, answer, found.get("default")) for name, answer in found.items()]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="which; all by default")
    parser.add_argument("--compile", action="store_true", help="compile what is not kept")
    parser.add_argument("--sets", nargs="+", default=["default"], help=f"of {', '.join(SETS)}, {TUNED}; joined by +")
    parser.add_argument("--keep-text", type=Path, help="a folder for the compiler's text")
    asked = parser.parse_args(argv)
    # This process computes nothing.
    jax.config.update("jax_platforms", "cpu")
    chosen = [case for case in CASES if case.name in asked.cases or not asked.cases]
    if asked.compile:
        for case in chosen:
            for name in asked.sets:
                if name in kept().get(case.name, {}):
                    continue
                folder = None if asked.keep_text is None else asked.keep_text / case.name / name
                answer = compiled(case, name, keep_text=folder)
                # Another one may have compiled beside this.
                now = kept()
                keep({**now, case.name: {**now.get(case.name, {}), name: answer}})
                print(row(case, name, answer, kept()[case.name].get("default")), file=sys.stderr, flush=True)
    print("\n".join(table([case.name for case in chosen])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
