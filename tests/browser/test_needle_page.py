"""The page of needles in a real browser: no complaint, no request, a table for each task, hostile texts."""

from pathlib import Path

import numpy as np
import pytest
from helpers.browser import CONTRAST, Browser, needs_chromium
from helpers.browser import browser as browser

from levanter.eval.needles.page import needle_page
from levanter.eval.needles.prompts import NeedlePrompt
from levanter.eval.needles.results import NeedleAnswer, summarize_needles

pytestmark = needs_chromium

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def asked(task: str, length: int, number: int, depth: float | None) -> NeedlePrompt:
    return NeedlePrompt(
        task=task,
        length=length,
        number=number,
        tokens=np.zeros(length - 1, np.int32),
        target_positions=np.arange(2, dtype=np.int32),
        targets=np.arange(2, dtype=np.int32),
        owners=np.zeros(2, np.int32),
        values=(f"{number} {HOSTILE}",),
        depths=(depth,),
        text_end="",
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    answered = []
    for length in (4096, 131072):
        for n in range(6):
            hit = length == 4096 or n < 2
            found = NeedleAnswer(logprobs=(-0.1, -0.2), ranks=(0, 0 if hit else 3))
            answered.append((asked("niah_single_1", length, n, n % 3 / 2), found))
            answered.append((asked("vt", length, n, None), found))
    page = needle_page(
        summarize_needles(answered, depths=3), answered, title=f"Needles {HOSTILE}", facts={"model": HOSTILE}
    )
    where = tmp_path_factory.mktemp("needles") / "page.html"
    where.write_text(page, "utf-8")
    return where


def test_a_table_of_depth_by_length_and_what_was_not_found(browser: Browser, path: Path):
    page = browser.open(path)
    page.wait_for("document.querySelectorAll('#missed tbody tr').length > 0")
    assert page.evaluate("document.title") == f"Needles {HOSTILE}"
    assert page.count("#tasks section") == 1
    rows = page.evaluate(
        "[...document.querySelectorAll('#tasks tbody tr')].map(e => e.innerText.split('\\t').join('|'))"
    )
    assert rows == ["0 %|2 of 2|1 of 2", "50 %|2 of 2|1 of 2", "100 %|2 of 2|0 of 2"]
    every = page.evaluate(
        "[...document.querySelectorAll('#overall tbody tr')].map(e => e.innerText.split('\\t').join('|'))"
    )
    assert every == [f"{name}|100.0 %|33.3 %" for name in ("niah_single_1", "vt", "all tasks")]
    colors = page.evaluate(
        "[...document.querySelectorAll('#tasks td.cell')].map(e => getComputedStyle(e).backgroundColor)"
    )
    assert len(set(colors)) == 3, "all, half, none"
    assert page.count("#missed tbody tr") == 8
    first = page.text("#missed tbody tr")
    assert HOSTILE in first and "1 of 2" in first and "131,072" in first
    page.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(browser: Browser, path: Path, scheme: str):
    page = browser.open(path, scheme=scheme)
    page.wait_for("document.querySelectorAll('#missed tbody tr').length > 0")
    ratio, where = page.evaluate(CONTRAST)
    assert ratio >= 4.5, where
    page.check()


def test_it_fits_a_telephone(browser: Browser, path: Path):
    page = browser.open(path, width=380)
    page.wait_for("document.querySelectorAll('#missed tbody tr').length > 0")
    assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
