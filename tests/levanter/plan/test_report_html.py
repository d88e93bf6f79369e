"""The page as text: well-formed, self-contained, escaped, small, and saying what the terminal says."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from helpers.verdicts import (
    HOSTILE,
    failed_verdict,
    fitting_verdict,
    hostile_verdict,
    refused_verdict,
    tiny_budget,
    tiny_plan,
)

from levanter.html.markup import Html, tag
from levanter.plan.hbm_budget import Resident
from levanter.plan.report import render, to_html
from levanter.plan.report.charts import cells, treemap

pytestmark = pytest.mark.quick

VOID = {"meta", "link", "br", "hr", "input", "img"}


class Page(HTMLParser):
    """Tags, their attributes, and the text outside scripts and styles."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, name, attributes):
        self.tags.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open and self.open[-1] == name, f"</{name}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


VERDICTS = {"fits": fitting_verdict, "refused": refused_verdict, "failed": failed_verdict, "hostile": hostile_verdict}


def many_layers(count: int) -> list[Resident]:
    """Weights of layers that are not stacked, the first of them cut otherwise."""
    return [
        Resident(
            path=f"model.layers.{n}.mlp.{name}.weight",
            group="mlp",
            axes=(("mlp", 53248), ("embed", 16384)),
            dtype="bfloat16",
            spec="mlp → model" if n else "embed → data",
            nbytes=1 << 24,
            whole_bytes=1 << 28,
        )
        for n in range(count)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]


@pytest.mark.parametrize("name", VERDICTS)
def test_well_formed_and_self_contained(name):
    text = to_html([VERDICTS[name]()])
    assert text.startswith("<!doctype html>")
    page = Page(text)
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    for tag_name, attributes in page.tags:
        for key in ("src", "href", "action", "srcset", "data"):
            target = attributes.get(key) or ""
            assert target == "data:," or target.startswith("#") or not target, f"<{tag_name} {key}={target}>"
        assert not any(key.startswith("on") for key in attributes)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3)", re.sub(r"&[#\w]+;", "", text.split("</style>")[0]))
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy


def test_every_figure_of_the_terminal_is_on_the_page():
    """Numbers with their units; what the page leaves out are the terminal's abbreviations of lists."""
    verdict = fitting_verdict()
    shown = Page(to_html([verdict])).text
    for figure in set(re.findall(r"[\d.,–]+ (?:GiB|MiB|KiB|B|s|ms|µs|%|GB/s)(?= |$|,|;)", render([verdict]))):
        assert figure in shown, figure
    for words in (
        "modelled, not measured",
        "reduce-scatter",
        "6,400 windows of the book",
        "Before you pay",
        "no price is known: --price v4=DOLLARS",
        "nothing was said of `data`",
    ):
        assert words in shown
    assert "would take less: {embed: [data, model]}\n  → params:" in Page(to_html([refused_verdict()])).text


def test_nothing_of_the_runs_own_becomes_markup():
    text = to_html([hostile_verdict(), hostile_verdict()], more=[(HOSTILE, HOSTILE)])
    page = Page(text)
    scripts = [name for name, _ in page.tags if name == "script"]
    assert scripts == ["script"]
    assert "alert(1)" not in re.search(r"<script>(.*)</script>", text, flags=re.S)[1]
    assert "</script><script>alert(1)</script> \"'&amp; \\x1b[31mred" in page.text
    assert "日本語 naïve" in page.text
    text.encode("utf-8")
    # Two panels of one target have two names.
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids)) == 2


def test_every_array_has_a_box_and_a_row():
    plan = tiny_plan()
    verdict = fitting_verdict(plan=plan)
    page = Page(to_html([verdict]))
    boxes = [a for name, a in page.tags if name == "button"]
    assert verdict.budget is not None
    assert sorted(b["aria-label"] for b in boxes) == sorted(r.path for r in verdict.budget.residents)
    hatched = {b["aria-label"] for b in boxes if "whole" in (b["class"] or "").split()}
    assert hatched == {r.path for r in verdict.budget.residents if r.replicated} != set()
    cache = next(b for b in boxes if b["aria-label"] == "cache.keys")
    assert "batch → data" in (cache["title"] or "") and "6.00 GiB on a chip" in (cache["title"] or "")


def test_layers_that_are_alike_are_one_box():
    found = cells(many_layers(126), most=300)
    names = {cell.name: cell for cell in found}
    assert len(found) == 6
    assert names["model.layers.*.mlp.up_proj.weight (125 of them)"].nbytes == 125 << 24
    assert names["model.layers.0.mlp.up_proj.weight"].nbytes == 1 << 24
    assert sum(cell.nbytes for cell in found) == 126 * 3 << 24


def test_statistics_of_the_same_array_are_told_apart():
    names = ("up_proj", "down_proj")
    base = replace(many_layers(1)[0], group="optimizer")
    alike = [
        replace(base, path=f"state.optimizer.1.{which}.layers.mlp.{name}.weight", spec=f"{which} {name}")
        for which in ("mu", "nu")
        for name in names
    ]
    boxes = re.findall(r"<b>(.*?)</b>", treemap(cells(alike, most=300), holder="chip"))
    assert sorted(boxes) == sorted(f"{which} mlp.{name}" for which in ("mu", "nu") for name in names)


def test_many_unlike_arrays_stay_small():
    plan = tiny_plan()
    more = [
        replace(r, axes=(("mlp", n + 1),), path=f"model.{'x' * 80}.part{n}") for n, r in enumerate(many_layers(400))
    ]
    budget = tiny_budget(plan, more=more)
    found = cells(budget.residents, most=300)
    assert len(found) == 300 and found[-1].name.endswith("smaller arrays")
    assert sum(cell.nbytes for cell in found) == sum(r.nbytes for r in budget.residents)
    for targets in (1, 2, 8):
        assert len(to_html([fitting_verdict(plan=plan, budget=budget)] * targets).encode()) < 500_000 + 10_000 * targets


def test_several_targets_are_compared_and_named():
    page = Page(to_html([fitting_verdict(), refused_verdict(), failed_verdict()]))
    assert [a["id"] for _, a in page.tags if "panel" in (a.get("class") or "")] == ["v4-16", "v6e-8", "v5p-128"]
    assert [a["href"] for n, a in page.tags if n == "a"] == ["#v4-16", "#v6e-8", "#v5p-128"] * 2


def test_tags_escape_text_and_attributes():
    assert tag("p", "a<b", Html("<b>c</b>"), title='"<&') == '<p title="&quot;&lt;&amp;">a&lt;b<b>c</b></p>'
    assert tag("td", "x", class_=None, tabindex=0) == '<td tabindex="0">x</td>'
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'
