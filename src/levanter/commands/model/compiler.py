"""Compiler options of a run: from `trainer.compiler` and `trainer.compiler_options`, its devices and its sharding.

The Programs that run and those that are planned have the same options. The plan lists each option with its reason.
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
        default: options of the Programs that initialize, load and save arrays.
        working: options of the Programs that train, score or generate, by kind of work.
        checks: a line for each option that is tuned or set by the user, with its reason.
    """

    default: Mapping[str, str]
    working: Mapping[Work, Mapping[str, str]]
    checks: tuple[Check, ...]


def choose_compiler(
    trainer: TrainerConfig, target: Target, resolved: ResolvedMesh, *, works: Iterable[Work] = ("score",)
) -> CompilerChoice:
    """Chooses the options of a run.

    Args:
        trainer: the user's compiler settings.
        target: the devices.
        resolved: mesh and mappings.
        works: the kinds of work of the run, which its plan reports.
    """
    default = default_options(target.platform, target.kind)
    layout = sharding_layout(resolved)
    written, skipped = _written(trainer, target.platform)
    # All kinds of work get options, since a run may build Programs of a kind that its plan does not report.
    chosen: dict[Work, tuple[CompilerOption, ...]] = dict.fromkeys(_WORK, default)
    if trainer.compiler == "tuned":
        chosen = {work: tuned_options(target.platform, target.kind, work=work, layout=layout) for work in _WORK}
    messages = _tuned_notes(target, {work: chosen[work] for work in works}, default, written)
    messages += [f"{_WRITTEN}: {name}={value}{_unknown(name)}" for name, value in written.items()]
    # Options of another platform are skipped rather than refused, so that one file serves several targets.
    if skipped:
        messages.append(f"{_WRITTEN}: {', '.join(skipped)}: no options of {target.platform} programs, skipped")
    return CompilerChoice(
        default=as_values(default),
        # The user's options come last and win.
        working={work: {**as_values(options), **written} for work, options in chosen.items()},
        checks=tuple(Check(name="compiler", status="note", message=line) for line in messages),
    )


def sharding_layout(resolved: ResolvedMesh) -> Layout:
    """Classifies how a run is sharded, as far as compiler options depend on it.

    `fsdp`: parameters are sharded only over mesh axes that shard the batch or the positions. They are all-gathered for
    use, and a layer has no other collectives outside attention.
    """
    mappings, sizes = resolved.mappings, resolved.spec.shape
    compute = mappings.compute
    token_axes = {*compute.mesh_axes(resolved.batch_axis), *compute.mesh_axes("position")}
    # Axes of size 1 shard nothing.
    data_axes = {axis for axis in token_axes if sizes[axis] > 1}
    mappings_used = (mappings.params, compute, mappings.residual, mappings.attention)
    all_mappings = (*mappings_used, *(rules for _, rules in mappings.overrides))
    other_axes = {axis for mapping in all_mappings for axis in mapping.used_mesh_axes if sizes[axis] > 1} - data_axes
    # Experts add all-to-all or gather collectives inside a layer, so the layout counts as `other`.
    experts = {axis for mapping in all_mappings for axis in mapping.mesh_axes("expert") if sizes[axis] > 1}
    if experts or not data_axes & mappings.params.used_mesh_axes:
        return "other"
    return "fsdp_and_tensor" if other_axes else "fsdp"


def _written(trainer: TrainerConfig, platform: str) -> tuple[dict[str, str], list[str]]:
    """The user's options as strings, and the names of skipped options of another platform."""
    options = {name: _text(value, platform) for name, value in trainer.compiler_options.items()}
    skipped = [name for name in options if platform_of_option(name) not in (None, platform)]
    return {name: value for name, value in options.items() if name not in skipped}, skipped


def _text(value: bool | int | float | str, platform: str) -> str:
    """A value as the compiler reads it: XLA's own options expect `True`, TPU options `true`."""
    return str(value).lower() if isinstance(value, bool) and platform == "tpu" else str(value)


def _unknown(name: str) -> str:
    """The note on an option without a measurement of ours, with a suggestion for a misspelt name."""
    # A list of names to compare with exists for TPU options only.
    hint = "" if name in PUBLISHED or platform_of_option(name) != "tpu" else did_you_mean(name, PUBLISHED)
    return f" (as written{hint})"


def _tuned_notes(
    target: Target,
    chosen: Mapping[Work, tuple[CompilerOption, ...]],
    default: tuple[CompilerOption, ...],
    written: Mapping[str, str],
) -> list[str]:
    """A line for each option that tuning adds to these Programs."""
    return [
        f"tuned for {_WORK[work]} on {target.kind}: {option}"
        for work, options in chosen.items()
        # An option that the user set is reported as the user's.
        for option in options
        if option not in default and option.name not in written
    ]
