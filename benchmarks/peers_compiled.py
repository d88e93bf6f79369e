"""MaxText's train step and ours on the same TPU compiler, without a TPU: memory, cycles, collectives, modelled speed.

    python benchmarks/peers_compiled.py [8b_v5p-16 …] [--compile] [--sides ours maxtext] [--environment FOLDER]

Each case is a model, a pod, a batch and a sequence length; parameters and both moments of Adam are float32, products
are bfloat16, and both sides shard over all chips (FSDP). *MaxText, recipe* has the options of its published recipe, as
far as this compiler accepts them; *MaxText, plain* its defaults without rings of small matmuls, which are faster here
than its defaults. *Ours* are the defaults of this project and what a case must say to be the same run.

`--compile` makes an environment with both projects (Python 3.12 or newer: MaxText needs it) in a temporary folder, or
in `--environment`, and compiles what is not kept, one Program at a time. Figures are kept in
`tests/golden/peers_compiled.json`; without `--compile` they are printed. Both texts are read by the same code. The step
is the compiler's cycles at the chip's clock, without any scale, with the attention kernels at the speed that
`docs/preflight/step-time.md` has for them, copies, and collectives that nothing hides.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "tests" / "golden" / "peers_compiled.json"
GIB = 1 << 30
OURS = "ours"
VERSIONS = ("jax==0.12.0.1", "libtpu==0.0.50.1", "maxtext==0.2.5")
# What MaxText's train step imports. Its extras also pull in what serves and trains after pretraining, 300 packages.
IMPORTED = (
    "flax", "optax", "orbax-checkpoint", "omegaconf", "pydantic", "tensorflow-cpu", "pathwaysutils", "qwix", "tokamax",
    "grain", "ml-goodput-measurement", "cloud-accelerator-diagnostics", "google-cloud-storage", "tensorboardX",
    "jsonlines", "transformers", "tensorflow-datasets", "drjax", "aqtp", "tiktoken", "sentencepiece", "sympy",
)  # fmt: skip
NO_RINGS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """How MaxText compiles a case.

    Attributes:
        settings: of its configuration, `key=value`.
        options: of XLA.
    """

    settings: tuple[str, ...]
    options: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A train step that both sides compile.

    Attributes:
        name: of its figures.
        what: the run, for people.
        target: the pod.
        rows: sequences on a chip.
        length: tokens in each.
        ours: the command line of `train_lm`, paths below the repository.
        theirs: how MaxText compiles it, by name.
        chosen_later: whether it was compiled after everything that the comparison changed here.
    """

    name: str
    what: str
    target: str
    rows: int
    length: int
    ours: tuple[str, ...]
    theirs: Mapping[str, Theirs]
    chosen_later: bool = False


