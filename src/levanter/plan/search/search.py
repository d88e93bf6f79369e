"""Ranks candidates by arithmetic, compiles the best few, and explains why the winner's neighbours lost.

Arithmetic cannot tell how well a compiler hides gathers, so the best of each other *kind* (parameters sharded over all
batch axes, over some of them, or over none) is compiled in addition to the best few, where it is within `WORTH_A_LOOK`
of the best. From the fastest of these the search continues to layouts with parameters on more or fewer devices, as long
as they are equal by arithmetic and faster when compiled. A layout that the compiler refuses is tried with fewer rows at
a time. `ahead` receives the layouts that will be compiled next, so that they may be compiled in parallel.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from haliax_ext.errors import gib
from levanter.hardware import Accelerator
from levanter.plan.search.candidates import SLICES, Candidate, Overrides, candidates
from levanter.plan.search.estimate import Estimate, SearchSubject, estimate
from levanter.plan.verdict import ProgramVerdict

COMPILED = 3
LISTED = 5
"""Layouts that are listed where there is no compiler."""
WORTH_A_LOOK = 1.5
"""How many times longer, by arithmetic, the best of another kind may take and still be compiled: a model of 1.4 B
parameters on v6e-8 was 1.5 times faster with replicated parameters, which are as fast by arithmetic."""
# Two layouts within this share of each other are equal, as far as arithmetic can tell.
SAME = 0.01
# Llama 2 70B on 128 chips of v5p: FSDP over all of them and over 64, twice, are 0.2 % apart by arithmetic and 3.8 %
# compiled, 0.7 % more with four replicas.


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A candidate with its estimate, and with its `verdict` where it was compiled."""

    candidate: Candidate
    estimate: Estimate
    verdict: ProgramVerdict | None = None

    @property
    def seconds_per_token(self) -> float | None:
        """The expected time of the compiled program for a token; `None` if it was refused or has no cycles."""
        return None if self.verdict is None else seconds_per_token(self.verdict)


