"""Published steps compiled with one thing changed: what a cost of `benchmarks/step_costs.py` would be worth. No TPU.

    python benchmarks/step_experiments.py [llama2_70b_v6e-256 …] --compile FOLDER [--experiment rotation …]
    python benchmarks/step_experiments.py

Each row is compiled as it is and with what it has in `ROWS`. Texts and sums stay in the folder, and what is there is
not compiled again; what came of it is kept in `tests/golden/step_experiments.json`, of which the tables are printed:
the cost that an experiment is aimed at, all cycles and the high end of the step over the published time, before and
after. Experiments joined by `+` are compiled in one: each has its own kind of cycles, and what the step gains is of
both.

An experiment is no option of a run. It changes functions of the model in the process that compiles (`describe` below),
or keys of the row's config, and what it gives tells what a remedy could be worth: some compute another model (one
without norms), which no run would want. Answers of such compilations are never kept.
"""

import argparse
import importlib.metadata
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from haliax import Axis, NamedArray

    from levanter.runplan import RunPlan, Target

KEPT = Path(__file__).parent.parent / "tests" / "golden" / "step_experiments.json"
AS_IT_IS = "as_it_is"
NOTICED = 0.002
"""The share of all cycles from which a kind that no experiment was aimed at is said to have moved."""