# MaxText computes the logits of all positions at once; a block takes fewer bytes and almost as few cycles.
_8B = (
    *("--config_path", "config/train/llama3_8b_v6e-128.yaml", "--model.max_seq_len=8192"),
    "--model.cross_entropy_block_size=2048",
)
_FLASH = ("attention=flash", "use_iota_embed=true")
_MOE = (
    "--configs", "config/train/llama3_8b_v6e-128.yaml", "config/model/mixtral_8x22b.yaml", "--model.max_seq_len=4096",
    "--model.hidden_dim=4096", "--model.intermediate_dim=14336", "--model.num_heads=32", "--model.num_layers=32",
    "--data.tokenizer=mistralai/Mixtral-8x22B-v0.1", "--model.vocab_size=32000",
)  # fmt: skip
CASES = (
    Case(
        name="7b_v5p-8", what="Llama 2 7B, 4 × 4,096 a chip", target="v5p-8", rows=4, length=4096,
        ours=(
            "--config_path", "config/train/llama2_7b_v4-32.yaml", "--model.max_seq_len=4096",
            '--model.gradient_checkpointing={"save_carries": true, "save_block_internals": '
            '["query", "key", "value", "attention_output", "gate", "up"]}',
        ),
        theirs={
            "recipe": Theirs(
                settings=("model_name=llama2-7b", "remat_policy=minimal", "use_iota_embed=true"),
                options={
                    "xla_tpu_enable_data_parallel_all_reduce_opt": "true",
                    "xla_tpu_data_parallel_opt_different_sized_ops": "true",
                },
            ),
        },
    ),
    Case(
        name="8b_v5p-16", what="Llama 3.1 8B, 2 × 8,192 a chip, recomputed", target="v5p-16", rows=2, length=8192,
        ours=_8B,
        theirs={"plain": Theirs(settings=("model_name=llama3.1-8b", "remat_policy=full"), options=NO_RINGS)},
    ),
    Case(
        name="8b_v6e-8", what="Llama 3.1 8B, 1 × 8,192 a chip, recomputed", target="v6e-8", rows=1, length=8192,
        ours=_8B,
        theirs={"plain": Theirs(settings=("model_name=llama3.1-8b", "remat_policy=full", *_FLASH), options=NO_RINGS)},
    ),
    Case(
        name="13b_v5e-64", what="Llama 2 13B, 1 × 4,096 a chip, recomputed", target="v5e-64", rows=1, length=4096,
        ours=(
            "--config_path", "config/train/llama2_7b_v4-32.yaml", "--model.max_seq_len=4096", "--model.hidden_dim=5120",
            "--model.intermediate_dim=13824", "--model.num_layers=40", "--model.num_heads=40",
            "--model.num_kv_heads=40",
        ),
        theirs={"plain": Theirs(settings=("model_name=llama2-13b", "remat_policy=full", *_FLASH), options=NO_RINGS)},
        chosen_later=True,
    ),
    Case(
        name="8x7b_v5p-64", what="Mixtral 8x7B, 2 × 4,096 a chip, recomputed", target="v5p-64", rows=2, length=4096,
        ours=(*_MOE, "--trainer.mesh.axes.model=1"),
        theirs={"plain": Theirs(settings=("model_name=mixtral-8x7b", "remat_policy=full", *_FLASH), options=NO_RINGS)},
        chosen_later=True,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the compiler made of one side of a case.

    Attributes:
        heap_bytes: on a chip.
        cycles: of a step; those of matmuls in it.
        matmuls: cycles of fusions with products.
        kernels: seconds of attention kernels and of copies.
        exposed: seconds of collectives that nothing hides.
        seconds: of a step.
        collectives: bytes that enter or leave a chip in a step, by kind and mesh axes.
        compile_seconds: in the compiler.
        options: of XLA.
        unknown: operations without an estimate.
    """

    heap_bytes: int
    cycles: int
    matmuls: int
    kernels: float
    exposed: float
    seconds: float
    collectives: dict[str, int]
    compile_seconds: float
    options: dict[str, str]
    unknown: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="which; all by default")
    parser.add_argument("--compile", action="store_true", help="compile what is not kept")
    parser.add_argument("--again", action="store_true", help="compile what is kept, too")
    parser.add_argument("--sides", nargs="+", default=["ours", "maxtext"], choices=["ours", "maxtext"])
    parser.add_argument("--environment", type=Path, help="where both are installed; a temporary folder by default")
    parser.add_argument("--texts", type=Path, help="a folder in which the compiler's texts stay")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "SIDE"), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.one is not None:
        case = next(case for case in CASES if case.name == given.one[0])
        print(json.dumps(asdict(compiled(case, given.one[1], given.texts))))
        return 0
    chosen = [one for one in CASES if one.name in given.cases or not given.cases]
    if given.compile:
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            python = environment(given.environment or Path(folder) / "environment")
            for case, side in [(one, side) for one in chosen for side in sides(one, given.sides)]:
                if side not in kept().get(case.name, {}) or given.again:
                    keep(case.name, side, in_environment(python, case, side, given.texts or Path(folder)))
    print("\n".join(table()))
    return 0


def sides(case: Case, names: Sequence[str]) -> Iterator[str]:
    """The sides of a case: `maxtext` stands for each way to compile MaxText."""
    if "maxtext" in names:
        yield from case.theirs
    if OURS in names:
        yield OURS


def environment(folder: Path) -> Path:
    """The Python of an environment with both projects, made where there is none."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([newest_python(), "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*install, "-e", f"{ROOT}[plan]", *VERSIONS[:2], *IMPORTED], check=True)
        subprocess.run([*install, "--no-deps", VERSIONS[2]], check=True)
        (folder / "complete").touch()
    return python


def newest_python() -> str:
    """A Python of at least 3.12, which MaxText needs."""
    candidates = [sys.executable, "python3.12", "python3.13"]
    candidates += [str(path) for path in sorted(Path.home().glob(".pyenv/versions/3.1[23].*/bin/python3"))]
    check = "import ensurepip, sys; sys.exit(sys.version_info < (3, 12))"
    for candidate in candidates:
        try:
            if subprocess.run([candidate, "-c", check], capture_output=True).returncode == 0:
                return candidate
        except FileNotFoundError:
            continue
    raise ValueError("MaxText needs Python 3.12 or newer, and none is installed here")


