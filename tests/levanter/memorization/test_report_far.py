"""Reports of what was not scored, and of what is far below every threshold: neither looks like the other, nor empty."""

import json
import math
import re
from dataclasses import replace

import numpy as np
from helpers.book_results import book_of_bytes

from levanter.html.format import exact_percent
from levanter.memorization.measurement import measure
from levanter.memorization.plots import heatmap_png, histogram_png
from levanter.memorization.report import report_html
from levanter.memorization.report.charts import histogram_svg, strip_svg
from levanter.memorization.report.strips import levels

TEXT = "abcdefghij" * 30


def cut_short(windows: int):
    """A book of which only the first windows were scored, as `max_examples` leaves it."""
    book = book_of_bytes(TEXT, np.full(147, math.log(0.5)))
    arrays = ("token_spans", "char_spans", "suffix_char_spans", "logprobs", "ranks", "top_lse")
    return replace(book, **{name: getattr(book, name)[:windows] for name in arrays})


def far(log_pz: float = -36.0):
    """A book whose windows all have one p_z: 2.3e-16, 12 nats per token."""
    return book_of_bytes(TEXT, np.full(147, log_pz))


def test_what_was_not_scored_is_hatched_and_named():
    run = measure(cut_short(50))
    # Suffixes of three characters begin at 4, 6, …, 102.
    assert run.scored.sum() == 101 and run.scored[4:105].all() and run.summary()["scored_characters"] == 101
    found = levels(run)
    assert (found[:4] == 255).all() and (found[105:] == 255).all() and (found[4:105] <= 100).all()
    page = report_html([run])
    assert f"not scored: {exact_percent(199 / 300)} of the characters" in page and "66.33 %" in page
    still = strip_svg(run, "a")
    hatched = [
        int(x) for path in re.findall(r'class="unscored" d="([^"]*)"', still) for x in re.findall(r"M(\d+)", path)
    ]
    # 600 columns for 300 characters.
    assert min(hatched) == 0 and max(hatched) > 590 and not any(8 <= x < 210 for x in hatched)
    assert heatmap_png(run) != heatmap_png(measure(cut_short(147)))


def test_whoever_scored_everything_sees_no_hatching():
    book = cut_short(147)
    spans = np.stack([book.char_spans[:, 0], book.char_spans[:, 1] + 1], axis=1)
    run = measure(replace(book, suffix_char_spans=spans))
    assert run.scored.all()
    assert '<b class="unscored">' not in report_html([run]) and "unscored" not in strip_svg(run, "a")


def test_what_is_far_below_every_threshold_is_a_bar_and_not_nothing():
    run = measure(far())
    assert run.histogram.below == 147 and run.histogram.counts.sum() == 0
    assert "147 windows with p_z above 0 and below 10^-10" in histogram_svg(run, "a")
    zero = measure(far(-math.inf))
    assert "147 windows with p_z = 0" in histogram_svg(zero, "a")
    assert histogram_png(run) != histogram_png(zero)
    page = report_html([run])
    assert "0.0000" not in page and "No window reaches the threshold. The most likely below it:" in page
    assert exact_percent(math.exp(-36.0)) in page and "2.3 × 10⁻¹⁶" in page
    passages = run.summary()["passages_below"]
    assert len(passages) == 20 and passages[0]["suffix"] == [4, 7] and run.passages() == ()
    assert page.count("covered around it") == 0 and page.count('<ol class="passages"') == 2


def test_ink_reaches_down_to_log_p_a_token():
    """By hand: τ is −2.30 nats per token, −4 is 29.8 % of the way from there to −8, −12 is beyond it."""
    assert set(levels(measure(far(-12.0)))[4:298].tolist()) == {101 + 29}
    assert set(levels(measure(far(-36.0)))[4:298].tolist()) == {0}
    page = report_html([measure(far(-12.0))])
    assert '<option value="token" selected>' in page
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page, re.S)[1])
    assert data["runs"][0]["tokens"] == 3
    # Half the way to the floor is half the ink: i5 of ten.
    assert 'class="i5"' in strip_svg(measure(far(-12.0)), "a")
    assert (
        "selected" not in report_html([measure(book_of_bytes(TEXT, np.zeros(147)))]).split("log p per token")[0][-60:]
    )


def test_passages_below_do_not_repeat_those_above():
    log_pz = np.full(147, -30.0)
    log_pz[10] = -1.0
    run = measure(book_of_bytes(TEXT, log_pz))
    (above,) = run.passages()
    assert above.suffix == (24, 27)
    assert all(each.suffix[1] <= 24 or each.suffix[0] >= 27 for each in run.below())
    assert "most likely below the threshold" in report_html([run])
