"""The plan's page in a real browser: no complaint, no request, every array in the treemap, targets that switch."""

import re
from pathlib import Path

import pytest
from helpers.browser import CONTRAST, Browser, Page, needs_chromium
from helpers.browser import browser as browser
from helpers.verdicts import HOSTILE, failed_verdict, fitting_verdict, hostile_verdict, refused_verdict

from levanter.plan.report import to_html

pytestmark = needs_chromium

SHOWN = "[...document.querySelectorAll('.panel')].filter(p => p.offsetHeight > 0).map(p => p.id)"


def wait_until_shown(page: Page, *targets: str) -> None:
    page.wait_for(f"{SHOWN}.join() === '{','.join(targets)}'")


WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    page = to_html([fitting_verdict(), refused_verdict(), failed_verdict()], more=[("search on v4-16", "a: 1\nb: <2>")])
    path.write_text(page, encoding="utf-8")
    return path


def test_targets_switch_by_mouse_keys_and_address(browser: Browser, three: Path):
    page = browser.open(three)
    wait_until_shown(page, "v4-16")
    page.click("nav.targets a:nth-child(2)")
    wait_until_shown(page, "v6e-8")
    page.press("ArrowRight")
    wait_until_shown(page, "v5p-128")
    assert page.evaluate("document.activeElement.hash") == "#v5p-128"
    page.press("ArrowRight")
    wait_until_shown(page, "v4-16")
    # A link of the table, and the way back.
    page.click("table a[href='#v6e-8']")
    wait_until_shown(page, "v6e-8")
    page.evaluate("history.back()")
    wait_until_shown(page, "v4-16")
    assert page.count("[role=tab][aria-selected=true]") == 1
    assert "<2>" in page.text("pre")
    page.check()


def test_every_array_is_in_the_treemap_and_tells_about_itself(browser: Browser, three: Path):
    verdict = fitting_verdict()
    assert verdict.budget is not None
    page = browser.open(three)
    cells = page.evaluate("[...document.querySelectorAll('#v4-16 .cell')].map(c => c.dataset.about)")
    assert sorted(about.splitlines()[0] for about in cells) == sorted(r.path for r in verdict.budget.residents)
    areas = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#v4-16 .cell')].map(c => "
        "[c.dataset.about.split('\\n')[0], c.getBoundingClientRect().width * c.getBoundingClientRect().height]))"
    )
    # 6 GiB and 1.5 GiB.
    assert areas["cache.keys"] / areas["tokens"] == pytest.approx(4, rel=0.02)
    page.hover("#v4-16 .cell[aria-label='tokens']")
    assert "replicated: every chip holds a copy" in page.text("#v4-16 .detail")
    page.hover("#v4-16 h2")
    assert page.text("#v4-16 .detail").startswith("Point at an array")
    page.click("#v4-16 .cell[aria-label='tokens']")
    page.hover("#v4-16 h2")
    assert page.text("#v4-16 .detail").startswith("tokens")
    page.check()


def test_the_treemap_by_keyboard(browser: Browser, three: Path):
    page = browser.open(three)
    page.evaluate("document.querySelector('#v4-16 .map').previousElementSibling.setAttribute('tabindex', -1)")
    page.evaluate("document.querySelector('#v4-16 .map').previousElementSibling.focus()")
    page.press("Tab")
    first = page.text("#v4-16 .detail")
    page.press("ArrowRight")
    second = page.text("#v4-16 .detail")
    page.press("End")
    last = page.text("#v4-16 .detail")
    assert len({first, second, last}) == 3
    assert all("on a chip" in text for text in (first, second, last))
    # One stop for all of the map: the next Tab leaves it.
    page.press("Tab")
    assert page.evaluate("document.activeElement.closest('.map')") is None
    page.check()


@pytest.mark.parametrize("javascript", ["on", "off"])
def test_hostile_texts_stay_text(browser: Browser, tmp_path: Path, javascript):
    path = tmp_path / "hostile.html"
    path.write_text(to_html([hostile_verdict(), fitting_verdict()], more=[(HOSTILE, HOSTILE)]), encoding="utf-8")
    page = browser.open(path, javascript=javascript)
    assert page.count("script") == 1
    assert "</script><script>alert(1)</script>" in page.text(".headline")
    assert "日本語" in page.text(".headline")
    page.check()


def test_without_scripts_everything_is_there(browser: Browser, three: Path):
    page = browser.open(three, javascript="off")
    assert page.evaluate(SHOWN) == ["v4-16", "v6e-8", "v5p-128"]
    assert page.count("#v4-16 .cell[title]") == page.count("#v4-16 .cell") > 0
    page.evaluate("document.querySelector('#v4-16 details').open = true")
    assert "cache.keys" in page.text("#v4-16 details")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_readable_on_any_screen(browser: Browser, three: Path, scheme, width):
    page = browser.open(three, scheme=scheme, width=width)
    for target in ("v4-16", "v6e-8", "v5p-128"):
        page.evaluate(f"location.hash = '{target}'")
        wait_until_shown(page, target)
        assert not page.evaluate(WIDER), f"{target} scrolls sideways at {width}"
        ratio, where = page.evaluate(CONTRAST)
        assert ratio >= 4.5, f"{scheme}: contrast {ratio:.2f} at {where}"
    page.check()


def test_printing_shows_every_target(browser: Browser, three: Path):
    page = browser.open(three, media="print")
    assert page.evaluate(SHOWN) == ["v4-16", "v6e-8", "v5p-128"]


def test_stacked_bytes_end_at_their_share_of_memory(browser: Browser, three: Path):
    page = browser.open(three)
    share = page.evaluate(
        "[...document.querySelectorAll('#v4-16 .stack')].slice(0, 1).map(bar => [...bar.querySelectorAll('.piece')]"
        ".reduce((sum, piece) => sum + piece.getBoundingClientRect().width, 0) / bar.clientWidth)[0]"
    )
    shown = re.search(r"([\d.]+) GiB of ([\d.]+) GiB", page.text("#v4-16 section h3"))
    assert shown is not None
    assert share == pytest.approx(float(shown[1]) / float(shown[2]), abs=0.005)
