"""The report of a training run in a real browser: complete without scripts, readable, no wider than its window."""

from pathlib import Path

import pytest
from helpers.browser import CONTRAST, Browser, needs_chromium
from helpers.browser import browser as browser

from levanter.commands.train.report_page import report_page
from levanter.trainer.goodput import RunAttempt, goodput
from levanter.trainer.history import EvaluationPoint, Point

pytestmark = needs_chromium

HOSTILE = "</style><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
FACTS = {"mesh": HOSTILE, "checkpoint": "gs://bucket/" + "a-long-folder-" * 20 + "/step-1000"}


def point(taken: int) -> Point:
    return Point(
        taken=taken,
        # A gap in the middle of the curve.
        loss=None if taken == 300 else 5 / taken**0.2,
        grad_norm=1.0,
        learning_rate=taken * 1e-6,
        tokens_per_second=None if taken == 1 else 123456.0,
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    attempts = [
        RunAttempt(
            began=0, until=4000, first=0, taken=600, seconds={"steps": 3000.0, "compilation": 500, "loading": 90}
        ),
        RunAttempt(began=4300, until=9000, first=500, taken=1000, seconds={"steps": 2500.0, "saving": 20, "input": 10}),
    ]
    page = report_page(
        goodput(attempts),
        [point(taken) for taken in range(1, 1001)],
        [EvaluationPoint(taken=taken, loss=3.0 - taken / 1000) for taken in (500, 1000)],
        title=f"Run {HOSTILE}",
        facts=FACTS,
    )
    where = tmp_path_factory.mktemp("page") / "report.html"
    where.write_text(page, encoding="utf-8")
    return where


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_complete_and_can_be_read(browser: Browser, path: Path, scheme):
    page = browser.open(path, scheme=scheme)
    assert page.evaluate("document.title") == f"Run {HOSTILE}" == page.text("h1")
    assert page.count("svg.chart") == 4
    # Two parts of the loss around the gap, and the validation loss with a dot for each.
    assert page.count("figure:first-child polyline") == 3 and page.count("figure:first-child circle") == 2
    ratio, where = page.evaluate(CONTRAST)
    assert ratio >= 4.5, where
    page.check()


def test_the_bar_and_its_table_agree(browser: Browser, path: Path):
    page = browser.open(path)
    widths = page.evaluate(
        "[...document.querySelectorAll('.stack .piece')].map(e => e.getBoundingClientRect().width /"
        " document.querySelector('.stack').getBoundingClientRect().width)"
    )
    # 5,500 s of steps, of which 100 of 600 in the first attempt were taken again, in 9,000 s.
    assert widths[0] == pytest.approx((5500 - 500) / 9000, abs=0.002) and sum(widths) == pytest.approx(1, abs=0.005)
    assert "55.6 %" in page.text(".tiles") and "between attempts" in page.text("section:nth-of-type(2) table")
    assert "2 attempts" in page.text(".tiles")


@pytest.mark.parametrize("width", [1400, 420])
def test_it_is_no_wider_than_the_window(browser: Browser, path: Path, width):
    page = browser.open(path, width=width)
    assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    # Labels of the axes do not overlap each other.
    assert page.evaluate(
        "[...document.querySelectorAll('svg.chart')].every(svg => {"
        " const boxes = [...svg.querySelectorAll('text')].map(t => t.getBoundingClientRect());"
        " return boxes.every((a, n) => boxes.slice(n + 1).every(b =>"
        "  a.right <= b.left || b.right <= a.left || a.bottom <= b.top + 1 || b.bottom <= a.top + 1)); })"
    )
