"""What a run tells its compiler: `trainer.compiler` and `trainer.compiler_options`, for its devices and its layout.

The same options go into the Programs that run and into those that are planned. Each of them, with its reason, is a
line of the plan.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from levanter.config.errors import did_you_mean
from levanter.hardware.compiler import (
    PUBLISHED,
    CompilerOption,
    Layout,
    Work,
    as_values,
    default_options,
    platform_of_option,
    tuned_options,
)
from levanter.mesh import ResolvedMesh
from levanter.runplan import Check, Target
from levanter.trainer.config import TrainerConfig

_WORK: Mapping[Work, str] = {"train": "train steps", "score": "scoring", "generate": "generation"}
_WRITTEN = "trainer.compiler_options"


@dataclass(frozen=True, kw_only=True)
class CompilerChoice:
    """The compiler options of a run's Programs.

    Attributes:
        default: of those that draw, load and save arrays.
        working: of those that do the work, by its kind.
        checks: a line for each option that is tuned or written, with its reason.
    """

    default: Mapping[str, str]
    working: Mapping[Work, Mapping[str, str]]
    checks: tuple[Check, ...]


def choose_compiler(
    trainer: TrainerConfig, target: Target, resolved: ResolvedMesh, *, works: Iterable[Work] = ("score",)
) -> CompilerChoice:
    """Chooses the options of a run.

    Args:
        trainer: what the user wrote.
        target: the devices.
        resolved: mesh and mappings.
        works: what the run does, of which its plan tells.
    """
    default = default_options(target.platform, target.kind)
    layout = layout_of(resolved)
    written, left_out = _written(trainer, target.platform)
    chosen: dict[Work, tuple[CompilerOption, ...]] = dict.fromkeys(_WORK, default)
    if trainer.compiler == "tuned":
        chosen = {work: tuned_options(target.platform, target.kind, work=work, layout=layout) for work in _WORK}
    said = _tuned_notes(target, {work: chosen[work] for work in works}, default, written)
    said += [f"{_WRITTEN}: {name}={value}{_unknown(name)}" for name, value in written.items()]
    if left_out:
        said.append(f"{_WRITTEN}: {', '.join(left_out)}: no options of {target.platform} programs, left out here")
    return CompilerChoice(
        default=as_values(default),
        working={work: {**as_values(options), **written} for work, options in chosen.items()},
        checks=tuple(Check(name="compiler", status="note", message=line) for line in said),
    )


def layout_of(resolved: ResolvedMesh) -> Layout:
    """How a run is laid out, as far as options depend on it.

    Under `fsdp` parameters are sharded over mesh axes that shard the batch or positions, and nothing over others: they
    are gathered for use, and outside of attention nothing else is exchanged in a layer.
    """
    mappings, sizes = resolved.mappings, resolved.spec.shape
    compute = mappings.compute
    of_tokens = {*compute.mesh_axes(resolved.batch_axis), *compute.mesh_axes("position")}
    of_batch = {axis for axis in of_tokens if sizes[axis] > 1}
    said = (mappings.params, compute, mappings.residual, mappings.attention)
    every = (*said, *(rules for _, rules in mappings.overrides))
    others = {axis for mapping in every for axis in mapping.used_mesh_axes if sizes[axis] > 1} - of_batch
    experts = {axis for mapping in every for axis in mapping.mesh_axes("expert") if sizes[axis] > 1}
    if experts or not of_batch & mappings.params.used_mesh_axes:
        return "other"
    return "fsdp_and_tensor" if others else "fsdp"


def _written(trainer: TrainerConfig, platform: str) -> tuple[dict[str, str], list[str]]:
    """The options as the user wrote them, as text; and the names of those that are another platform's."""
    given = {name: _text(value, platform) for name, value in trainer.compiler_options.items()}
    left_out = [name for name in given if platform_of_option(name) not in (None, platform)]
    return {name: value for name, value in given.items() if name not in left_out}, left_out


def _text(value: bool | int | float | str, platform: str) -> str:
    """A value as the compiler reads it: XLA's own options want `True`, those of TPUs `true`."""
    return str(value).lower() if isinstance(value, bool) and platform == "tpu" else str(value)


def _unknown(name: str) -> str:
    """What is said of an option that none of our own measurements knows."""
    hint = "" if name in PUBLISHED or platform_of_option(name) != "tpu" else did_you_mean(name, PUBLISHED)
    return f" (as written{hint})"


def _tuned_notes(
    target: Target,
    chosen: Mapping[Work, tuple[CompilerOption, ...]],
    default: tuple[CompilerOption, ...],
    written: Mapping[str, str],
) -> list[str]:
    """A line for each option that tuning adds; none where it has nothing for these Programs."""
    return [
        f"tuned for {_WORK[work]} on {target.kind}: {option}"
        for work, options in chosen.items()
        for option in options
        if option not in default and option.name not in written
    ]
