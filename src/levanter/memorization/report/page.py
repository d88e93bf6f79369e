"""The report of memorization runs as one HTML page: a section for each text.

A section has the main figures, the heat strips of all runs over that text with the text below them, charts, the most
likely passages, and the settings of the measurement. Without scripts, the page only lacks zooming.
"""

import json
from collections.abc import Sequence
from importlib import resources

from levanter.html.format import exact_percent, integer_text, probability_text, sample_count_text
from levanter.html.markup import Content, Html, escaped, table, tag
from levanter.html.page import document, script_json, style_sheet
from levanter.memorization.compare import by_text, cautions, labels, model_name, overlap
from levanter.memorization.discoverability import log_required_n
from levanter.memorization.measurement import Measurement
from levanter.memorization.passages import Passage
from levanter.memorization.report.charts import curves_svg, curves_table, histogram_svg, histogram_table
from levanter.memorization.report.strips import book_payload, strips
from levanter.memorization.report.tables import facts, main_figures, published_table, runs_table, schemes_table

VISIBLE_PASSAGES = 5
"""Passages that are visible without opening the rest of the list."""


def report_html(
    runs: Sequence[Measurement], *, with_text: bool = True, passages: int = 20, names: Sequence[str] | None = None
) -> str:
    """The report of some runs as one HTML document.

    Args:
        runs: the measurements; runs over one text share a section, in which their strips line up.
        with_text: whether the file contains the book's text; without it, passages are positions and numbers only.
        passages: the largest number of passages listed per run.
        names: of the runs; by default the settings in which they differ.

    Raises:
        ValueError: no runs.
    """
    if not runs:
        raise ValueError("no runs to report")
    names = labels(runs) if names is None else names
    # By identity, because several runs may have equal names.
    name_of = {id(run): name for run, name in zip(runs, names, strict=True)}
    groups = by_text(runs)
    title = groups[0][0].book.title if len(groups) == 1 else f"{len(groups)} books"
    sections = [_header(runs, title)]
    if len(runs) > 1:
        warnings = [tag("p", line) for line in cautions(runs)]
        if warnings:
            sections.append(tag("div", warnings, class_="caution", role="note"))
        sections.append(tag("div", runs_table(runs, names), class_="card"))
    # A single book has its title at the top of the page, so that its headings are one level higher.
    heading = "h2" if len(groups) == 1 else "h3"
    if len(groups) > 1:
        links = [tag("li", tag("a", group[0].book.title, href=f"#book-{n}")) for n, group in enumerate(groups, 1)]
        sections.append(tag("nav", tag("ul", links), aria_label="Books"))
    for index, group in enumerate(groups, 1):
        group_names = [name_of[id(run)] for run in group]
        content = _section(group, group_names, heading=heading, with_text=with_text, passages=passages)
        title_tag = [tag("h2", group[0].book.title), "\n"] if len(groups) > 1 else ""
        sections.append(tag("section", title_tag, content, class_="book", id=f"book-{index}"))
    return document(
        title=f"Memorization of {title}",
        style="\n" + style_sheet(_asset("style.css")),
        body=tag("main", "\n", [[part, "\n"] for part in sections]),
        script="\n" + _asset("script.js"),
    )


def _header(runs: Sequence[Measurement], title: str) -> Html:
    models = dict.fromkeys(name for run in runs if (name := model_name(run)))
    by = f" by {', '.join(models)}" if models else ""
    presets = ", ".join(dict.fromkeys(f"{run.book.preset}, scheme {run.scheme.name}" for run in runs))
    lead = f"How likely the text is to be continued word for word{by}. Preset {presets}."
    return tag("header", tag("h1", f"Memorization of {title}"), "\n", tag("p", lead, class_="lead"))


def _section(
    runs: Sequence[Measurement], names: Sequence[str], *, heading: str, with_text: bool, passages: int
) -> Html:
    has_text = with_text and any(run.book.text is not None for run in runs)
    blocks: list[tuple[str, Content]] = [("Heat strip", strips(runs, names, has_text=has_text))]
    if len(runs) > 1:
        blocks.append(("Overlap of the runs", _overlaps(runs, names)))
    blocks += [
        ("Distribution", _charts(runs, names)),
        ("Most likely passages", _passages(runs, names, count=passages, with_text=has_text)),
        ("Settings and methods", _settings(runs, names)),
    ]
    # The text is in the page once per section, as JSON for the script.
    payload = script_json(book_payload(runs, names, with_text=has_text))
    return escaped(
        [
            "" if len(runs) > 1 else main_figures(runs[0]),
            [[tag(heading, title), "\n", block, "\n"] for title, block in blocks],
            tag("script", Html(payload), type="application/json"),
        ]
    )


def _overlaps(runs: Sequence[Measurement], names: Sequence[str]) -> Html:
    rows: list[list[Content]] = []
    for run, name in zip(runs[1:], names[1:], strict=True):
        shares = overlap(runs[0], run)
        values = (shares.both, shares.first_only, shares.second_only, shares.neither)
        rows.append([f"{names[0]} and {name}", *map(exact_percent, values)])
    header = ("runs", "both", "only the first", "only the second", "neither")
    return tag("div", table(header, rows, numbers=range(1, 5)), class_="card")


