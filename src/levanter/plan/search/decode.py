"""Which mesh, how many rows and which dtype of the cache a run that generates text should use on a pod, for a goal.

A layout is `data × model × group`: `data` shards the rows, `model` the heads of keys and values, `group` the query
heads of each; parameters are sharded over the last two together and whole over `data`. What fits and how long a token
takes is arithmetic (`inference.served`): bytes at `HBM` of the memory's rate, products at `MATMUL_EFFICIENCY` of peak,
and two all-reduces of the residual stream a layer, which nothing hides. It ranks; the best few are then compiled, and
the answer is the first of them that fits.
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
from levanter.plan.comms import Network, spans_of
from levanter.plan.search.candidates import NO_OVERRIDES, Candidate, Overrides
from levanter.plan.search.estimate import MATMUL_EFFICIENCY

HBM = 0.8
"""The share of its memory's bandwidth that a decode step is taken to reach."""
_DTYPES = tuple(dtype for dtype in ("bfloat16", "int8") if dtype in CACHE_DTYPES)
TRIED = 3
"""Layouts that are compiled at most."""


@dataclass(frozen=True, kw_only=True)
class RowsLayout:
    """One way to run.

    Attributes:
        served: the model as it lies then.
        rows: that run at once.
        most: rows that fit.
        seconds: a token of each row, estimated.
    """

    served: DecodeCost
    rows: int
    most: int
    seconds: float

    @property
    def candidate(self) -> Candidate:
        """The mesh."""
        found = self.served
        return Candidate(
            data=found.shards, model=found.kv_ways, group=found.repeated, fsdp=False, rows=self.rows // found.shards
        )

    @property
    def keys(self) -> dict[str, int | str]:
        """The keys beside `trainer.mesh`, by dotted name."""
        return {"inference.max_rows": self.rows, "inference.cache_dtype": self.served.dtype}

    @property
    def rate(self) -> float:
        """Tokens/s over all chips."""
        return self.rows / self.seconds

    def score(self, goal: Goal) -> tuple[float, ...]:
        """The better, the larger."""
        if goal == "max_rows":
            return (self.rows, self.rate)
        return (-self.seconds, self.rate) if goal == "latency_ms" else (self.rate, -self.seconds)

    def __str__(self) -> str:
        found = self.served
        return f"{self.candidate.sizes}, {self.rows} rows, {found.dtype} cache"

    @property
    def said(self) -> str:
        """Its figures."""
        return f"{seconds_text(self.seconds)} a token, {three_digits(self.rate)} tokens/s; {self.most} rows fit"


@dataclass(frozen=True, kw_only=True)
class RowsResult:
    """The answer of a search.

    Attributes:
        goal: what was asked for.
        considered: layouts whose sizes divide.
        fitting: of these, those that hold a row at least.
        tried: what was compiled, and what the compiler said.
        best: the best that fits; None where none does.
        neighbours: what changing one thing of the best comes to.
        overrides: the run's own rules for some parameters.
    """

    goal: Goal
    considered: int
    fitting: int
    tried: tuple[tuple[RowsLayout, str], ...]
    best: RowsLayout | None
    neighbours: tuple[tuple[str, str], ...]
    overrides: Overrides = field(default_factory=dict)

    @property
    def keys(self) -> Mapping[str, Any]:
        """What to write for the best, by dotted name."""
        if self.best is None:
            return {}
        return {"trainer.mesh": self.best.candidate.mesh_options(self.overrides), **self.best.keys}


