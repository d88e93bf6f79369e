"""The memorization report in a real browser: zoom from strip to text, passages, two runs side by side."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from helpers.book_results import book_of_bytes
from helpers.browser import Browser, Page, needs_chromium
from helpers.browser import browser as browser

from levanter.memorization.measurement import measure
from levanter.memorization.report import report_html

pytestmark = needs_chromium

LINE = "Line {:05d}: naïve 字 text with 🙂 & <tags>, “quotes” and a \\backslash.\n"
PREFIX, SUFFIX, STRIDE = 60, 60, 20


def book(lines: int, memorized: tuple[float, float], **options):
    """A book of numbered lines of which the windows in one stretch (shares of the book) are remembered."""
    text = "".join(LINE.format(n) for n in range(lines))
    windows = len(range(0, len(text.encode()) - PREFIX - SUFFIX + 1, STRIDE))
    at = np.arange(windows) / windows
    log_pz = np.where((memorized[0] <= at) & (at < memorized[1]), -0.5 - 2.0 * np.sin(40 * at) ** 2, -60.0)
    return book_of_bytes(text, log_pz, prefix=PREFIX, suffix=SUFFIX, stride=STRIDE, **options)


def written(path: Path, *books, **options) -> Path:
    path.write_text(report_html([measure(one) for one in books], **options), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    first = book(1500, (0.0, 0.5), title="Numbered <Lines> & more", model="org/a")
    second = dataclasses.replace(book(1500, (0.25, 0.75), model="org/b"), title=first.title)
    return {
        "one": written(folder / "one.html", first),
        "two": written(folder / "two.html", first, second),
        "private": written(folder / "private.html", first, with_text=False),
    }


def view(page: Page) -> tuple[int, int]:
    start, stop = page.evaluate("(d => [d.start, d.stop])(document.querySelector('.book').dataset)")
    return int(start), int(stop)


def colour(page: Page, selector: str, part: float) -> list[int]:
    """Red, green and blue of a canvas's middle row at a share of its width."""
    # Read from a copy: a canvas that is read itself makes the browser complain.
    return page.evaluate(
        "((c, part) => { const to = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});"
        " to.drawImage(c, Math.floor(c.width * part), c.height >> 1, 1, 1, 0, 0, 1, 1);"
        " return [...to.getImageData(0, 0, 1, 1).data].slice(0, 3) })"
        f"(document.querySelector({json.dumps(selector)}), {part})"
    )


def wheel(page: Page, selector: str) -> None:
    page.evaluate(
        "(c => { const b = c.getBoundingClientRect(), clientX = b.left + b.width / 4;"
        " c.dispatchEvent(new WheelEvent('wheel', {ctrlKey: true, deltaY: -1, clientX, cancelable: true})) })"
        f"(document.querySelector({json.dumps(selector)}))"
    )


def test_the_strip_is_dark_where_the_book_is_remembered(browser: Browser, pages):
    page = browser.open(pages["one"])
    assert page.evaluate("document.title") == "Memorization of Numbered <Lines> & more"
    assert sum(colour(page, ".whole canvas", 0.25)) < 420
    assert colour(page, ".whole canvas", 0.75) == [255, 255, 255]
    page.evaluate("(s => { s.value = 'linear'; s.dispatchEvent(new Event('change')) })(document.querySelector('.ink'))")
    assert colour(page, ".whole canvas", 0.75) == [255, 255, 255]
    page.check()
    page.close()


def test_zooming_with_keys_and_mouse_reaches_the_text(browser: Browser, pages):
    page = browser.open(pages["one"])
    total = sum(len(LINE.format(n)) for n in range(1500))
    assert view(page) == (0, total)
    assert "4,000 of" in page.text(".reader .more")
    page.evaluate("document.querySelector('.navigator').focus()")
    for _ in range(5):
        page.press("ArrowUp")
    start, stop = view(page)
    assert stop - start == pytest.approx(total / 32, abs=2)
    page.press("ArrowRight")
    assert view(page)[0] == pytest.approx(start + (stop - start) / 4, abs=2)
    page.press("Home")
    assert view(page)[0] == 0
    text = page.evaluate("document.querySelector('.reader').textContent")
    assert text == "".join(LINE.format(n) for n in range(1500))[: view(page)[1]]
    page.press("End")
    assert view(page)[1] == total
    page.press("0")
    assert view(page) == (0, total)
    # A click on the whole strip zooms in there; the wheel zooms around the pointer.
    page.click(".whole canvas")
    start, stop = view(page)
    assert stop - start == pytest.approx(total / 12, abs=2) and start < total / 2 < stop
    wheel(page, ".zoomed canvas")
    narrower = view(page)
    assert narrower[1] - narrower[0] == pytest.approx((stop - start) * 0.8, abs=2)
    page.click("button[data-do='in']")
    assert view(page)[1] - view(page)[0] < narrower[1] - narrower[0]
    page.click("button[data-do='all']")
    assert view(page) == (0, total)
    assert f"of {total:,}" in page.text(".where")
    page.check()
    page.close()


