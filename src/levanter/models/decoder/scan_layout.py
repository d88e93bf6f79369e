"""Groups a model's layers into runs and periods for scanning.

Layers of one model may differ in anything that a `LayerSpec` holds: in the attention window, which is static in a
kernel, or in which weights they have. Layers that differ are compiled separately, and a scan goes over *periods*: a
period is a few consecutive layers, each a *place* with its own spec.

A model is a sequence of *runs*. Gemma 3 27B has 62 layers, every sixth one global: a run of 10 periods of 6 places,
then a run of 2 periods of one place. A checkpoint's layer is `start + places · period + place`.

A run also ends at a *cut*: behind a layer whose output the forward pass takes for later layers, the stream must be
outside of a scan.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from levanter.layers.layer import LayerSpec

LONGEST_PERIOD = 8
"""The longest period that is tried: each of its places is compiled separately."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive layers that are scanned together.

    Attributes:
        start: the first layer.
        places: the specs within a period.
        periods: how often they repeat.
    """

    start: int
    places: tuple[LayerSpec, ...]
    periods: int

    @property
    def layers(self) -> int:
        """How many layers the run has."""
        return self.periods * len(self.places)

    def template(self, place: int) -> str:
        """The layers at a place of the period, as `WeightRule.source` numbers them along `layers`."""
        step, first = len(self.places), self.start + place
        return "{layers}" if (step, first) == (1, 0) else f"{{{step}*layers+{first}}}"


def scan_runs(layers: Sequence[LayerSpec], *, cuts: Iterable[int] = ()) -> tuple[Run, ...]:
    """Groups layers into runs, greedily: the period whose repetitions cover the most layers, the shortest on ties.

    Args:
        layers: the specs.
        cuts: numbers of layers behind which a run ends, since the stream is read there.
    """
    ends = sorted({*cuts, len(layers)} - {0})
    assert ends[-1] == len(layers) and ends[0] > 0, f"cuts {ends} of {len(layers)} layers"
    runs: list[Run] = []
    start = 0
    for end in ends:
        while start < end:
            size, periods = _longest_repetition(layers[start:end])
            runs.append(Run(start=start, places=tuple(layers[start : start + size]), periods=periods))
            start += size * periods
    return tuple(runs)


def _longest_repetition(layers: Sequence[LayerSpec]) -> tuple[int, int]:
    """Places and periods of the run that covers the most layers from the first on."""
    best = (1, 1)
    for size in range(1, min(LONGEST_PERIOD, len(layers)) + 1):
        period = tuple(layers[:size])
        count = 1
        while tuple(layers[count * size : (count + 1) * size]) == period:
            count += 1
        # Several different layers that do not repeat gain nothing as a period; each becomes its own run of size 1.
        reached = (count * size, count) if count > 1 or size == 1 else (0, 0)
        # Strictly greater: sizes ascend, so the shortest period wins among those that reach equally far.
        if reached[0] > best[0] * best[1]:
            best = (size, count)
    return best
