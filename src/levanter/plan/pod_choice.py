"""The cheapest and the fastest pods for a job with a deadline or a budget.

An *offer* is a pod at one price. Hours and dollars are spans, so it meets a limit for certain (the high value does),
perhaps (the expected one does), or not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from levanter.hardware import Accelerator, AcceleratorError, default_topologies, parse_accelerator, unit_name
from levanter.html.format import between
from levanter.plan.decode_roofline import serving_report
from levanter.plan.job_cost import CostRange, job_cost, token_price
from levanter.plan.verdict import Verdict
from levanter.runplan import OK, PlanOptions

Answer = Literal["yes", "perhaps", "no", "unknown"]
FACTOR = 4
"""Pods are compared from a quarter of the chips of a target to four times as many."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One pod at one price.

    Attributes:
        target: the pod.
        kind: of the offer (`spot`); empty for a price without a kind, or none.
        chips: of the pod.
        seconds: of the whole job; None where it does not run there, or its time is not known.
        dollars: of the whole job; None where no price is known.
        meets: whether it meets the deadline and the budget.
        compiled: whether a compiler has found that it fits.
        reason: why the job does not run there, or its time is not known; empty otherwise.
    """

    target: str
    kind: str
    chips: int
    seconds: CostRange | None
    dollars: CostRange | None
    meets: Answer
    compiled: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.target} ({self.kind})" if self.kind else self.target


@dataclass(frozen=True, kw_only=True)
class PodChoice:
    """The offers, and the best of those that meet the limits.

    Attributes:
        offers: all of them, in the order of the targets.
        cheapest: by expected dollars, or chip-hours of one generation without prices; None if no offer qualifies.
        fastest: by expected time; None if no offer qualifies.
        by: what `cheapest` compares; None where offers cannot be compared.
        unit: what is rented by the hour: `chip`, `GPU`, or `device` for a mixture.
    """

    offers: tuple[Offer, ...]
    cheapest: Offer | None
    fastest: Offer | None
    by: Literal["dollars", "chip-hours"] | None
    unit: str


def pods_of_kind(pod: Accelerator) -> Iterator[Accelerator]:
    """Pods of the same generation and number of slices: a quarter, half, as many, twice and four times the chips."""
    generation = pod.generation
    # Powers of two: batch sizes that divide on one of them mostly divide on the others.
    chips = [pod.chips * FACTOR >> n for n in reversed(range(2 * FACTOR.bit_length() - 1))]
    if generation.platform == "gpu":
        names = [f"{generation.name}x{count}" for count in chips]
    else:
        slices = f"{pod.slices}x" if pod.slices > 1 else ""
        sizes = [count // pod.slices for count in chips]
        # Other sizes would need a topology of their own.
        offered = [size for size in sizes if size in default_topologies(generation)]
        names = [f"{slices}{generation.name}-{size * generation.cores_per_chip}" for size in offered]
    for name in names:
        try:
            yield parse_accelerator(name)
        except AcceleratorError:
            # Not every number of chips is offered.
            continue


def choose_pods(verdicts: Sequence[Verdict], options: PlanOptions) -> PodChoice:
    """Compares the pods of verdicts on one job.

    Args:
        verdicts: one for each pod.
        options: deadline, budget and prices.
    """
    offers = tuple(offer for verdict in verdicts for offer in _offers(verdict, options))
    usable = [offer for offer in offers if offer.seconds is not None and offer.meets in ("yes", "perhaps")]
    # Offers that meet the limits for certain come before those that perhaps do.
    certain = [offer for offer in usable if offer.meets == "yes"] or usable
    by = _compared_by(certain, verdicts)
    platforms = {verdict.accelerator.generation.platform for verdict in verdicts if verdict.accelerator is not None}
    return PodChoice(
        offers=offers,
        cheapest=min(certain, key=_price, default=None) if by is not None else None,
        fastest=min(certain, key=lambda offer: (_expected(offer.seconds), _price(offer)), default=None),
        by=by,
        unit=unit_name(platforms.pop() if len(platforms) == 1 else ""),
    )


def _compared_by(offers: Sequence[Offer], verdicts: Sequence[Verdict]) -> Literal["dollars", "chip-hours"] | None:
    if offers and all(offer.dollars is not None for offer in offers):
        return "dollars"
    generations = {verdict.accelerator.generation.name for verdict in verdicts if verdict.accelerator is not None}
    # Chip-hours of one generation cost the same, whatever that is.
    unpriced = all(offer.dollars is None for offer in offers)
    return "chip-hours" if unpriced and len(generations) == 1 else None


def _expected(span: CostRange | None) -> float:
    return float("inf") if span is None else span.expected


def _price(offer: Offer) -> float:
    # Chip-hours stand for dollars where no price is known.
    return _expected(offer.dollars) if offer.dollars is not None else _expected(offer.seconds) * offer.chips


def _offers(verdict: Verdict, options: PlanOptions) -> Iterator[Offer]:
    pod = verdict.accelerator
    chips = 0 if pod is None else pod.chips
    cost = job_cost(verdict)
    if cost is None or cost.total is None:
        # Reasons in the order in which they exclude each other.
        if pod is None:
            reason = "not a pod"
        elif prices := _token_prices(verdict):
            reason = prices
        elif verdict.exit_code != OK or cost is None:
            reason = verdict.headline.splitlines()[0]
        else:
            reason = "the number of its steps is unknown" if cost.unknown else "no step time: it was not compiled"
        yield Offer(
            target=verdict.target,
            kind="",
            chips=chips,
            seconds=None,
            dollars=None,
            meets="unknown",
            compiled=False,
            reason=reason,
        )
        return
    for kind in cost.prices or ("",):
        dollars = cost.dollars(kind) if cost.prices else None
        yield Offer(
            target=verdict.target,
            kind=kind,
            chips=chips,
            seconds=cost.total,
            dollars=dollars,
            meets=_meets(cost.total, dollars, options),
            compiled=bool(verdict.fits),
            reason="",
        )


def _token_prices(verdict: Verdict) -> str:
    """Dollars for a million tokens of a run without an end; empty for others, and without a price."""
    cost, report = job_cost(verdict), serving_report(verdict)
    if cost is None or cost.training or report is None or not report.loads:
        return ""
    load = report.loads[-1]
    terms = []
    for kind, price in cost.prices.items():
        dollars = token_price(load, price)
        amount = f"${between(dollars.low, dollars.high)}" if load.time is not None else f"at least ${dollars.low:.3g}"
        terms.append(amount + (f" ({kind})" if kind else ""))
    return f"{', '.join(terms)} for 10⁶ tokens, {load.rows:,} rows at once" if terms else ""


def _meets(seconds: CostRange, dollars: CostRange | None, options: PlanOptions) -> Answer:
    answers: list[Answer] = []
    if options.deadline is not None:
        answers.append(_below(seconds, options.deadline.total_seconds()))
    if options.budget is not None:
        answers.append("unknown" if dollars is None else _below(dollars, options.budget))
    # All limits have to be met, so the worst answer is that of the offer.
    worst: tuple[Answer, ...] = ("no", "unknown", "perhaps")
    ranked: tuple[Answer, ...] = (*(answer for answer in worst if answer in answers), "yes")
    return ranked[0]


def _below(span: CostRange, limit: float) -> Answer:
    return "yes" if span.high <= limit else "perhaps" if span.expected <= limit else "no"