def in_environment(python: Path, case: Case, side: str, texts: Path) -> Answer:
    """Compiles one side of a case in a process of the environment."""
    command = [python, __file__, "--one", case.name, side, "--texts", texts / case.name / side]
    # Both need an environment in which no TPU is looked for, before JAX is imported.
    variables = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **variables, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Answer(**json.loads(done.stdout.splitlines()[-1]))


def compiled(case: Case, side: str, texts: Path) -> Answer:
    """Compiles one side of a case in this process, which has both projects."""
    texts.mkdir(parents=True, exist_ok=True)
    return _ours(case, texts) if side == OURS else _theirs(case, case.theirs[side], texts)


def _ours(case: Case, texts: Path) -> Answer:
    from levanter.commands.catalog import ENTRY_POINTS
    from levanter.config import load_written
    from levanter.hardware import parse_accelerator
    from levanter.plan.aot import Compiled, compile_programs
    from levanter.plan.target_from_name import pod_target

    pod, entry = parse_accelerator(case.target), ENTRY_POINTS["train_lm"].load()
    words = [str(ROOT / word) if word.startswith("config/") else word for word in case.ours]
    words.append(f"--trainer.train_batch_size={case.rows * pod.chips}")
    loaded = load_written(entry.config, words)
    plan = entry.describe(loaded.config, pod_target(pod), written=loaded.written)
    (outcome,) = compile_programs(
        "levanter.main.plan:describe",
        {"entry_point": "train_lm", "argv": words},
        target=case.target,
        programs=("train_step",),
        keep_text=texts,
        kept=None,
        plan=plan,
    )
    if not isinstance(outcome, Compiled):
        raise ValueError(f"{case.name}: ours is refused: {outcome.refusal}")
    return _read(
        case,
        text=(texts / "train_step.hlo.txt").read_text(),
        mesh=outcome.mesh.axes,
        coordinates=outcome.coordinates,
        heap=outcome.peak_bytes,
        compile_seconds=outcome.compile_seconds,
        options=dict(plan.program("train_step").compiler_options),
    )


def _theirs(case: Case, theirs: Theirs, texts: Path) -> Answer:
    """MaxText's own functions for compiling ahead of time, in the order of its `train_compile`."""
    # As its `train_compile` sets before JAX starts.
    os.environ["LIBTPU_INIT_ARGS"] = "--xla_tpu_spmd_rng_bit_generator_unsafe=true"
    import jax

    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    import maxtext  # pyright: ignore[reportMissingImports]
    from flax.core.spmd import logical_axis_rules  # pyright: ignore[reportMissingImports]
    from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
    from maxtext.trainers.pre_train import train, train_compile  # pyright: ignore[reportMissingImports]
    from maxtext.utils import maxtext_utils, sharding  # pyright: ignore[reportMissingImports]

    from levanter.plan.compile_worker import reported_heap

    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    config = pyconfig.initialize(
        [
            *("train_compile", str(base), f"compile_topology={case.target}", "compile_topology_num_slices=1"),
            *("run_name=peers", "dataset_type=synthetic", "enable_checkpointing=false"),
            *(f"base_output_directory={texts}", "ici_fsdp_parallelism=-1", f"per_device_batch_size={case.rows}"),
            *(f"max_target_length={case.length}", *theirs.settings),
        ]
    )
    train_compile.validate_config(config)
    mesh = train_compile.get_topology_mesh(config)
    inputs, keywords, state, _, model = train_compile.get_shaped_inputs(mesh, config)
    parameters, state = sharding.maybe_update_params_sharding_with_opt(config, state)
    function, placed, results, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step,
        sharding.get_input_data_sharding(config, mesh),
        sharding.build_zero1_input_state_mesh_shardings(config, state, parameters),
        model,
        config,
        parameters,
    )
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        jitted = jax.jit(
            function, in_shardings=placed, out_shardings=results, static_argnums=static, donate_argnums=donated
        )
        lowered = jitted.lower(*inputs, **keywords)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        written: dict[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "NONE"}
        program = lowered.compile(compiler_options={**theirs.options, **written})
        heap = reported_heap(Path(folder))
    seconds = time.monotonic() - started
    text = program.as_text() or ""
    (texts / "train_step.hlo.txt").write_text(text)
    assert heap is not None, "the compiler wrote no memory report"
    devices = mesh.devices.flat
    return _read(
        case,
        text=text,
        mesh=tuple((axis, size) for axis, size in mesh.shape.items() if size > 1),
        coordinates=tuple((getattr(one, "slice_index", 0) or 0, *one.coords, one.core_on_chip) for one in devices),
        heap=heap,
        compile_seconds=seconds,
        options=dict(theirs.options),
    )