def seconds_per_token(verdict: ProgramVerdict) -> float | None:
    """The expected time of a compiled program for each of its tokens; `None` if it has none."""
    if verdict.time is None or verdict.workload is None:
        return None
    return verdict.time.expected / verdict.workload.tokens


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """A candidate one step from the winner, and why it lost."""

    change: str
    why_not: str


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Attributes:
        best: the winner; `None` where nothing fits.
        compiled: the compiled layouts, best first.
        ranked: without a compiler, the best layouts by arithmetic, best first; empty with one.
        neighbours: layouts that differ from the winner in one property.
        considered: the number of candidates whose sizes divide.
        fitting: the number of them that fit by arithmetic.
        closest: where nothing fits, the candidate that needs least.
        configured: the verdict of the configured layout, where it was compiled.
        overrides: the run's rules for some parameters.
    """

    best: Tried | None
    compiled: tuple[Tried, ...]
    neighbours: tuple[Neighbour, ...]
    considered: int
    fitting: int
    ranked: tuple[Tried, ...] = ()
    closest: Tried | None = None
    configured: ProgramVerdict | None = None
    overrides: Overrides = field(default_factory=dict)

    @property
    def configured_is_best(self) -> bool:
        """Whether no compiled layout is faster than the configured one."""
        configured = None if self.configured is None else seconds_per_token(self.configured)
        best = None if self.best is None else self.best.seconds_per_token
        return configured is not None and (best is None or configured <= best)

    def fragment(self, extra: dict[str, Any] | None = None) -> str:
        """The winner as YAML to paste.

        Args:
            extra: keys in addition to `trainer.mesh`, by dotted name: the batch, `model.gradient_checkpointing`.
        """
        assert self.best is not None
        document: dict[str, Any] = {"trainer": {"mesh": self.best.candidate.mesh_options(self.overrides)}}
        for dotted, value in (extra or {}).items():
            at = document
            *path, last = dotted.split(".")
            for key in path:
                at = at.setdefault(key, {})
            at[last] = value
        return yaml.safe_dump(document, sort_keys=False, default_flow_style=None)


def search(
    subject: SearchSubject,
    pod: Accelerator,
    *,
    compile_candidate: Callable[[Candidate], ProgramVerdict] | None,
    ahead: Callable[[Sequence[Candidate]], None] = lambda _: None,
    compiled: int = COMPILED,
    configured: ProgramVerdict | None = None,
    on_event: Callable[[str], None] | None = None,
) -> SearchResult:
    """Searches the layouts of a run on a pod.

    Args:
        subject: the run.
        pod: the target.
        compile_candidate: compiles the run's main Program for a candidate; None where there is no compiler, so that
            arithmetic alone ranks.
        ahead: receives the candidates that will be compiled next, so that they may be compiled in parallel.
        compiled: the number of layouts to compile; refused ones do not count.
        configured: the verdict of the configured layout.
        on_event: receives progress messages.
    """
    say = on_event or (lambda _: None)
    listed = candidates(
        subject.axes.sizes,
        tensor_axes=subject.tensor_axes,
        devices=pod.devices // pod.slices,
        global_batch=subject.global_batch,
        slices=pod.slices,
        across=pod.generation.gpu is not None,
    )
    priced = [Tried(candidate=c, estimate=estimate(c, subject, pod)) for c in listed]
    fitting = sorted((t for t in priced if t.estimate.fits(pod.hbm_bytes)), key=_rank)
    say(f"{len(listed)} layouts divide, {len(fitting)} fit by arithmetic")
    if compile_candidate is None:
        return _by_arithmetic(subject, pod, priced, fitting, configured)
    tried: list[Tried] = []

    def attempt(ones: Sequence[Tried], enough: int) -> None:
        """Compiles layouts in their order, each with the most rows that are not refused, until enough fit."""
        fits, refused = set(), 0
        while len(fits) < enough and refused < 2 * enough:
            wave = _wave(ones, tried, fits, most=min(enough - len(fits), 2 * enough - refused))
            if not wave:
                return
            ahead([one.candidate for one in wave])
            for one in wave:
                say(f"compiling {one.candidate}")
                tried.append(replace(one, verdict=compile_candidate(one.candidate)))
                # A refused layout comes up again with fewer rows in the next wave.
                if tried[-1].seconds_per_token is None:
                    refused += 1
                else:
                    fits.add(_layout(one.candidate))

    attempt(fitting, compiled)
    near = _other_kinds(fitting, seen={t.candidate.kind for t in tried if t.seconds_per_token is not None})
    ahead([one.candidate for ones in near for one in _wave(ones, tried, set(), most=1)])
    for ones in near:
        attempt(ones, 1)
    while fastest := _fastest(tried):
        near = _stored_alike(fastest, fitting, {_layout(one.candidate) for one in tried})
        ahead([one.candidate for ones in near for one in _wave(ones, tried, set(), most=1)])
        for ones in near:
            attempt(ones, 1)
        # No neighbour was faster: the number of devices that share the parameters is a local optimum.
        if _fastest(tried) is fastest:
            break
    ranked, winner = sorted(tried, key=_by_speed), _fastest(tried)
    return SearchResult(
        best=winner,
        compiled=tuple(ranked),
        neighbours=tuple(_neighbours(winner, priced, ranked, pod)) if winner else (),
        considered=len(listed),
        fitting=len(fitting),
        closest=None if winner else min(priced, key=_needs, default=None),
        configured=configured,
        overrides=subject.overrides,
    )


def _by_arithmetic(
    subject: SearchSubject,
    pod: Accelerator,
    priced: Sequence[Tried],
    fitting: Sequence[Tried],
    configured: ProgramVerdict | None,
) -> SearchResult:
    """The result without a compiler: the best layouts by arithmetic, each with its best number of rows."""
    distinct: dict[Candidate, Tried] = {}
    for one in fitting:
        # `fitting` is in order of rank, so a layout comes with its best number of rows first.
        distinct.setdefault(_layout(one.candidate), one)
    best = next(iter(distinct.values()), None)
    return SearchResult(
        best=best,
        compiled=(),
        neighbours=() if best is None else tuple(_neighbours(best, priced, (), pod)),
        considered=len(priced),
        fitting=len(fitting),
        ranked=tuple(distinct.values())[:LISTED],
        closest=None if best else min(priced, key=_needs, default=None),
        configured=configured,
        overrides=subject.overrides,
    )


def _wave(ones: Sequence[Tried], tried: Sequence[Tried], fits: Set[Candidate], *, most: int) -> list[Tried]:
    """The next distinct layouts to compile: none that fits already, none that was refused with as few rows."""
    chosen: dict[Candidate, Tried] = {}
    for one in ones:
        layout = _layout(one.candidate)
        known = layout in fits or layout in chosen
        if (
            len(chosen) < most
            and not known
            and not any(t.candidate.rows <= one.candidate.rows for t in tried if _layout(t.candidate) == layout)
        ):
            # `ones` is in order of rank, so a layout comes with its best number of rows first.
            chosen[layout] = one
    return list(chosen.values())


def _other_kinds(fitting: Sequence[Tried], *, seen: Set[str]) -> list[list[Tried]]:
    """The candidates worth compiling of each kind that has no compiled one yet, in order."""
    by_kind: dict[str, list[Tried]] = {}
    for one in fitting:
        slowest = WORTH_A_LOOK * fitting[0].estimate.seconds_per_token
        if one.candidate.kind not in seen and one.estimate.seconds_per_token <= slowest:
            by_kind.setdefault(one.candidate.kind, []).append(one)
    return list(by_kind.values())


def _by_speed(tried: Tried) -> tuple[bool, float, tuple[float, int, int]]:
    return (tried.seconds_per_token is None, tried.seconds_per_token or 0.0, _rank(tried))


def _fastest(tried: Sequence[Tried]) -> Tried | None:
    """The fastest of the compiled layouts that fit."""
    return min((t for t in tried if t.verdict is not None and t.verdict.fits), key=_by_speed, default=None)


def _stored_alike(fastest: Tried, fitting: Sequence[Tried], tried: Set[Candidate]) -> list[list[Tried]]:
    """Layouts that differ only in the number of devices that shard parameters, and are as fast by arithmetic.

    Args:
        fastest: so far.
        fitting: every layout that fits by arithmetic.
        tried: layouts that were compiled or refused.

    Returns:
        those of the next smaller and of the next larger number, each with all its numbers of rows.
    """

    def elsewhere(candidate: Candidate) -> Candidate:
        # Everything but the sharding of parameters and the rows: equal for layouts that differ in nothing else.
        return replace(candidate, replica=1, data=candidate.replica * candidate.data, fsdp=True, rows=1, across=False)

    def devices(candidate: Candidate) -> int:
        return candidate.data * (candidate.slices if candidate.across else 1) if candidate.fsdp else 1

    at, price = fastest.candidate, fastest.estimate.seconds_per_token
    by_devices: dict[int, list[Tried]] = {}
    for one in fitting:
        alike = one.estimate.seconds_per_token <= (1 + SAME) * price
        if alike and elsewhere(one.candidate) == elsewhere(at) and devices(one.candidate) != devices(at):
            by_devices.setdefault(devices(one.candidate), []).append(one)
    smaller = max((n for n in by_devices if n < devices(at)), default=None)
    larger = min((n for n in by_devices if n > devices(at)), default=None)
    near = [by_devices[n] for n in (smaller, larger) if n is not None]
    return [ones for ones in near if _layout(ones[0].candidate) not in tried]


def _rank(tried: Tried) -> tuple[float, int, int]:
    # Among equals the one with fewer bytes, then the one with the smaller `group`. Rounding makes floating-point ties
    # equal.
    return (round(tried.estimate.seconds_per_token, 12), tried.estimate.total_bytes, tried.candidate.group)


def _needs(tried: Tried) -> tuple[bool, int]:
    # Candidates whose bytes are unknown (mappings that cannot be resolved) come last.
    return (bool(tried.estimate.problem) and not tried.estimate.argument_bytes, tried.estimate.total_bytes)


def _layout(candidate: Candidate) -> Candidate:
    """A candidate without its batch."""
    return replace(candidate, rows=1)


def _neighbours(winner: Tried, priced: Sequence[Tried], compiled: Sequence[Tried], pod: Accelerator) -> list[Neighbour]:
    by_candidate = {t.candidate: t for t in priced} | {t.candidate: t for t in compiled}
    at = winner.candidate
    neighbours: list[Neighbour] = []
    # The next smaller and next larger degree of tensor parallelism, each by its best candidate.
    ways = sorted({t.candidate.tensor_ways for t in priced})
    position = ways.index(at.tensor_ways)
    for step in (-1, 1):
        if 0 <= position + step < len(ways):
            shifted = [
                t
                for t in by_candidate.values()
                if t.candidate.tensor_ways == ways[position + step]
                # A batch with a single shard has replicated parameters, which is another kind; it is compared all the
                # same.
                and (t.candidate.kind == at.kind or 1 in (t.candidate.batch_ways, at.batch_ways))
                and t.candidate.remat == at.remat
            ]
            if shifted:
                best = min(shifted, key=lambda t: (not t.estimate.fits(pod.hbm_bytes), _rank(t)))
                neighbours.append(Neighbour(change=best.candidate.sizes, why_not=_why_not(best, winner, pod)))
    if at.context > 1:
        neighbours += _without_context(winner, by_candidate.values(), pod)
    rest = at.replica * at.data
    changes: dict[str, dict[str, Any]] = {
        "parameters replicated over data": {"fsdp": False, "replica": 1, "data": rest, "across": False},
        "embed → data": {"fsdp": True, "replica": 1, "data": rest, "across": False},
        f"embed → {SLICES} × data": {"fsdp": True, "replica": 1, "data": rest, "across": True},
        **{
            f"replica {n} × data {rest // n}": {"fsdp": True, "replica": n, "data": rest // n, "across": False}
            for n in (at.replica * 2, at.replica // 2)
            if n > 1
        },
        "residual embed → model": {"residual": "embed"},
        "residual replicated over model": {"residual": "whole"},
        f"{at.rows * 2} rows per device": {"rows": at.rows * 2},
        f"{at.rows // 2} rows per device": {"rows": at.rows // 2},
        f"gradient_checkpointing {str(not at.remat).lower()}": {"remat": not at.remat},
    }
    for change, fields in changes.items():
        other = by_candidate.get(replace(at, **fields))
        if other is not None and other.candidate != at:
            neighbours.append(Neighbour(change=change, why_not=_why_not(other, winner, pod)))
    return neighbours


def _without_context(winner: Tried, tried: Iterable[Tried], pod: Accelerator) -> list[Neighbour]:
    """The best layouts without context parallelism, by FSDP alone and with tensor parallelism, and why they lost."""
    whole = [t for t in tried if t.candidate.context == 1]
    kinds = {
        "context 1, FSDP alone": [t for t in whole if t.candidate.tensor_ways == 1],
        "context 1, no FSDP": [t for t in whole if t.candidate.tensor_ways > 1 and t.candidate.batch_ways == 1],
        "context 1, FSDP and tensor parallelism": [t for t in whole if t.candidate.tensor_ways > 1],
    }
    neighbours = []
    for change, ones in kinds.items():
        if not ones:
            neighbours.append(Neighbour(change=change, why_not="sizes and rows do not divide so"))
            continue
        best = min(ones, key=lambda t: (not t.estimate.fits(pod.hbm_bytes), *_rank(t)))
        neighbours.append(Neighbour(change=f"{change} ({best.candidate.sizes})", why_not=_why_not(best, winner, pod)))
    return neighbours


def _why_not(other: Tried, winner: Tried, pod: Accelerator) -> str:
    verdict = other.verdict
    if verdict is not None and verdict.fits is False:
        return f"compiled: {gib(verdict.peak_bytes or 0)} > {gib(pod.hbm_bytes)}"
    seconds, best = other.seconds_per_token, winner.seconds_per_token
    if seconds is not None and best is not None:
        return f"compiled: {100 * (seconds / best - 1):.1f} % slower a token"
    price = other.estimate
    if price.problem:
        return price.problem
    if not price.fits(pod.hbm_bytes):
        return (
            f"{gib(price.argument_bytes)} of arguments and about {gib(price.activation_bytes)} on top > "
            f"{gib(pod.hbm_bytes)}"
        )
    slower = price.seconds_per_token / winner.estimate.seconds_per_token - 1
    if slower > SAME:
        return (
            f"about {100 * slower:.0f} % slower a token by arithmetic: it is bound by {price.waits_for} (not compiled)"
        )
    if price.total_bytes > winner.estimate.total_bytes:
        more = price.total_bytes - winner.estimate.total_bytes
        return f"as fast by arithmetic, and takes {gib(more)} more (not compiled)"
    return "as fast by arithmetic; not compiled"