def _charts(runs: Sequence[Measurement], names: Sequence[str]) -> Html:
    figures: list[Content] = []
    for run, name in zip(runs, names, strict=True):
        suffix = f" · {name}" if len(runs) > 1 else ""
        for css_class, caption, chart, numbers in (
            ("histogram", "Windows by p_z", histogram_svg(run, name), histogram_table(run)),
            ("curves", "Windows that n samples reveal with probability p", curves_svg(run, name), curves_table(run)),
        ):
            details = tag("details", tag("summary", "Numbers"), numbers)
            figures.append(
                tag("figure", tag("figcaption", caption + suffix), chart, details, class_=f"card {css_class}")
            )
    return tag("div", figures, class_="charts")


def _settings(runs: Sequence[Measurement], names: Sequence[str]) -> Html:
    cards: list[Content] = []
    if len(runs) == 1 and (published := published_table(runs[0])):
        cards.append(tag("div", published, class_="card"))
    for run, name in zip(runs, names, strict=True):
        manifest = json.dumps(run.book.manifest, indent=2, sort_keys=True, ensure_ascii=False, default=str)
        run_name = tag("p", tag("b", name)) if len(runs) > 1 else ""
        details = tag("details", tag("summary", "Manifest"), tag("pre", manifest))
        cards.append(tag("div", run_name, facts(run), schemes_table(run), details, class_="card"))
    return escaped(cards)


def _passages(runs: Sequence[Measurement], names: Sequence[str], *, count: int, with_text: bool) -> Html:
    cards: list[Content] = []
    for n, (run, name) in enumerate(zip(runs, names, strict=True)):
        passages = passage_list(run, n, count=count, with_text=with_text)
        if len(runs) > 1:
            passages = tag("details", tag("summary", name), passages, open="" if n == 0 else None)
        cards.append(tag("div", passages, class_="card passage-card", data_run=n))
    return escaped(cards)


def passage_list(run: Measurement, index: int, *, count: int, with_text: bool) -> Html:
    """The most likely passages of a run, those that reach the threshold first.

    Args:
        run: the measurement.
        index: the run's index in its section.
        count: the largest number of passages.
        with_text: whether prefix and suffix are shown.
    """
    above = run.passages(count)
    text = run.book.text if with_text else None
    # Passages below the threshold only fill up a list that would otherwise be shorter than `count`.
    below = run.below(max(count - len(above), 0))
    items_below = _ordered_list(
        [_passage(passage, n, index, text, run.unit, reached=False) for n, passage in enumerate(below, 1)]
    )
    if not above:
        sentence = "No window reaches the threshold." + (" The most likely below it:" if below else "")
        return escaped([tag("p", sentence, class_="lead"), items_below if below else ""])
    items = _ordered_list([_passage(passage, n, index, text, run.unit) for n, passage in enumerate(above, 1)])
    if below:
        summary = tag("summary", f"{len(below)} most likely below the threshold")
        return escaped([items, tag("details", summary, items_below)])
    return items


def _ordered_list(items: Sequence[Html]) -> Html:
    visible = tag("ol", items[:VISIBLE_PASSAGES], class_="passages")
    hidden = items[VISIBLE_PASSAGES:]
    if not hidden:
        return visible
    hidden_list = tag("ol", hidden, class_="passages", start=VISIBLE_PASSAGES + 1)
    return escaped([visible, tag("details", tag("summary", f"{len(hidden)} more"), hidden_list)])


def _passage(passage: Passage, rank: int, index: int, text: str | None, unit: str, *, reached: bool = True) -> Html:
    # Samples after which the suffix has appeared with probability one half.
    needed = sample_count_text(float(log_required_n(passage.log_pz, 0.5)))
    start, stop = passage.suffix
    remarks = [
        f"{unit} {integer_text(start)} – {integer_text(stop)}",
        f"{needed} {'sample' if needed == '1' else 'samples'} for an even chance",
    ]
    if reached:
        remarks.append(f"covered around it: {integer_text(passage.run[1] - passage.run[0])}")
    if passage.merged > 1:
        remarks.append(f"{integer_text(passage.merged)} windows")
    button = tag(
        "button",
        "Show in the strip",
        type="button",
        class_="script-only",
        data_run=index,
        data_start=start,
        data_stop=stop,
    )
    head = [tag("b", probability_text(passage.log_pz)), [tag("span", remark) for remark in remarks], button]
    quote: Content = ""
    if text is not None:
        prefix, suffix = text[slice(*passage.prefix)], text[slice(*passage.suffix)]
        quote = tag("blockquote", tag("span", prefix, class_="prefix"), tag("span", suffix, class_="suffix"))
    return tag("li", tag("div", head, class_="head"), quote, value=rank)


def _asset(name: str) -> str:
    return resources.files("levanter.memorization.report").joinpath(name).read_text(encoding="utf-8")
