"""The page of a comparison in a real browser: no complaint, no request, the gap on the text, hostile texts."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.browser import CONTRAST, Browser, needs_chromium
from helpers.browser import browser as browser

from levanter.data.gap_texts import ComparedText
from levanter.eval.gap.byte_losses import ComparedDocument, token_losses
from levanter.eval.gap.page import gap_page
from levanter.eval.gap.report import GapReport

pytestmark = needs_chromium

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def compared(name: str, text: str, worse: float) -> ComparedDocument:
    """Words of one token each for B, of two for A, which takes so many nats more for the last."""
    one = ComparedText(name=name, tags=(name,), shard=f"{HOSTILE}.jsonl", row=0, text=text)
    ends = [*(n for n, c in enumerate(text) if c == " "), len(text)]
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    b = np.ones(len(spans))
    halves = [each for low, high in spans for each in ((low, (low + high) // 2), ((low + high) // 2, high))]
    a = np.full(len(halves), 0.5)
    a[-1] += worse
    return ComparedDocument(
        text=one, a=token_losses(text, halves, a, leading=0), b=token_losses(text, spans, b, leading=0)
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [compared("one", f"the cat {HOSTILE} sat", 8.0), compared("two", "a mat\nagain and again", -0.25)]
    report = GapReport(model_a=f"A {HOSTILE}", model_b="B")
    for each in texts:
        report.add(each)
    where = tmp_path_factory.mktemp("gap") / "page.html"
    where.write_text(gap_page(report.summary(), texts, title=f"Gap {HOSTILE}", facts={"read": HOSTILE}), "utf-8")
    return where


def test_the_gap_is_drawn_on_the_text(browser: Browser, path: Path):
    page = browser.open(path)
    page.wait_for("document.querySelectorAll('#text span').length > 3")
    assert page.evaluate("document.title") == f"Gap {HOSTILE}"
    assert page.text("#text") == f"the cat {HOSTILE} sat"
    last = "[...document.querySelectorAll('#text span')].at(-1)"
    title = page.evaluate(f"{last}.title")
    assert title.startswith("A 12.98 bits in 2 tokens, B 1.44 in 1: +11.54")
    assert "--a" in page.evaluate(f"{last}.style.background")
    # What both take as many bits for has no color.
    assert page.evaluate("document.querySelector('#text span').style.background") == ""
    assert page.count("svg.bar") == page.count("#tables tbody tr") > 4
    page.click("#next")
    page.wait_for("document.getElementById('text').textContent.startsWith('a mat')")
    assert "--b" in page.evaluate(f"{last}.style.background") and page.evaluate(
        "document.getElementById('next').disabled"
    )
    page.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(browser: Browser, path: Path, scheme: str):
    page = browser.open(path, scheme=scheme)
    page.wait_for("document.querySelectorAll('#text span').length > 3")
    ratio, where = page.evaluate(CONTRAST)
    assert ratio >= 4.5, where
    page.check()


def test_it_fits_a_telephone(browser: Browser, path: Path):
    page = browser.open(path, width=380)
    page.wait_for("document.querySelectorAll('#text span').length > 3")
    assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


def test_models_that_say_the_same_draw_nothing_colored(browser: Browser, tmp_path: Path):
    one = compared("one", "the cat sat", 0.0)
    same = ComparedDocument(text=one.text, a=one.b, b=one.b)
    report = GapReport(model_a="A", model_b="A")
    report.add(same)
    where = tmp_path / "page.html"
    where.write_text(gap_page(report.summary(), [same], title="same", facts={}), "utf-8")
    page = browser.open(where)
    page.wait_for("document.querySelectorAll('#text span').length === 3")
    assert page.evaluate("[...document.querySelectorAll('#text span')].every(e => !e.style.background)")
    assert json.loads(
        page.evaluate(
            "JSON.stringify([...document.querySelectorAll('svg.bar rect')].map(e => +e.getAttribute('width')))"
        )
    ) == [0.0] * page.count("svg.bar")
    page.check()
