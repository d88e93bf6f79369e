"""Which pods are compared for a deadline or a budget, and which of them are the cheapest and the fastest."""

from dataclasses import replace
from datetime import timedelta

import pytest
from helpers.verdicts import failed_verdict, fitting_verdict, refused_verdict

from levanter.hardware import parse_accelerator
from levanter.plan.calibration import TimeCalibration
from levanter.plan.pod_choice import choose_pods, pods_of_kind
from levanter.plan.report import choice_text, choice_values
from levanter.plan.step_time_model import StepTime
from levanter.plan.verdict import Verdict
from levanter.runplan import PlanOptions

pytestmark = pytest.mark.quick

HOUR = 3600.0


def job(target: str, hours: float, options: PlanOptions, *, spread: float = 1.1) -> Verdict:
    """A job of 100 executions that takes `hours` on a pod, and up to `spread` times as long, without a start."""
    seconds = hours * HOUR / 100
    verdict = fitting_verdict()
    (program, *_) = verdict.programs
    time = StepTime(
        cycles=0.0,
        kernels_at_peak=seconds,
        kernels_expected=seconds,
        memory=0.0,
        links=(),
        calibration=TimeCalibration(spread=(1.0, spread)),
    )
    assert program.outcome is not None
    outcome = replace(program.outcome, lower_seconds=0.0, compile_seconds=0.0)
    timed = replace(program, time=time, outcome=outcome)
    pod = parse_accelerator(target)
    return replace(verdict, target=target, accelerator=pod, programs=(timed,), load=None, options=options)


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("v5p-8", ["v5p-8", "v5p-16", "v5p-32"]),
        ("v6e-64", ["v6e-16", "v6e-32", "v6e-64", "v6e-128", "v6e-256"]),
        ("2xv6e-128", ["2xv6e-32", "2xv6e-64", "2xv6e-128", "2xv6e-256"]),
        ("v6e-1", ["v6e-1", "v6e-4"]),
        ("h100x8", ["h100x2", "h100x4", "h100x8", "h100x16", "h100x32"]),
        ("h100x1", ["h100x1", "h100x2", "h100x4"]),
    ],
)
def test_pods_of_the_same_kind(target, names):
    assert [pod.name for pod in pods_of_kind(parse_accelerator(target))] == names


def test_the_cheapest_and_the_fastest_that_meet_a_deadline():
    """Twice the chips take 0.6 of the time: faster, and 1.2 times as expensive."""
    options = PlanOptions(price={"v6e": 2.0}, deadline=timedelta(hours=7))
    verdicts = [job("v6e-8", 10, options), job("v6e-16", 6, options), job("v6e-32", 3.6, options)]
    choice = choose_pods(verdicts, options)
    # 8 chips: 10 h × 8 × $2.
    assert [offer.dollars.expected for offer in choice.offers if offer.dollars] == pytest.approx([160, 192, 230.4])
    assert [offer.meets for offer in choice.offers] == ["no", "yes", "yes"]
    assert (str(choice.cheapest), str(choice.fastest), choice.by) == ("v6e-16", "v6e-32", "dollars")


def test_a_budget_and_a_deadline_together():
    options = PlanOptions(price={"v6e": 2.0}, deadline=timedelta(hours=7), budget=220)
    verdicts = [job("v6e-8", 10, options), job("v6e-16", 6, options), job("v6e-32", 3.6, options)]
    choice = choose_pods(verdicts, options)
    # $192, at most 211; $230.4.
    assert [offer.meets for offer in choice.offers] == ["no", "yes", "no"]
    assert choice.cheapest is choice.fastest is choice.offers[1]


def test_certain_offers_come_before_those_that_may_be_late():
    options = PlanOptions(price={"v6e": 2.0}, deadline=timedelta(hours=10.5))
    verdicts = [job("v6e-8", 10, options), job("v6e-16", 6, options)]
    choice = choose_pods(verdicts, options)
    assert [offer.meets for offer in choice.offers] == ["perhaps", "yes"]
    assert str(choice.cheapest) == "v6e-16"
    alone = choose_pods(verdicts[:1], options)
    assert str(alone.cheapest) == "v6e-8"


def test_spot_and_reserved_are_offers_of_their_own():
    options = PlanOptions(price={"v6e:reserved": 2.0, "v6e:spot": 0.5}, budget=1000)
    choice = choose_pods([job("v6e-8", 10, options)], options)
    assert [str(offer) for offer in choice.offers] == ["v6e-8 (reserved)", "v6e-8 (spot)"]
    assert str(choice.cheapest) == str(choice.fastest) == "v6e-8 (spot)"


def test_without_prices_one_generation_is_compared_by_chip_hours_and_two_are_not():
    options = PlanOptions(deadline=timedelta(hours=20))
    same = choose_pods([job("v6e-8", 10, options), job("v6e-16", 6, options)], options)
    assert (str(same.cheapest), str(same.fastest), same.by) == ("v6e-8", "v6e-16", "chip-hours")
    assert "no price is known: by chip-hours" in choice_text(same, options)
    other = choose_pods([job("v6e-8", 10, options), job("v5p-16", 6, options)], options)
    assert (other.cheapest, str(other.fastest), other.by) == (None, "v5p-16", None)
    assert "cheapest: unknown" in choice_text(other, options)


def test_a_budget_without_a_price_is_not_compared():
    options = PlanOptions(budget=20_000)
    choice = choose_pods([job("v6e-8", 10, options)], options)
    assert choice.cheapest is None and choice.fastest is None and choice.offers[0].meets == "unknown"
    assert "a budget needs prices" in choice_text(choice, options)


def test_without_limits_pods_are_compared_all_the_same():
    options = PlanOptions(price={"v6e": 2.0})
    text = choice_text(choose_pods([job("v6e-8", 10, options), job("v6e-16", 6, options)], options), options)
    assert text.startswith("the pods by time and dollars") and "within limits" not in text
    assert "cheapest: v6e-8: 10.0 h, within 10.0–11.0 h, $160, within 160–176" in text
    assert "fastest: v6e-16" in text


def test_gpus_are_called_so():
    options = PlanOptions(deadline=timedelta(hours=20))
    gpus, both = [job("h100x8", 10, options)], [job("h100x8", 10, options), job("v6e-8", 10, options)]
    text = choice_text(choose_pods(gpus, options), options)
    assert "GPU-hours" in text and "chip" not in text
    assert "device-hours" in choice_text(choose_pods(both, options), options)


def test_pods_that_do_not_work_are_listed_with_their_reason():
    options = PlanOptions(price={"v6e": 2.0}, deadline=timedelta(hours=1))
    choice = choose_pods([refused_verdict(), failed_verdict(), job("v6e-8", 10, options)], options)
    text = choice_text(choice, options)
    assert "none of these pods qualifies" in text
    assert "36.93 GiB > 31.25 GiB" in text
    values = choice_values(choice)
    assert values["cheapest"] is None and len(values["offers"]) == 3
