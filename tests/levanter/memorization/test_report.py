"""The report as a file: what it holds and hides, that it asks for nothing, and that no text breaks out of it."""

import base64
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from helpers.book_results import book_of_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.memorization.heatmap import LIGHTEST
from levanter.memorization.measurement import measure
from levanter.memorization.report import report_html
from levanter.memorization.report.strips import encode_levels, levels
from levanter.memorization.results import TOP_40

HOSTILE = 'He said "</script><script>alert(1)</script>" & <!-- <img src=x onerror=alert(2)> -->\u2028字🙂\n'


class Elements(HTMLParser):
    """Every element with its attributes, and the content of scripts."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def decoded(written: str) -> list[int]:
    """What the page's script makes of the runs."""
    data, found, at = base64.b64decode(written), [], 0
    while at < len(data):
        length, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        found += [data[at]] * length
        at += 1
    return found


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100), st.sampled_from([1, 2, 127, 128, 129, 20_000])), min_size=1, max_size=6))
def test_runs_of_levels_survive(runs):
    values = np.concatenate([np.full(length, level, np.uint8) for level, length in runs])
    assert decoded(encode_levels(values)) == values.tolist()


def test_levels_are_even_in_log_pz():
    text = "x" * 20
    log_pz = np.full(7, -np.inf)
    log_pz[0], log_pz[3], log_pz[6] = 0.0, math.log(0.001) / 2, math.log(0.001) + 1e-5
    run = measure(book_of_bytes(text, log_pz))
    assert levels(run)[[4, 5, 6, 10, 11, 12, 16, 17, 18]].tolist() == [100] * 3 + [50] * 3 + [1] * 3
    # What no suffix spans was not scored: the first prefix, what a stride leaves out, the end.
    assert levels(run)[[0, 3, 19]].tolist() == [255] * 3 and levels(run)[[7, 8, 9]].tolist() == [0] * 3 and LIGHTEST > 0


def test_hostile_texts_and_titles_stay_text():
    book = book_of_bytes(HOSTILE * 20, title=HOSTILE, model=HOSTILE, preset="<b>")
    page = report_html([measure(book, threshold=0.01), measure(book, threshold=0.02)])
    elements = Elements(page)
    assert elements.open == []
    assert len(elements.scripts) == 2
    assert json.loads(elements.scripts[0])["text"] == HOSTILE * 20
    assert not [tag for tag, _ in elements.found if tag in ("img", "iframe", "object")]
    assert not [attributes for _, attributes in elements.found if any(name.startswith("on") for name in attributes)]


def test_it_asks_for_nothing():
    page = report_html([measure(book_of_bytes("some plain text, of which we read. " * 9))])
    elements = Elements(page)
    addresses = [
        a[name] for _, a in elements.found for name in ("src", "href", "action", "data", "srcset") if name in a
    ]
    assert addresses == ["data:,"]
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttp|import\(", page)
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_it_says_which_convention_was_used_and_what_was_published():
    text = "It is a truth universally acknowledged, that a text is short. " * 5
    book = book_of_bytes(text, title="Pride and Prejudice", preset="paper", scheme=TOP_40, model="org/Llama-3.1-8B")
    page = report_html([measure(book)])
    for said in ("Preset paper, scheme k40", "the 40 likeliest tokens", "56.87 %", "Same settings", "org/Llama-3.1-8B"):
        assert said in page
    other = report_html([measure(book_of_bytes(text, title="Pride and Prejudice"))])
    assert "Not exactly comparable: preset levanter and scheme full here" in other
    both = report_html([measure(book), measure(book_of_bytes(text, title="Pride and Prejudice", model="org/other"))])
    assert "different presets (paper, levanter)" in both and "56.87 %" in both


def test_several_books_have_a_section_each():
    runs = [measure(book_of_bytes(f"{word} and so on, for a while. " * 4, title=word)) for word in ("One", "Two")]
    elements = Elements(report_html(runs))
    assert [a["id"] for tag, a in elements.found if tag == "section"] == ["book-1", "book-2"]
    with pytest.raises(ValueError, match="no runs"):
        report_html([])


def test_size_of_a_long_book():
    # 500,000 characters of three bytes each, 100,000 windows of changing heat: the worst that is asked for.
    random = np.random.default_rng(0)
    text = "".join(map(chr, random.integers(0x4E00, 0x9FFF, 500_000)))
    windows = len(range(0, 1_500_000 - 180 + 1, 15))
    book = book_of_bytes(text, -random.exponential(4.0, windows), prefix=90, suffix=90, stride=15)
    assert len(report_html([measure(book)]).encode("utf-8")) < 5_000_000
