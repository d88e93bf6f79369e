"""Published steps compiled with one thing changed: what a cost of `benchmarks/step_costs.py` would be worth. No TPU.

    python benchmarks/step_experiments.py --texts FOLDER [llama2_70b_v6e-256 …] [--experiment rotation …] [--read]

Each row is compiled as it is and with what it has in `ROWS`; texts and sums stay in the folder, and what is there is
not compiled again. A line of the table has the cost that an experiment is aimed at, all cycles and the high end of the
step over the published time, before and after. `--read` only reads the folder. Experiments joined by `+` are compiled
in one: each has its own kind of cycles, and what the whole step gains is of both.

An experiment is no option of a run. It changes functions of the model in the process that compiles (`describe` below),
or keys of the row's config, and what it gives tells what a remedy could be worth: some compute another model (one
without norms), which no run would want. Answers of such compilations are never kept.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from haliax import Axis, NamedArray

    from levanter.run import RunPlan, Target


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
    "llama2_7b_v5p-512": ("rotation", "inputs_alone", "replicas_8"),
    "llama3.1_8b_v6e-256": ("rotation+no_norms", "inputs_alone"),
    "maxtext_16b_v5e-256": ("rotation+no_norms", "flat_heads"),
    "llama2_70b_v5p-1024": ("rotation", "inputs_alone", "replicas_8"),
}
"""What is compiled for each row whose own cycles are more than 10 % slower than published: its three largest costs."""


def _parts(experiment: str) -> list[Experiment]:
    """Those that are compiled in one."""
    return [EXPERIMENTS[name] for name in experiment.split("+")]


def describe(payload: Mapping[str, Any], target: "Target") -> "RunPlan":
    """The run of a row with an experiment's change in it; called by the process that compiles."""
    for each in _parts(payload["experiment"]):
        if each.patch is not None:
            each.patch()
    from levanter.main.plan import describe as as_it_is

    return as_it_is({name: payload[name] for name in ("entry_point", "argv")}, target)


def _sums(name: str, experiment: str | None, texts: Path, *, read: bool) -> tuple[Any, Path] | None:
    """Sums and text of a row, compiled where they are not in the folder; None where they are not and `read` is set."""
    import published_step_times as published

    case = next(each for each in published.CASES if each.config == name)
    folder = texts / (experiment or "as_it_is")
    text, sums = folder / name / "train_step.hlo.txt", folder / name / "sums.json"
    if not sums.exists():
        if read:
            return None
        parts = _parts(experiment) if experiment else []
        found, _ = published.compiled(
            case,
            keep_text=folder,
            also=[word for each in parts for word in each.also],
            policy=next((each.policy for each in parts if each.policy is not None), None),
            experiment=experiment,
        )
        sums.write_text(json.dumps(asdict(found), indent=1) + "\n")
    return published.Figures(**json.loads(sums.read_text())), text


def lines(name: str, experiment: str, texts: Path, *, read: bool) -> list[str]:
    """Lines of the table: one for each cost."""
    import published_step_times as published
    import step_costs

    case = next(each for each in published.CASES if each.config == name)
    pair = [_sums(name, each, texts, read=read) for each in (None, experiment)]
    kinds, ends, exposed = [], [], []
    for each in pair:
        if each is None:
            return []
        figures, text = each
        depth = len(published.model_of(case).layers)
        shallow = figures.layers_compiled != depth
        kinds.append(Counter(step_costs.sums(step_costs.spent(text.read_text(), layers=depth if shallow else None))))
        ends.append(f"{case.tokens / published.per_chip(case, figures, published.time_of(case, figures).high):.3f}")
        exposed.append(f"{figures.exposed:.2f}")
    (before, after), parts = kinds, _parts(experiment)
    whole = f"{_millions(before.total())} → {_millions(after.total())} M ({after.total() / before.total() - 1:+.1%})"
    moved = {kind: after[kind] - before[kind] for kind in before | after if kind not in {each.cost for each in parts}}
    large = sorted((k for k in moved if abs(moved[k]) > 0.002 * before.total()), key=lambda kind: -abs(moved[kind]))
    others = ", ".join(f"{kind} {'+' if moved[kind] > 0 else '−'}{_millions(abs(moved[kind]))}" for kind in large)
    rest = f"{others or '–'} | {whole} | {' → '.join(exposed)} s | {' → '.join(ends)} |"
    return [
        f"| {name} | {part.cost} | {part.says} | {_millions(before[part.cost])} → {_millions(after[part.cost])} M | "
        + (rest if part is parts[0] else "as above, in one | | | |")
        for part in parts
    ]


def _millions(cycles: int) -> str:
    return f"{cycles / 1e6:,.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="which; all of `ROWS` by default")
    parser.add_argument("--experiment", action="append", default=[], help=f"only these, of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--texts", type=Path, required=True, help="a folder for texts and sums")
    parser.add_argument("--read", action="store_true", help="compile nothing")
    asked = parser.parse_args()
    unknown = {name for each in asked.experiment for name in each.split("+")} - EXPERIMENTS.keys()
    if unknown:
        parser.error(f"no such experiments: {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}")
    print("| row | cost | changed | that cost | other costs, M | all cycles | exposed | high end over published |")
    print("|---|---|---|---|---|---|---|---|")
    for name in asked.rows or ROWS:
        for experiment in asked.experiment or ROWS[name]:
            for each in lines(name, experiment, asked.texts, read=asked.read):
                print(each, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
