"""The page of a harness's run in a real browser: no complaint, no request, every document found, hostile texts."""

from pathlib import Path

import pytest
from helpers.browser import CONTRAST, Browser, needs_chromium
from helpers.browser import browser as browser

from levanter.eval.harness.page import harness_page
from levanter.eval.harness.results import Sample
from levanter.eval.harness.significance import compare

pytestmark = needs_chromium

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
COUNT = 60


def choice(n: int, *, right: bool) -> Sample:
    return Sample(
        doc_id=n,
        doc_hash=f"h{n}",
        filter="none",
        target="1",
        arguments=((f"Question {n}: {HOSTILE}", " first"), (f"Question {n}: {HOSTILE}", " second")),
        answers=((-1.0, False), (-0.5 if right else -3.0, right)),
        metrics={"acc": float(right)},
    )


def written(n: int) -> Sample:
    return Sample(
        doc_id=n,
        doc_hash=f"h{n}",
        filter="number",
        target=f"{n}",
        arguments=((f"{n} + 0 =", {"until": ["\n"]}),),
        answers=(f" it is {n}",),
        metrics={"exact_match": 1.0},
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ours = {
        "choices": [choice(n, right=n % 3 > 0) for n in range(COUNT)],
        "sums": [written(n) for n in range(5)],
    }
    theirs = {"choices": [choice(n, right=n % 3 == 0) for n in range(COUNT)]}
    found = {
        "results": {
            "choices": {"acc,none": 2 / 3, "acc_stderr,none": 0.06, "alias": "choices"},
            "sums": {"exact_match,number": 1.0, "exact_match_stderr,number": "N/A"},
        },
        "n-samples": {"choices": {"effective": COUNT}, "sums": {"effective": 5}},
    }
    page = harness_page(
        found,
        ours,
        title=f"A model {HOSTILE}",
        facts={"model": HOSTILE},
        differences=compare(ours, theirs),
        against="this run beside another",
    )
    where = tmp_path_factory.mktemp("page") / "page.html"
    where.write_text(page, encoding="utf-8")
    return where


def test_tasks_documents_and_another_run(browser: Browser, path: Path):
    page = browser.open(path)
    page.wait_for("document.querySelectorAll('#list article').length === 25")
    assert page.evaluate("document.title") == f"A model {HOSTILE}"
    assert page.count("#metrics tbody tr") == 2 and page.count("svg.bar") == 2
    # The error bar of the first, from 0.55 to 0.78.
    low, high = page.evaluate(
        "[...document.querySelector('svg.bar line').attributes].slice(0, 2).map(a => +a.value / 260)"
    )
    assert (low, high) == (pytest.approx(2 / 3 - 1.96 * 0.06), pytest.approx(2 / 3 + 1.96 * 0.06))
    assert "+0.3333" in page.text("#differences tbody") and "better" in page.text("#differences tbody")
    page.click("#more")
    page.wait_for("document.querySelectorAll('#list article').length === 50")
    page.check()


def test_documents_are_searched_and_chosen(browser: Browser, path: Path):
    page = browser.open(path)
    choose = (
        "(id, value) => { const at = document.getElementById(id); at.value = value; "
        "at.dispatchEvent(new Event('input')); }"
    )
    page.evaluate(f"({choose})('which', 'wrong')")
    page.wait_for(f"document.getElementById('count').textContent === '{COUNT // 3} of {COUNT} documents'")
    assert page.evaluate("[...document.querySelectorAll('#list .wrong')].length") == COUNT // 3
    page.evaluate(f"({choose})('search', 'question 33:')")
    page.wait_for("document.querySelectorAll('#list article').length === 1")
    assert HOSTILE in page.text("#list pre") and "← right" in page.text("#list")
    shares = page.evaluate("[...document.querySelectorAll('#list .answer > span')].map(e => e.textContent)")
    assert shares == ["88.1 %", "11.9 %"]
    page.evaluate(f"({choose})('search', ''); ({choose})('which', 'all'); ({choose})('task', 'sums')")
    page.wait_for("document.querySelectorAll('#list article').length === 5")
    assert "it is 3" in page.text("#list") and "right would be: 3" in page.text("#list")
    page.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(browser: Browser, path: Path, scheme: str):
    page = browser.open(path, scheme=scheme)
    page.wait_for("document.querySelectorAll('#list article').length === 25")
    ratio, where = page.evaluate(CONTRAST)
    assert ratio >= 4.5, where
    page.check()


def test_it_fits_a_telephone(browser: Browser, path: Path):
    page = browser.open(path, width=380)
    page.wait_for("document.querySelectorAll('#list article').length === 25")
    assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


def test_without_documents_there_is_a_table(browser: Browser, tmp_path: Path):
    where = tmp_path / "page.html"
    where.write_text(harness_page({"results": {"a": {"acc,none": 0.5}}}, {}, title="a", facts={}), encoding="utf-8")
    page = browser.open(where)
    page.wait_for("document.querySelectorAll('#metrics tbody tr').length === 1")
    assert page.evaluate(
        "[document.getElementById('documents').hidden, document.getElementById('comparison').hidden]"
    ) == [
        True,
        True,
    ]
    page.check()
