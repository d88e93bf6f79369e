"""Searches the mesh, the number of rows and the dtype of the cache of a run that generates text, for a goal.

A layout is `data × model × group`: `data` shards the rows, `model` the heads of keys and values, `group` the query
heads of each; parameters are sharded over the last two together and replicated over `data`. Memory and the time of a
token are arithmetic (`inference.capacity`): bytes at `HBM` of the memory's rate, products at `MATMUL_EFFICIENCY` of
peak, and two exposed all-reduces of the residual stream a layer. Layouts are ranked by it; the best few are compiled,
and the first of them that fits is the result.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from haliax_ext.divisibility import divisors
from haliax_ext.errors import gib
from haliax_ext.meshspec import MeshSpec
from levanter.config.plan_options import Goal
from levanter.hardware import Accelerator
from levanter.html.format import seconds_text, three_digits
from levanter.inference.capacity import MAX_ROWS, DecodeCost
from levanter.inference.config import CACHE_DTYPES
from levanter.plan.comms import Network, axis_spans
from levanter.plan.search.candidates import NO_OVERRIDES, Candidate, Overrides
from levanter.plan.search.estimate import MATMUL_EFFICIENCY

HBM = 0.8
"""The share of the memory bandwidth that a decode step is assumed to reach."""
_DTYPES = tuple(dtype for dtype in ("bfloat16", "int8") if dtype in CACHE_DTYPES)
TRIED = 3
"""The most layouts that are compiled."""


@dataclass(frozen=True, kw_only=True)
class DecodeLayout:
    """One layout of a run that generates text.

    Attributes:
        served: the model in this layout.
        rows: that run at once.
        most: the number of rows that fit.
        seconds: estimated time for one token of every row.
    """

    served: DecodeCost
    rows: int
    most: int
    seconds: float

    @property
    def candidate(self) -> Candidate:
        """The mesh."""
        cost = self.served
        return Candidate(
            data=cost.shards, model=cost.kv_ways, group=cost.repeated, fsdp=False, rows=self.rows // cost.shards
        )

    @property
    def keys(self) -> dict[str, int | str]:
        """The keys in addition to `trainer.mesh`, by dotted name."""
        return {"inference.max_rows": self.rows, "inference.cache_dtype": self.served.dtype}

    @property
    def rate(self) -> float:
        """Tokens/s over all chips."""
        return self.rows / self.seconds

    def score(self, goal: Goal) -> tuple[float, ...]:
        """The rank for a goal; larger is better."""
        if goal == "max_rows":
            return (self.rows, self.rate)
        # The second entry breaks ties: layouts of equal rows, time or rate differ in the other figure.
        return (-self.seconds, self.rate) if goal == "latency_ms" else (self.rate, -self.seconds)

    def __str__(self) -> str:
        cost = self.served
        return f"{self.candidate.sizes}, {self.rows} rows, {cost.dtype} cache"

    @property
    def summary(self) -> str:
        """Time, rate and capacity in one line."""
        return f"{seconds_text(self.seconds)} a token, {three_digits(self.rate)} tokens/s; {self.most} rows fit"


@dataclass(frozen=True, kw_only=True)
class DecodeSearchResult:
    """The result of a search.

    Attributes:
        goal: of the search.
        considered: the number of layouts whose sizes divide.
        fitting: the number of those that hold at least one row.
        tried: the compiled layouts with the outcomes.
        best: the best that fits; None where none does.
        neighbours: the figures of layouts that differ from the best in one property.
        overrides: the run's rules for some parameters.
    """

    goal: Goal
    considered: int
    fitting: int
    tried: tuple[tuple[DecodeLayout, str], ...]
    best: DecodeLayout | None
    neighbours: tuple[tuple[str, str], ...]
    overrides: Overrides = field(default_factory=dict)

    @property
    def keys(self) -> Mapping[str, Any]:
        """The config keys of the best layout, by dotted name."""
        if self.best is None:
            return {}
        return {"trainer.mesh": self.best.candidate.mesh_options(self.overrides), **self.best.keys}


def decode_meshes(served: DecodeCost, *, devices: int) -> Iterator[DecodeCost]:
    """The model in every layout whose sizes divide, with the run's dtype of keys and values and with int8.

    Args:
        served: as the run configures it.
        devices: of the pod.
    """
    for kv_ways in divisors(served.kv_heads):
        for group in divisors(served.query_groups):
            # Query heads of a group are sharded only after all kv heads are, since that replicates the cache.
            if devices % (kv_ways * group) or (group > 1 and kv_ways < served.kv_heads):
                continue
            for dtype in dict.fromkeys((served.dtype, *_DTYPES)):
                yield served.laid_out(shards=devices // (kv_ways * group), kv_ways=kv_ways, group=group, dtype=dtype)


def estimate_decode_layout(served: DecodeCost, rows: int, pod: Accelerator, *, limit: int) -> DecodeLayout:
    """A layout with its figures.

    Args:
        served: the model in the layout.
        rows: that run at once.
        pod: the chips.
        limit: bytes of a device.
    """
    floor = served.decode_floor(rows, served.context, bandwidth=pod.hbm_bandwidth, peak=pod.peak_flops())
    # Each layer sums the residual stream twice over tensor parallelism, once
    # after attention and once after the MLP.
    mesh = MeshSpec.of(data=served.shards, model=served.kv_ways, group=served.repeated)
    residual = -(-rows // served.shards) * served.embed * served.compute_bytes
    sum_ = Network.of(mesh, pod).seconds("all-reduce", residual, axis_spans(mesh, "model", "group")) or 0.0
    # The floor is at the full rate of the memory; a step reaches `HBM` of it.
    reading = (floor.weights + floor.cache) / HBM
    return DecodeLayout(
        served=served,
        rows=rows,
        most=served.fitting(limit, served.context, temp_bytes=served.temp_bytes),
        seconds=max(reading, floor.flops / MATMUL_EFFICIENCY) + 2 * served.layers * sum_,
    )


def decode_layouts(served: DecodeCost, pod: Accelerator, goal: Goal, *, limit: int) -> Iterator[DecodeLayout]:
    """The layout with the rows for a goal: all that fit, or for the shortest time a token only the configured ones.

    Args:
        served: the model in the layout.
        pod: the chips.
        goal: of the search.
        limit: bytes of a device.
    """
    shards = served.shards
    # Rows are a multiple of the shards of the batch, and the engine has a limit of rows.
    most = min(served.fitting(limit, served.context, temp_bytes=served.temp_bytes), MAX_ROWS // shards * shards)
    if most < shards:
        return
    wanted = shards if served.automatic else -(-served.rows // shards) * shards
    if goal == "latency_ms":
        if wanted <= most:
            yield estimate_decode_layout(served, wanted, pod, limit=limit)
        return
    yield estimate_decode_layout(served, most, pod, limit=limit)


def search_decode(
    served: DecodeCost,
    pod: Accelerator,
    goal: Goal,
    *,
    limit: int,
    compile_layout: Callable[[DecodeLayout], tuple[bool, str]] | None,
    overrides: Overrides = NO_OVERRIDES,
) -> DecodeSearchResult:
    """The best layout for a goal, and the figures of its neighbours.

    Args:
        served: as the run configures it.
        pod: the chips.
        goal: of the search.
        limit: bytes of a device.
        compile_layout: returns whether a layout fits, and the outcome as text; None to rank by arithmetic alone.
        overrides: the run's rules for some parameters.
    """
    meshes = list(decode_meshes(served, devices=pod.devices))
    fitting = [layout for mesh_cost in meshes for layout in decode_layouts(mesh_cost, pod, goal, limit=limit)]
    ranked = sorted(fitting, key=lambda layout: layout.score(goal), reverse=True)
    tried: list[tuple[DecodeLayout, str]] = []
    best = ranked[0] if ranked and compile_layout is None else None
    for layout in ranked[:TRIED]:
        if compile_layout is None:
            break
        fits, outcome = compile_layout(layout)
        tried.append((layout, outcome))
        if fits:
            best = layout
            break
    return DecodeSearchResult(
        goal=goal,
        considered=len(meshes),
        fitting=len(fitting),
        tried=tuple(tried),
        best=best,
        neighbours=() if best is None else tuple(_neighbours(best, pod, goal, limit=limit)),
        overrides=overrides,
    )


def _neighbours(best: DecodeLayout, pod: Accelerator, goal: Goal, *, limit: int) -> Iterator[tuple[str, str]]:
    """Layouts that differ in one property: the mesh, the dtype, the rows, or the length of a row."""
    cost = best.served
    for other in decode_meshes(cost, devices=pod.devices):
        tensor, before = other.kv_ways * other.repeated, cost.kv_ways * cost.repeated
        # Only the next smaller and next larger degree of tensor parallelism.
        if other.dtype == cost.dtype and tensor in (2 * before, before // 2) and tensor != before:
            layout = next(decode_layouts(other, pod, goal, limit=limit), None)
            name = estimate_decode_layout(other, other.shards, pod, limit=limit).candidate.sizes
            yield name, _no_row(other, pod, limit) if layout is None else layout.summary
    for dtype in _DTYPES:
        if dtype != cost.dtype:
            other = replace(cost, dtype=dtype)
            layout = next(decode_layouts(other, pod, goal, limit=limit), None)
            yield f"{dtype} cache", _no_row(other, pod, limit) if layout is None else layout.summary
    more = best.rows + cost.shards
    if more <= best.most:
        yield f"{more} rows", estimate_decode_layout(cost, more, pod, limit=limit).summary
    else:
        beyond = (
            cost.weights.total
            + cost.temp_bytes
            + more // cost.shards * (cost.bytes_per_row(cost.context) + cost.state_bytes)
        )
        yield f"{more} rows", f"{gib(beyond - limit)} too much a {pod.unit}"
    for context in (cost.context // 2, cost.context * 2):
        other = replace(cost, context=context)
        rows = other.fitting(limit, context, temp_bytes=cost.temp_bytes)
        yield f"rows of {context:,} positions", f"{rows} fit"


def _no_row(served: DecodeCost, pod: Accelerator, limit: int) -> str:
    fixed_bytes = served.weights.total + served.temp_bytes
    return f"no row fits: weights and temporaries take {gib(fixed_bytes)} of {gib(limit)} a {pod.unit}"


def render_decode_search(result: DecodeSearchResult, *, target: str) -> str:
    """The compiled layouts, the winner as YAML to paste, and why its neighbours lost.

    Args:
        result: of `search_decode`.
        target: the pod's name.
    """
    lines = [
        f"search on {target} for {result.goal}: {result.considered} layouts divide, {result.fitting} fit by "
        f"arithmetic, {len(result.tried)} compiled (estimates: HBM at {HBM:.0%}, products at {MATMUL_EFFICIENCY:.0%})"
    ]
    lines += [f"  {layout}: {outcome}" for layout, outcome in result.tried]
    if result.best is None:
        return "\n".join([*lines, "nothing fits"])
    lines += ["", f"best: {result.best}: {result.best.summary}; to paste:", ""]
    lines += [f"    {line}" for line in fragment(result).splitlines()]
    lines += ["", "why not its neighbours:"]
    return "\n".join([*lines, *(f"  {change}: {outcome}" for change, outcome in result.neighbours)])


def fragment(result: DecodeSearchResult) -> str:
    """The best layout as YAML."""
    assert result.best is not None
    inference = {key.rpartition(".")[2]: value for key, value in result.best.keys.items()}
    document = {"inference": inference, "trainer": {"mesh": result.best.candidate.mesh_options(result.overrides)}}
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None)


def decode_search_to_json(result: DecodeSearchResult, *, target: str) -> dict[str, Any]:
    """The result as plain JSON values."""
    return {
        "target": target,
        "goal": result.goal,
        "considered": result.considered,
        "fitting": result.fitting,
        "compiled": [{"layout": str(layout), "said": outcome} for layout, outcome in result.tried],
        "best": None if result.best is None else dict(result.keys),
        "estimated_token_seconds": None if result.best is None else result.best.seconds,
        "why_not": dict(result.neighbours),
    }
