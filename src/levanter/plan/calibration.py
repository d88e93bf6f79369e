"""Calibration of modelled times against published runs, and the range of times that are not calibrated.

`CYCLE_SCALE` fits the compiler's cycles to published speeds, and each published speed is of one model size. Where a
generation has no published run, or a model is outside the sizes published for its generation, a time is stated with a
note and with a range that holds every known published run of any generation (docs/preflight/step-time.md, *When a time
is not calibrated*).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from levanter.hardware import GENERATIONS
from levanter.hardware.compiler import PUBLISHERS_VECTOR_MEMORY, VECTOR_MEMORY

CALIBRATED: Mapping[str, tuple[float, float]] = {"v4": (6.7e9, 69e9), "v5p": (6.7e9, 406e9), "v6e": (8.0e9, 406e9)}
"""Parameters of the smallest and the largest model of each generation whose published speed is known."""
EDGE = 1.5
"""The factor by which a model may be smaller or larger than those and still counts as calibrated."""
BEYOND = (0.7, 1.3)
"""The shares of the expected time between which all published runs lie: 0.87 for a model of 16 B parameters on v5e-256,
1.27 to 1.29 for one of 0.78 B on v6e-8; 0.71 for that one if its step is compiled with rings of small matmuls."""

KERNEL_EFFICIENCY = 0.5
"""The share of a chip's peak that attention kernels reach over the blocks they visit. An assumption."""
WIDE_HEAD, WIDE_EFFICIENCY = 256, 0.80
"""The same for heads of 256 features or more, which make twice the products for each score's exponential. Of published
runs of Llama 3.1 8B with such heads (v5p-128, 2,097,152 tokens a step), one of 262,144 positions takes 16.06 s more a
step than one of 65,536; these are the seven products of a fused backward kernel and the forward one at this share of
peak. Nine products, as two kernels make them, would have needed more than all of it."""

GENERATING_SCALE: Mapping[str, float] = {"v6e": 0.85}
"""Seconds that a second of estimated cycles takes in Programs that generate text, by generation: what fits the
published loads that calibrate decoding best (`benchmarks/published_decode.py`). Train steps have a scale of their own,
which stands for vector memory that they lack and that these Programs have; where nothing is here, theirs is taken."""


GPUS = tuple(generation.name for generation in GENERATIONS if generation.gpu is not None)


def kernel_efficiency(head_size: int) -> float:
    """The share of a chip's peak that attention kernels reach, by the features of a head."""
    return WIDE_EFFICIENCY if head_size >= WIDE_HEAD else KERNEL_EFFICIENCY


@dataclass(frozen=True, kw_only=True)
class TimeCalibration:
    """Whether an expected time is calibrated, and the least range that it is stated with.

    Attributes:
        reason: why it is not calibrated; empty where it is.
        spread: low and high end of the range, as shares of the expected time; the range is at least this wide.
        estimate: whether the time is an estimate without a compiled program.
    """

    reason: str = ""
    spread: tuple[float, float] = (1.0, 1.0)
    estimate: bool = False


GPU_CALIBRATION = TimeCalibration(
    reason="kernels are estimated from their FLOPs and bytes, since the GPU compiler states no times: the shares of a "
    "card's rates are those of a few published runs of other code, whose kernels are tuned on the device",
    spread=(0.75, 1.35),
)
"""Of times of Programs that are compiled for GPUs."""


def untested_options_calibration(trained: TimeCalibration, generation: str) -> TimeCalibration:
    """The calibration of a Program whose compiler options differ from those of the calibrated train steps.

    Publishers gave their compilers more options than we give ours, and the scale of the cycles was fitted to their
    speeds, so the scale already includes what some of those options gain.

    Args:
        trained: the calibration with the options of those train steps.
        generation: its name.
    """
    # A time without calibration has the widest range already; the options add no second reason.
    if generation not in CALIBRATED:
        return trained
    reason = f"not calibrated for these compiler options: {generation}'s scale was fitted to train steps without them"
    return TimeCalibration(reason="; ".join(filter(None, (trained.reason, reason))), spread=BEYOND)


def decode_calibration(trained: TimeCalibration, generation: str) -> TimeCalibration:
    """The calibration of a Program that generates text.

    Two published loads of a generation set its scale, so the range is that of uncalibrated times; it holds all other
    published loads that the chips bound. A plan does not model the time of a server's host.

    Args:
        trained: the calibration of a train step.
        generation: its name.
    """
    if generation not in GENERATING_SCALE:
        return trained
    reason = (
        f"two published loads set {generation}'s scale for generating text; of the sixteen that test it fifteen are "
        "within 25 %, and one whose host took longer than its chips was 1.7 times its modelled time"
    )
    return TimeCalibration(reason=reason, spread=BEYOND)


def scale_with_options(scale: float, generation: str, options: Mapping[str, str]) -> float:
    """The scale of the cycles of a Program with these compiler options.

    The scale of v6e stands for the vector memory that publishers give their fusions and our train steps do not have.
    With that option Llama 3.1 8B's step on v6e-256 has 0.74 times the cycles, and takes 0.98 of the published time
    without any scale.

    Args:
        scale: of the generation.
        generation: its name.
        options: of the Program.
    """
    limit = options.get(VECTOR_MEMORY, "")
    return 1.0 if generation == "v6e" and limit.isdecimal() and int(limit) >= PUBLISHERS_VECTOR_MEMORY else scale


def calibration(generation: str, parameters: float | None) -> TimeCalibration:
    """The calibration of a time on a generation of accelerators.

    Args:
        generation: its name.
        parameters: of the model; None where that is not known.
    """
    if generation in GPUS:
        return GPU_CALIBRATION
    sizes = CALIBRATED.get(generation)
    if sizes is None:
        return TimeCalibration(
            reason=f"not calibrated: no published run on {generation} sets a scale for its cycles, which are taken as "
            "the compiler states them; the range holds every published run that is known of any generation",
            spread=BEYOND,
        )
    if parameters is None or sizes[0] / EDGE <= parameters <= sizes[1] * EDGE:
        return TimeCalibration()
    which = "smallest" if parameters < sizes[0] else "largest"
    size = sizes[0] if parameters < sizes[0] else sizes[1]
    return TimeCalibration(
        reason=f"outside the calibrated range: the {which} model with a published speed on {generation} has "
        f"{size / 1e9:.3g} B parameters, this one {parameters / 1e9:.3g} B; a small model on v6e-8 took 1.27 "
        "times the time modelled for it",
        spread=BEYOND,
    )
