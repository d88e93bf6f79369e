"""How a model's layers are laid out for scanning.

Layers of one model may differ in anything that a `LayerSpec` says: in how far back a query sees, which is static in a
kernel, as in what weights they have. Layers that differ are compiled apart, and a scan goes over *periods*: a period is
a few consecutive layers, each a *place* with a spec of its own.

A model is a sequence of *runs*. Gemma 3 27B has 62 layers, every sixth one global: a run of 10 periods of 6 places,
then a run of 2 periods of one place. A checkpoint's layer is `start + places · period + place`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from levanter.layers.layer import LayerSpec

LONGEST_PERIOD = 8
"""The longest period that is looked for: each of its places is compiled separately."""


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


def scan_runs(layers: Sequence[LayerSpec]) -> tuple[Run, ...]:
    """Cuts layers into runs: each time the period whose repetitions reach farthest, the shortest such."""
    runs: list[Run] = []
    start = 0
    while start < len(layers):
        best = (1, 1)
        for size in range(1, min(LONGEST_PERIOD, len(layers) - start) + 1):
            period = tuple(layers[start : start + size])
            count = 1
            while tuple(layers[start + count * size : start + (count + 1) * size]) == period:
                count += 1
            # A period that does not repeat is no period: those layers are better off one by one.
            reached = (count * size, count) if count > 1 or size == 1 else (0, 0)
            if reached[0] > best[0] * best[1]:
                best = (size, count)
        size, count = best
        runs.append(Run(start=start, places=tuple(layers[start : start + size]), periods=count))
        start += size * count
    return tuple(runs)