def _rotation() -> None:
    """The halves of a head are swapped by a product with a matrix of 0, 1 and −1, without slices.

    Each sum of the product has one term, so no bit changes.
    """
    import haliax as hax
    import jax.numpy as jnp
    import numpy as np

    from levanter.layers.attention import grouped

    def apply_rotary(x: "NamedArray", cos: "NamedArray", sin: "NamedArray", HeadSize: "Axis") -> "NamedArray":
        assert cos.resolve_axis(HeadSize.name).size == HeadSize.size, "all features of a head are rotated here"
        half = np.eye(HeadSize.size // 2)
        nothing = np.zeros_like(half)
        Turned = HeadSize.alias("turned")
        turn = hax.named(jnp.asarray(np.block([[nothing, half], [-half, nothing]]), x.dtype), (HeadSize, Turned))
        quarter_turn = hax.dot(x, turn, axis=HeadSize).rename({"turned": HeadSize.name})
        return (x * cos.astype(x.dtype) + quarter_turn * sin.astype(x.dtype)).rearrange(x.axes)

    grouped.apply_rotary = apply_rotary


def _no_norms() -> None:
    """No norms at all, which is another model: what any remedy could give at the most."""
    from levanter.layers.norm import RMSNorm

    def unchanged(self: RMSNorm, x: "NamedArray") -> "NamedArray":
        del self
        return x

    RMSNorm.__call__ = unchanged


def _flat_heads() -> None:
    """A projection's axes are flattened before its product, where it has several (heads and their features)."""
    import math

    import haliax as hax
    import jax.numpy as jnp

    from levanter.layers.linear import Dense

    as_it_is = Dense.dot

    def dot(self: Dense, x: "NamedArray", axis: tuple[str, ...], *, dtype: Any = None) -> "NamedArray":
        Out = tuple(each for each in self.axes if each.name not in axis)
        rest = tuple(each for each in x.axes if each.name not in axis)
        if max(len(Out), len(axis)) == 1 or {each.name for each in Out} & {each.name for each in rest}:
            return as_it_is(self, x, axis, dtype=dtype)
        of_out, of_in = (math.prod(self.array.axis_size(name) for name in names) for names in (
            [each.name for each in Out], axis
        ))  # fmt: skip
        matrix = self.array.rearrange((*Out, *(self.array.resolve_axis(name) for name in axis))).array
        rows = x.rearrange((*rest, *(x.resolve_axis(name) for name in axis))).array
        rows = rows.reshape(*(each.size for each in rest), of_in)
        found = jnp.einsum("...i,oi->...o", rows, matrix.reshape(of_out, of_in), preferred_element_type=dtype)
        return hax.named(found.reshape(*(each.size for each in (*rest, *Out))), (*rest, *Out))

    Dense.dot = dot


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One change of a step.

    Attributes:
        says: what is changed, for people.
        cost: the kind of `step_costs` that it is aimed at.
        patch: what changes the model's functions, in the process that compiles.
        also: more of the run's command line.
        policy: `model.gradient_checkpointing` in place of the row's.
    """

    says: str
    cost: str
    patch: Callable[[], None] | None = None
    also: tuple[str, ...] = ()
    policy: Any = None


INPUTS_ALONE: Mapping[str, Any] = {"save_carries": True, "save_block_internals": [], "offload_block_internals": []}
EXPERIMENTS = {
    "rotation": Experiment(says="rotation by a product", cost="rotation and layout", patch=_rotation),
    "no_norms": Experiment(says="no norms (the most that a remedy could give)", cost="norms", patch=_no_norms),
    "flat_heads": Experiment(says="heads flattened before their products", cost="weights", patch=_flat_heads),
    "inputs_alone": Experiment(says="of a block its input alone is saved", cost="saved", policy=INPUTS_ALONE),
    "replicas_4": Experiment(
        says="four replicas, so that a chip has 128 features or more", cost="zeros",
        also=("--trainer.mesh.axes.replica=4",),
    ),
    "replicas_8": Experiment(
        says="eight replicas, so that a chip has 128 features or more", cost="zeros",
        also=("--trainer.mesh.axes.replica=8",),
    ),
}  # fmt: skip
"""By the name on the command line."""
ROWS: Mapping[str, Sequence[str]] = {
    "llama2_70b_v6e-256": ("rotation", "flat_heads", "no_norms"),
    "llama3.1_70b_v6e-256": ("rotation+no_norms", "inputs_alone"),
    "llama3.1_405b_v6e-256_fsdp": ("rotation+no_norms", "flat_heads"),
    "llama3.1_405b_v5p-1024": ("rotation+no_norms", "replicas_4"),
    "maxtext_32b_v5p-128": ("rotation+no_norms", "inputs_alone"),
    "llama2_7b_v5p-512": ("rotation+no_norms", "inputs_alone", "replicas_8"),
    "llama3.1_8b_v6e-256": ("rotation+no_norms", "inputs_alone"),
    "maxtext_16b_v5e-256": ("rotation+no_norms", "flat_heads"),
    "llama2_70b_v5p-1024": ("rotation+no_norms", "inputs_alone", "replicas_8"),
}
"""What is compiled for each row whose own cycles are more than 10 % slower than published: its three largest costs."""


def _parts(experiment: str) -> list[Experiment]:
    """Those that are compiled in one."""
    return [] if experiment == AS_IT_IS else [EXPERIMENTS[name] for name in experiment.split("+")]


def describe(payload: Mapping[str, Any], target: "Target") -> "RunPlan":
    """The run of a row with an experiment's change in it; called by the process that compiles."""
    for each in _parts(payload["experiment"]):
        if each.patch is not None:
            each.patch()
    from levanter.main.plan import describe as as_it_is

    return as_it_is({name: payload[name] for name in ("entry_point", "argv")}, target)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A compiled step of a row.

    Attributes:
        kinds: cycles by kind (`step_costs`), at the row's true depth.
        seconds: of all cycles, as the compiler states them.
        exposed: seconds of collectives that the schedule does not hide.
        high: the step by its own cycles, as the compiler states them, over the published time.
    """

    kinds: Mapping[str, int]
    seconds: float
    exposed: float
    high: float

    @property
    def total(self) -> int:
        """All cycles."""
        return sum(self.kinds.values())


def compiled(name: str, experiment: str, folder: Path) -> Outcome:
    """A row's step, with an experiment or as it is.

    Args:
        name: of the row.
        experiment: of `EXPERIMENTS`, several joined by `+`; `AS_IT_IS` for none.
        folder: where texts and sums are, or will be.
    """
    import published_step_times as published
    import step_costs

    from levanter.plan.calibration import KERNEL_EFFICIENCY

    case = next(each for each in published.CASES if each.config == name)
    folder = folder / experiment
    sums = folder / name / "sums.json"
    parts = _parts(experiment)
    if not sums.exists():
        found, _ = published.compiled(
            case,
            keep_text=folder,
            also=[word for each in parts for word in each.also],
            policy=next((each.policy for each in parts if each.policy is not None), None),
            experiment=experiment if parts else None,
        )
        sums.write_text(json.dumps(asdict(found), indent=1) + "\n")
    figures = published.Figures(**json.loads(sums.read_text()))
    depth = len(published.model_of(case).layers)
    layers = None if figures.layers_compiled == depth else depth
    text = (folder / name / "train_step.hlo.txt").read_text()
    # Not the end of a range that is wider where nothing calibrates.
    seconds = figures.cycles + figures.kernels_at_peak / KERNEL_EFFICIENCY + figures.exposed
    return Outcome(
        kinds=step_costs.sums(step_costs.spent(text, layers=layers)),
        seconds=figures.cycles,
        exposed=figures.exposed,
        high=case.tokens / published.per_chip(case, figures, seconds),
    )


def kept() -> dict[str, dict[str, Outcome]]:
    """What is kept, by row and experiment."""
    if not KEPT.exists():
        return {}
    found = json.loads(KEPT.read_text())["compiled"]
    return {row: {name: Outcome(**values) for name, values in each.items()} for row, each in found.items()}


def keep(outcomes: Mapping[str, Mapping[str, Outcome]]) -> None:
    """Writes what is kept."""
    rows = {
        row: {name: asdict(outcomes[row][name]) for name in (AS_IT_IS, *ROWS[row]) if name in outcomes[row]}
        for row in ROWS
        if row in outcomes
    }
    made = {package: importlib.metadata.version(package) for package in ("jax", "libtpu")}
    KEPT.write_text(json.dumps({"made_with": made, "compiled": rows}, indent=1) + "\n")


HEADER = (
    "| row | cost | changed | that cost, M | others, M | all cycles, M | exposed | high end over published |",
    "|---|---|---|---|---|---|---|---|",
)


def table(outcomes: Mapping[str, Mapping[str, Outcome]]) -> list[str]:
    """What came of the experiments, as lines of Markdown."""
    lines = list(HEADER)
    for name, found in outcomes.items():
        for experiment in ROWS[name]:
            if experiment in found:
                lines += _lines(name, experiment, found[AS_IT_IS], found[experiment])
    return lines


def _lines(name: str, experiment: str, before: Outcome, after: Outcome) -> list[str]:
    """Lines of one compilation: one for each cost that it is aimed at."""
    parts = _parts(experiment)
    was, now = Counter(before.kinds), Counter(after.kinds)
    moved = {kind: now[kind] - was[kind] for kind in was | now if kind not in {each.cost for each in parts}}
    large = sorted((k for k in moved if abs(moved[k]) > NOTICED * before.total), key=lambda kind: -abs(moved[kind]))
    others = ", ".join(f"{kind} {'+' if moved[kind] > 0 else '−'}{_millions(abs(moved[kind]))}" for kind in large)
    share = f"{100 * (after.total / before.total - 1):+.1f} %".replace("-", "−")
    step = (
        f"{others or '–'} | {_millions(before.total)} → {_millions(after.total)} ({share}) "
        f"| {before.exposed:.2f} → {after.exposed:.2f} s | {before.high:.3f} → {after.high:.3f} |"
    )
    return [
        f"| {name} | {part.cost} | {part.says} | {_millions(was[part.cost])} → {_millions(now[part.cost])} | "
        + (step if part is parts[0] else "in one with the line above | | | |")
        for part in parts
    ]


def costs(outcomes: Mapping[str, Mapping[str, Outcome]]) -> list[str]:
    """The costs of each row as it is that are no matmuls, as lines of Markdown."""
    lines = ["| row | high end over published | matmuls | largest others |", "|---|---|---|---|"]
    for name, found in outcomes.items():
        step = found[AS_IT_IS]
        others = [f"{kind} {_of(step, kind)}" for kind in step.kinds if kind != "matmuls"][:3]
        all_of_it = f"of {_millions(step.total)} M"
        lines.append(f"| {name} | {step.high:.2f} | {_of(step, 'matmuls')} {all_of_it} | {'; '.join(others)} |")
    return lines


def _of(step: Outcome, kind: str) -> str:
    cycles = step.kinds[kind]
    return f"{_millions(cycles)} M ({100 * cycles / step.total:.1f} %)"


def _millions(cycles: int) -> str:
    return f"{cycles / 1e6:,.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="which; all of `ROWS` by default")
    parser.add_argument("--experiment", action="append", default=[], help=f"only these, of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--compile", type=Path, metavar="FOLDER", help="compile what is not in this folder")
    asked = parser.parse_args()
    unknown = {name for each in asked.experiment for name in each.split("+")} - EXPERIMENTS.keys()
    if unknown or not set(asked.rows) <= ROWS.keys():
        parser.error(f"there are rows {', '.join(ROWS)} and experiments {', '.join(EXPERIMENTS)}")
    chosen = {name: asked.experiment or ROWS[name] for name in asked.rows or ROWS}
    if asked.compile is not None:
        for name, experiments in chosen.items():
            for experiment in (AS_IT_IS, *experiments):
                outcome, now = compiled(name, experiment, asked.compile), kept()
                keep({**now, name: {**now.get(name, {}), experiment: outcome}})
    outcomes = {name: found for name, found in kept().items() if name in chosen}
    print("\n".join([*costs(outcomes), "", *table(outcomes)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