def test_dragging_selects_a_stretch(browser: Browser, pages):
    page = browser.open(pages["one"])
    page.evaluate(
        "(c => { const b = c.getBoundingClientRect(), y = b.top + 5; c.setPointerCapture = () => {};"
        " const send = (kind, part) =>"
        " c.dispatchEvent(new PointerEvent(kind, {clientX: b.left + part * b.width, clientY: y}));"
        " send('pointerdown', .2); send('pointermove', .4); send('pointerup', .4) })"
        "(document.querySelector('.whole canvas'))"
    )
    total = sum(len(LINE.format(n)) for n in range(1500))
    assert view(page) == (pytest.approx(0.2 * total, rel=0.02), pytest.approx(0.4 * total, rel=0.02))
    page.check()
    page.close()


def test_passages_lead_to_the_text(browser: Browser, pages):
    page = browser.open(pages["one"])
    assert page.count(".passages li") == 20
    quote = page.evaluate("document.querySelector('.passages .suffix').textContent")
    start, stop = page.evaluate(
        "(b => [+b.dataset.start, +b.dataset.stop])(document.querySelector('.passages button'))"
    )
    text = "".join(LINE.format(n) for n in range(1500))
    assert text[start:stop] == quote and 40 <= len(quote) <= 62
    page.click(".passages button")
    assert view(page) == (first := max(0, start - 600), first + stop - start + 1200)
    marked = page.evaluate("[...document.querySelectorAll('.reader mark')].map(m => m.textContent).join('')")
    assert marked == quote
    assert page.evaluate("document.activeElement.className") == "navigator script-only"
    # What is read is coloured as the strip is: remembered text has a ground, and words for it.
    assert page.evaluate("document.querySelector('.reader mark span').title").startswith("p_z ≈")
    page.check()
    page.close()


def test_two_runs_share_their_axis(browser: Browser, pages):
    page = browser.open(pages["two"], scheme="dark")
    assert page.count(".whole canvas.strip") == 2 and page.count("canvas.difference") == 2
    ground = colour(page, ".whole canvas[data-run='0']", 0.9)
    bright = [sum(colour(page, f".whole canvas[data-run='{run}']", at)) for run in (0, 1) for at in (0.1, 0.4, 0.7)]
    low = sum(ground) + 30
    assert [value > low for value in bright] == [True, True, False, False, True, True]
    first, both, second = (colour(page, ".whole canvas.difference", at) for at in (0.1, 0.4, 0.7))
    assert first[2] > first[0] + 40 and second[0] > second[2] + 40
    assert max(abs(a - b) for a, b in zip(both, ground, strict=True)) < 25
    assert "org/a" in page.text("table") and "org/b" in page.text("table")
    # The text follows the chosen run: at a tenth of the book the second run remembers nothing.
    page.evaluate("document.querySelectorAll('.passages button')[0].click()")
    coloured = "[...document.querySelectorAll('.reader span')].filter(s => s.style.background).length"
    assert page.evaluate(coloured) > 0
    page.evaluate(
        "document.querySelector('.navigator').focus();"
        "(s => { s.value = '1'; s.dispatchEvent(new Event('change')) })(document.querySelector('select.run'))"
    )
    page.press("0")
    assert page.evaluate(coloured) == 0
    page.check()
    page.close()


def test_private_and_without_scripts(browser: Browser, pages):
    private = browser.open(pages["private"])
    assert private.count(".reader") == 0 and "Line 0" not in private.evaluate("document.documentElement.innerHTML")
    private.click(".passages button")
    assert view(private)[1] - view(private)[0] < 2000
    private.check()
    private.close()
    still = browser.open(pages["one"], javascript="off")
    assert still.count("noscript svg.still") == 1 or "Heat strip" in still.text()
    assert "Line 0" in still.text(".passages") and not still.errors
    still.close()


def test_a_narrow_screen_scrolls_one_way(browser: Browser, pages):
    for name in ("one", "two"):
        page = browser.open(pages[name], width=390, height=800)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.check()
        page.close()


def test_a_book_of_half_a_million_characters(browser: Browser, tmp_path):
    path = written(tmp_path / "long.html", book(7600, (0.3, 0.6)))
    assert path.stat().st_size < 5_000_000
    page = browser.open(path)
    total = view(page)[1]
    assert total > 500_000
    page.click(".passages button")
    start, stop = view(page)
    text = page.evaluate("document.querySelector('.reader').textContent")
    whole = "".join(LINE.format(n) for n in range(7600))
    assert text == whole[start:stop]
    page.check()
    page.close()