def layouts(served: DecodeCost, *, devices: int) -> Iterator[DecodeCost]:
    """The model in every layout whose sizes divide, with the run's dtype of keys and values and with int8.

    Args:
        served: the run's own.
        devices: of the pod.
    """
    for kv_ways in divisors(served.kv_heads):
        for group in divisors(served.query_groups):
            if devices % (kv_ways * group) or (group > 1 and kv_ways < served.kv_heads):
                continue
            for dtype in dict.fromkeys((served.dtype, *_DTYPES)):
                yield served.laid_out(shards=devices // (kv_ways * group), kv_ways=kv_ways, group=group, dtype=dtype)


def priced(served: DecodeCost, rows: int, pod: Accelerator, *, limit: int) -> RowsLayout:
    """A layout with its figures.

    Args:
        served: the model in the layout.
        rows: that run at once.
        pod: the chips.
        limit: bytes of a device.
    """
    floor = served.decode_floor(rows, served.context, bandwidth=pod.hbm_bandwidth, peak=pod.peak_flops())
    mesh = MeshSpec.of(data=served.shards, model=served.kv_ways, group=served.repeated)
    residual = -(-rows // served.shards) * served.embed * served.compute_bytes
    sum_ = Network.of(mesh, pod).seconds("all-reduce", residual, spans_of(mesh, "model", "group")) or 0.0
    layers = sum(count for _, count in served.windows)
    reading = (floor.weights + floor.cache) / HBM
    return RowsLayout(
        served=served,
        rows=rows,
        most=served.fitting(limit, served.context, room=served.room),
        seconds=max(reading, floor.flops / MATMUL_EFFICIENCY) + 2 * layers * sum_,
    )


def options(served: DecodeCost, pod: Accelerator, goal: Goal, *, limit: int) -> Iterator[RowsLayout]:
    """How many rows a layout might run: all that fit, and for the shortest time a token the fewest that are asked for.

    Args:
        served: the model in the layout.
        pod: the chips.
        goal: what is asked for.
        limit: bytes of a device.
    """
    shards = served.shards
    most = min(served.fitting(limit, served.context, room=served.room), MAX_ROWS // shards * shards)
    if most < shards:
        return
    asked = shards if served.automatic else -(-served.rows // shards) * shards
    if goal == "latency_ms":
        if asked <= most:
            yield priced(served, asked, pod, limit=limit)
        return
    yield priced(served, most, pod, limit=limit)


def search_rows(
    served: DecodeCost,
    pod: Accelerator,
    goal: Goal,
    *,
    limit: int,
    compile_layout: Callable[[RowsLayout], tuple[bool, str]] | None,
    overrides: Overrides = NO_OVERRIDES,
) -> RowsResult:
    """The best layout for a goal, and what its neighbours come to.

    Args:
        served: the run's own.
        pod: the chips.
        goal: what is asked for.
        limit: bytes of a device.
        compile_layout: whether a layout fits, and what the compiler says; None asks no compiler.
        overrides: the run's own rules for some parameters.
    """
    every = list(layouts(served, devices=pod.devices))
    found = [each for one in every for each in options(one, pod, goal, limit=limit)]
    ranked = sorted(found, key=lambda each: each.score(goal), reverse=True)
    tried: list[tuple[RowsLayout, str]] = []
    best = ranked[0] if ranked and compile_layout is None else None
    for each in ranked[:TRIED]:
        if compile_layout is None:
            break
        fits, said = compile_layout(each)
        tried.append((each, said))
        if fits:
            best = each
            break
    return RowsResult(
        goal=goal,
        considered=len(every),
        fitting=len(found),
        tried=tuple(tried),
        best=best,
        neighbours=() if best is None else tuple(_neighbours(best, pod, goal, limit=limit)),
        overrides=overrides,
    )


def _neighbours(best: RowsLayout, pod: Accelerator, goal: Goal, *, limit: int) -> Iterator[tuple[str, str]]:
    """One thing changed at a time: the mesh, the dtype, the rows, and what a row may hold."""
    own = best.served
    for other in layouts(own, devices=pod.devices):
        tensor, before = other.kv_ways * other.repeated, own.kv_ways * own.repeated
        if other.dtype == own.dtype and tensor in (2 * before, before // 2) and tensor != before:
            found = next(options(other, pod, goal, limit=limit), None)
            name = priced(other, other.shards, pod, limit=limit).candidate.sizes
            yield name, _no_row(other, limit) if found is None else found.said
    for dtype in _DTYPES:
        if dtype != own.dtype:
            other = replace(own, dtype=dtype)
            found = next(options(other, pod, goal, limit=limit), None)
            yield f"{dtype} cache", _no_row(other, limit) if found is None else found.said
    more = best.rows + own.shards
    if more <= best.most:
        yield f"{more} rows", priced(own, more, pod, limit=limit).said
    else:
        beyond = own.weights.total + own.room + more // own.shards * (own.bytes_of_row(own.context) + own.state_bytes)
        yield f"{more} rows", f"{gib(beyond - limit)} too much a chip"
    for context in (own.context // 2, own.context * 2):
        other = replace(own, context=context)
        rows = other.fitting(limit, context, room=own.room)
        yield f"rows of {context:,} positions", f"{rows} fit"


def _no_row(served: DecodeCost, limit: int) -> str:
    held = served.weights.total + served.room
    return f"no row fits: weights and what Programs make take {gib(held)} of {gib(limit)} a chip"


def render_rows(result: RowsResult, *, target: str) -> str:
    """What was tried, the winner as YAML to paste, and why its neighbours lost.

    Args:
        result: of `search_rows`.
        target: the pod's name.
    """
    lines = [
        f"search on {target} for {result.goal}: {result.considered} layouts divide, {result.fitting} fit by "
        f"arithmetic, {len(result.tried)} compiled (estimates: HBM at {HBM:.0%}, products at {MATMUL_EFFICIENCY:.0%})"
    ]
    lines += [f"  {each}: {said}" for each, said in result.tried]
    if result.best is None:
        return "\n".join([*lines, "nothing fits"])
    lines += ["", f"best: {result.best}: {result.best.said}; to paste:", ""]
    lines += [f"    {line}" for line in fragment(result).splitlines()]
    lines += ["", "why not its neighbours:"]
    return "\n".join([*lines, *(f"  {change}: {said}" for change, said in result.neighbours)])


def fragment(result: RowsResult) -> str:
    """The best as YAML."""
    assert result.best is not None
    own = {key.rpartition(".")[2]: value for key, value in result.best.keys.items()}
    document = {"inference": own, "trainer": {"mesh": result.best.candidate.mesh_options(result.overrides)}}
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None)


def rows_values(result: RowsResult, *, target: str) -> dict[str, Any]:
    """The same as plain JSON values."""
    return {
        "target": target,
        "goal": result.goal,
        "considered": result.considered,
        "fitting": result.fitting,
        "compiled": [{"layout": str(each), "said": said} for each, said in result.tried],
        "best": None if result.best is None else dict(result.keys),
        "estimated_token_seconds": None if result.best is None else result.best.seconds,
        "why_not": dict(result.neighbours),
    }
