"""Measurements and comparisons: the summary against the definitions, what may be compared and what not."""

import dataclasses
import json
import math

import numpy as np
import pytest
from helpers.book_results import book_of_bytes

from levanter.memorization.calibration import calibrate
from levanter.memorization.compare import by_text, cautions, labels, overlap, text_key
from levanter.memorization.histogram import histogram
from levanter.memorization.measurement import measure
from levanter.memorization.results import FULL, GREEDY, TOP_40, Scheme

pytestmark = pytest.mark.quick

TEXT = "Ein Größenwahn – naïve 字 text, for a small book; it goes on 🙂 for some lines.\n" * 3


def replaced(book, **changes):
    return dataclasses.replace(book, **changes)


def test_summary_says_what_the_definitions_say():
    book = book_of_bytes(TEXT, seed=4)
    run = measure(book, threshold=0.01)
    summary = json.loads(json.dumps(run.summary(), allow_nan=False))
    pz = np.exp(book.log_pz(FULL))
    inked = set()
    for (start, stop), value in zip(book.suffix_char_spans, pz, strict=True):
        inked |= set(range(start, stop)) if value >= 0.01 else set()
    assert summary["covered_characters"] == len(inked) > 0
    assert summary["coverage"] == pytest.approx(len(inked) / len(TEXT))
    assert summary["windows_reached"] == int((pz >= 0.01).sum())
    assert summary["expected_rate"] == pytest.approx(pz.mean())
    assert summary["max_extraction_rate"] is None
    assert summary["schemes"]["k40"]["max_extraction_rate"] == np.mean((book.ranks < 40).all(axis=1))
    assert summary["schemes"]["greedy"]["windows_reached"] == int((book.ranks == 0).all(axis=1).sum())
    stretches, longest = 0, 0
    for at in range(len(TEXT)):
        if at in inked:
            stretches += at - 1 not in inked
            longest = max(longest, next(n for n in range(len(TEXT) + 1) if at + n not in inked))
    assert (summary["covered_runs"], summary["longest_covered_run"]) == (stretches, longest)
    assert summary["coverage_interval"]["low"] <= summary["coverage"] <= summary["coverage_interval"]["high"]
    assert "Größenwahn" not in json.dumps(summary, ensure_ascii=False)


def test_histogram_counts_every_window_once():
    log_pz = np.array([0.0, math.log(0.5), math.log(0.001), math.log(0.001) - 1e-6, -23.1, -24.0, -800.0, -np.inf])
    found = histogram(log_pz, decades=10, steps_per_decade=1)
    # 10^-3 is the lower edge of its bin, and e^-23.1 = 10^-10.03 is below the lowest.
    assert found.counts.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 0, 2]
    assert (found.below, found.zero) == (3, 1)
    assert found.counts.sum() + found.below + found.zero == len(log_pz)


def test_scheme_and_threshold():
    book = replaced(book_of_bytes(TEXT), scheme=TOP_40)
    assert measure(book).scheme == TOP_40
    assert measure(book, scheme=GREEDY).summary()["scheme"] == "greedy"
    with pytest.raises(ValueError, match="2 of 3 suffix tokens"):
        measure(book, scheme=Scheme(suffix_tokens=2))
    with pytest.raises(ValueError, match="did not store its normalizer"):
        measure(book, scheme=Scheme(top_k=5))
    nothing = {name: getattr(book, name)[:0] for name in ("token_spans", "char_spans", "suffix_char_spans")}
    nothing |= {name: getattr(book, name)[:0] for name in ("logprobs", "ranks", "top_lse")}
    with pytest.raises(ValueError, match="no windows were scored"):
        measure(replaced(book, **nothing))


def test_calibrated_threshold_replaces_the_chosen_one():
    book, control = book_of_bytes(TEXT, seed=1), book_of_bytes(TEXT, seed=2)
    calibration = calibrate([control.log_pz(FULL)], false_positive_rate=0.1)
    run = measure(book, threshold=1e-9, calibration=calibration)
    assert run.log_threshold == calibration.log_threshold
    summary = run.summary()["calibration"]
    assert summary["false_positive_rate_reached"] <= 0.1 and summary["control_windows"] == len(control)


def test_a_prepared_set_is_measured_row_by_row():
    book = book_of_bytes(TEXT, seed=6)
    nowhere = np.full_like(book.char_spans, -1)
    run = measure(replaced(book, char_spans=nowhere, suffix_char_spans=nowhere, text=None), threshold=0.01)
    reached = book.log_pz(FULL) >= math.log(0.01)
    assert (run.unit, run.characters, run.coverage) == ("rows", len(book), reached.mean())
    assert [p.window for p in run.passages(3)] == np.argsort(-book.log_pz(FULL), kind="stable")[:3].tolist()


def test_overlap_is_per_character():
    one, two = (measure(book_of_bytes(TEXT, seed=seed), threshold=0.01) for seed in (0, 1))
    found = overlap(one, two)
    a, b = one.covered.tolist(), two.covered.tolist()
    expected = [sum(x and y for x, y in zip(a, b, strict=True)), sum(x and not y for x, y in zip(a, b, strict=True))]
    assert [found.both * len(a), found.first_only * len(a)] == pytest.approx(expected)
    assert found.both + found.first_only + found.second_only + found.neither == pytest.approx(1)
    other = measure(book_of_bytes("another text altogether"))
    with pytest.raises(ValueError, match="two texts"):
        overlap(one, other)


def test_runs_are_grouped_by_text_even_where_one_hides_it():
    manifest = {"identity": {"text.sha256": "ab" * 32, "text.characters": len(TEXT)}}
    shown = measure(replaced(book_of_bytes(TEXT), manifest=manifest))
    hidden = measure(replaced(book_of_bytes(TEXT), manifest=manifest, text=None))
    other = measure(book_of_bytes("another text altogether"))
    assert text_key(shown) == text_key(hidden)
    assert [len(group) for group in by_text([shown, other, hidden])] == [2, 1]


def test_names_and_cautions():
    book = book_of_bytes(TEXT, model="org/one")
    same = [measure(book), measure(book)]
    assert labels(same) == ["A Book (1)", "A Book (2)"] and cautions(same) == []
    other = measure(replaced(book, manifest={"model": "org/two"}, preset="paper", scheme=TOP_40), threshold=0.01)
    assert labels([same[0], other]) == ["org/one · levanter · full", "org/two · paper · k40"]
    found = "\n".join(cautions([same[0], other]))
    assert (
        "presets (levanter, paper)" in found and "schemes (full, k40)" in found and "thresholds (0.001, 0.01)" in found
    )