def _read(
    case: Case,
    *,
    text: str,
    mesh: Sequence[tuple[str, int]],
    coordinates: Any,
    heap: int,
    compile_seconds: float,
    options: dict[str, str],
) -> Answer:
    """Reads the compiler's text of either side."""
    from step_costs import MATMULS, spent, sums

    from haliax_ext.hlo import read_figures
    from haliax_ext.meshspec import MeshSpec
    from levanter.hardware import parse_accelerator
    from levanter.plan.comms import Network
    from levanter.plan.step_time_model import step_time

    spec = MeshSpec(axes=tuple(mesh))
    figures = read_figures(text, spec)
    modelled = step_time(figures, Network.of(spec, parse_accelerator(case.target), coordinates))
    assert modelled is not None, f"{case.name}: {case.target} states no cycles"
    moved: Counter[str] = Counter()
    for collective in figures.collectives:
        moved[f"{collective.kind} over {collective.over}"] += collective.total_bytes
    kernels = modelled.kernels_expected + modelled.copies
    return Answer(
        heap_bytes=heap,
        cycles=figures.total_cycles,
        matmuls=sums(spent(text)).get(MATMULS, 0),
        kernels=kernels,
        exposed=modelled.exposed,
        seconds=modelled.cycles + kernels + modelled.exposed,
        collectives=dict(moved.most_common()),
        compile_seconds=compile_seconds,
        options=options,
        unknown=modelled.unknown,
    )


def kept() -> dict[str, dict[str, Answer]]:
    """The kept figures, by case and side."""
    if not FIGURES.exists():
        return {}
    rows = json.loads(FIGURES.read_text())["compiled"]
    return {case: {side: Answer(**values) for side, values in answers.items()} for case, answers in rows.items()}


def keep(case: str, side: str, answer: Answer) -> None:
    """Adds figures to those that are kept."""
    answers = kept()
    answers.setdefault(case, {})[side] = answer
    rows = {
        case.name: {side: asdict(answers[case.name][side]) for side in sides(case, ("maxtext", OURS))
                    if side in answers[case.name]}
        for case in CASES
        if case.name in answers
    }  # fmt: skip
    FIGURES.write_text(json.dumps({"made_with": list(VERSIONS), "compiled": rows}, indent=1) + "\n")


HEADER = (
    "| case | side | GiB a chip | cycles (matmuls, others), million | kernels and copies | exposed | step "
    "| tokens/s/chip | GB of collectives | compiled in |",
    "|---|---|---|---|---|---|---|---|---|---|",
)
_SHORT_COLLECTIVES = 3


def table() -> list[str]:
    """The kept figures as lines of Markdown; of ours, in brackets, against the best of MaxText's."""
    answers, lines = kept(), list(HEADER)
    for case in CASES:
        theirs = [answer for side, answer in answers.get(case.name, {}).items() if side != OURS]
        for side, answer in answers.get(case.name, {}).items():
            best = min(theirs, key=lambda one: one.cycles, default=None) if side == OURS else None
            lines.append(_row(case, side, answer, best))
    return lines


def _row(case: Case, side: str, answer: Answer, best: Answer | None) -> str:
    def against(value: float, other: float | None) -> str:
        return "" if other is None else f" ({value / other:.3f} ×)"

    heap, cycles = answer.heap_bytes / GIB, answer.cycles / 1e6
    others = cycles - answer.matmuls / 1e6
    name = f"{case.what}, {case.target}{' (chosen later)' if case.chosen_later else ''}"
    moved = Counter(answer.collectives).most_common(_SHORT_COLLECTIVES)
    return (
        f"| {name} | {side if side == OURS else f'MaxText, {side}'} "
        f"| {heap:.2f}{against(heap, best and best.heap_bytes / GIB)} "
        f"| {cycles:,.0f} ({answer.matmuls / 1e6:,.0f}, {others:,.0f}){against(cycles, best and best.cycles / 1e6)} "
        f"| {answer.kernels:.3f} s | {answer.exposed:.3f} s | {answer.seconds:.3f} s "
        f"| {case.rows * case.length / answer.seconds:,.0f} "
        f"| {'; '.join(f'{what} {nbytes / 1e9:,.1f}' for what, nbytes in moved)} | {answer.compile_seconds:.0f} s |"
    )


if __name__ == "__main__":
    sys.exit(main())
