"""Metrics, as Prometheus's own reader understands them, against a count by hand."""

import math
import random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from levanter.serving.metrics import (
    FIRST_TOKEN_BOUNDS,
    NEXT_TOKEN_BOUNDS,
    ChoiceEnded,
    EngineLoad,
    Metrics,
    RequestAdmitted,
    RequestRejected,
    ServerInfo,
    TokensSampled,
)

pytestmark = pytest.mark.quick

HOSTILE = 'a "model"\\with\nlines{}, ünïcode'


def metrics(**options) -> Metrics:
    facts = ServerInfo(version="2.0", model=HOSTILE, devices=8)
    return Metrics(
        facts, load=lambda: EngineLoad(slots=16, running=3, pages=40, pages_free=31, shared_tokens=128), **options
    )


def read(counted: Metrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples by name and labels, by Prometheus's parser."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(counted.text()):
        assert family.documentation and family.type in ("gauge", "counter", "histogram")
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {}), f"{sample} is there twice"
            found[sample.name][labels] = sample.value
    return found


def test_a_server_that_nobody_has_asked():
    found = read(metrics())
    assert found["levanter_info"] == {(("model", HOSTILE), ("version", "2.0")): 1}
    assert found["levanter_slots_running"][()] == 3 and found["levanter_cache_pages_free"][()] == 31
    assert found["levanter_prefix_cache_hit_tokens_total"][()] == 128
    assert found["levanter_first_token_seconds_count"][()] == 0
    assert found["levanter_choices_ended_total"][(("reason", "cancelled"),)] == 0
    assert found["levanter_requests_rejected_total"][(("reason", "queue_full"),)] == 0


def test_counts_are_those_by_hand():
    counted = metrics(compiles=lambda: 2)
    counted(RequestAdmitted(request="a", route="/v1/completions", prompt_tokens=10, choices=2, at=1.0))
    for choice in range(2):
        counted(TokensSampled(request="a", choice=choice, tokens=1, first=True, since=0.3, at=1.3))
    counted(TokensSampled(request="a", choice=0, tokens=4, first=False, since=0.08, at=1.4))
    counted(ChoiceEnded(request="a", choice=0, reason="stop", tokens=5, since=0.4, at=1.4))
    counted(ChoiceEnded(request="a", choice=1, reason="cancelled", tokens=1, since=0.5, at=1.5))
    for _ in range(3):
        counted(RequestRejected(route="/nobody/knows", reason="too_long", status=400))
    found = read(counted)
    totals = {name: samples[()] for name, samples in found.items() if list(samples) == [()]}
    expected = {"requests": 1, "choices": 2, "prompt_tokens": 10, "tokens": 6, "compiles_after_ready": 2}
    assert {name: totals[f"levanter_{name}_total"] for name in expected} == expected
    assert found["levanter_choices_ended_total"][(("reason", "stop"),)] == 1
    assert found["levanter_requests_rejected_total"][(("reason", "too_long"),)] == 3
    assert totals["levanter_first_token_seconds_sum"] == pytest.approx(0.6)
    # Four tokens in 80 ms are four times 20 ms.
    assert totals["levanter_next_token_seconds_count"] == 4
    assert found["levanter_next_token_seconds_bucket"][(("le", "0.02"),)] == 4
    assert found["levanter_next_token_seconds_bucket"][(("le", "0.01"),)] == 0
    assert totals["levanter_next_token_seconds_sum"] == pytest.approx(0.08)
    # What a client wrote is no label.
    assert "/nobody/knows" not in counted.text()


def test_buckets_hold_what_is_not_above_them():
    counted, rng = metrics(), random.Random(0)
    values = [rng.choice([rng.expovariate(2), *FIRST_TOKEN_BOUNDS, 1e4]) for _ in range(500)]
    for value in values:
        counted(TokensSampled(request="a", choice=0, tokens=1, first=True, since=value, at=0.0))
    buckets = {dict(labels)["le"]: n for labels, n in read(counted)["levanter_first_token_seconds_bucket"].items()}
    for bound in (*FIRST_TOKEN_BOUNDS, math.inf):
        assert next(n for le, n in buckets.items() if float(le) == bound) == sum(v <= bound for v in values)
    assert len(buckets) == len(FIRST_TOKEN_BOUNDS) + 1


def test_lines_do_not_grow_with_what_is_counted():
    counted = metrics()
    before = counted.text().count("\n")
    for n in range(1000):
        counted(RequestAdmitted(request=str(n), route=f"/{n}", prompt_tokens=n, choices=1, at=n))
        counted(TokensSampled(request=str(n), choice=0, tokens=1, first=n % 2 == 0, since=n / 100, at=n))
        counted(ChoiceEnded(request=str(n), choice=0, reason="length", tokens=n, since=n, at=n))
    assert counted.text().count("\n") == before
    assert list(NEXT_TOKEN_BOUNDS) == sorted(set(NEXT_TOKEN_BOUNDS))
