"""The page: sections of a report, from measurements to HTML.

One section for each text. In it: the numbers, the strips of all runs over that text with the text under them, the
charts, the passages, and how it was measured. Without scripts, the HTML only lacks zooming; style and script are part
of the file.
"""

import json
from collections.abc import Sequence
from importlib import resources

from levanter.memorization.compare import by_text, cautions, labels, model_name, overlap
from levanter.memorization.measurement import Measurement
from levanter.memorization.report.charts import curves_svg, curves_table, histogram_svg, histogram_table
from levanter.memorization.report.passage_list import passage_list
from levanter.memorization.report.payload import as_script, book_payload
from levanter.memorization.report.strips import strips
from levanter.memorization.report.tables import facts, numbers, published_table, runs_table, schemes_table
from levanter.memorization.report.words import escaped, share


def report_html(
    runs: Sequence[Measurement], *, with_text: bool = True, passages: int = 20, names: Sequence[str] | None = None
) -> str:
    """The report of some runs as one HTML document.

    Args:
        runs: the measurements; runs over one text share a section, in which their strips line up.
        with_text: whether the book's text may be in the file; without it there are positions and numbers only.
        passages: the most passages to list per run.
        names: of the runs; default by what distinguishes them.

    Raises:
        ValueError: no runs.
    """
    if not runs:
        raise ValueError("no runs to report")
    names = labels(runs) if names is None else names
    name_of = {id(run): name for run, name in zip(runs, names, strict=True)}
    groups = by_text(runs)
    title = groups[0][0].book.title if len(groups) == 1 else f"{len(groups)} books"
    parts = [_head(runs, title)]
    if len(runs) > 1:
        warnings = "".join(f"<p>{escaped(line)}</p>" for line in cautions(runs))
        parts.append(f'<div class="caution" role="note">{warnings}</div>' if warnings else "")
        parts.append(f'<div class="card scroll">{runs_table(runs, names)}</div>')
    # The title of a single book is at the top of the page.
    heading = "h2" if len(groups) == 1 else "h3"
    if len(groups) > 1:
        links = "".join(
            f'<li><a href="#book-{n}">{escaped(group[0].book.title)}</a></li>' for n, group in enumerate(groups, 1)
        )
        parts.append(f'<nav aria-label="Books"><ul>{links}</ul></nav>')
    for index, group in enumerate(groups, 1):
        of = [name_of[id(run)] for run in group]
        section = _section(group, of, heading=heading, with_text=with_text, passages=passages)
        above = f"<h2>{escaped(group[0].book.title)}</h2>\n" if len(groups) > 1 else ""
        parts.append(f'<section class="book" id="book-{index}">\n{above}{section}\n</section>')
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="generator" content="levanter">\n'
        # An icon of its own, or browsers ask the server for one.
        '<link rel="icon" href="data:,">\n'
        f"<title>Memorization of {escaped(title)}</title>\n<style>\n{_asset('style.css')}</style>\n</head>\n"
        "<body>\n<main>\n"
        + "\n".join(parts)
        + f"\n</main>\n<script>\n{_asset('script.js')}</script>\n</body>\n</html>\n"
    )


def _head(runs: Sequence[Measurement], title: str) -> str:
    models = dict.fromkeys(name for run in runs if (name := model_name(run)))
    by = f" by {escaped(', '.join(models))}" if models else ""
    presets = ", ".join(dict.fromkeys(f"{run.book.preset}, scheme {run.scheme.name}" for run in runs))
    return (
        f"<header><h1>Memorization of {escaped(title)}</h1>\n"
        f'<p class="lead">How likely the text is to be continued word for word{by}. '
        f"Preset {escaped(presets)}.</p></header>"
    )


def _section(runs: Sequence[Measurement], names: Sequence[str], *, heading: str, with_text: bool, passages: int) -> str:
    has_text = with_text and any(run.book.text is not None for run in runs)
    several = len(runs) > 1
    blocks = [("Heat strip", strips(runs, names, has_text=has_text))]
    if several:
        blocks.append(("What both cover", _overlaps(runs, names)))
    blocks += [
        ("Distribution", _charts(runs, names)),
        ("Top passages", _passages(runs, names, count=passages, with_text=has_text)),
        ("How it was measured", _how_it_was_measured(runs, names)),
    ]
    data = as_script(book_payload(runs, names, with_text=has_text))
    return (
        ("" if several else numbers(runs[0]))
        + "\n".join(f"<{heading}>{title}</{heading}>\n{block}" for title, block in blocks)
        + f'\n<script type="application/json">{data}</script>'
    )


def _overlaps(runs: Sequence[Measurement], names: Sequence[str]) -> str:
    rows = []
    for run, name in zip(runs[1:], names[1:], strict=True):
        found = overlap(runs[0], run)
        cells = "".join(
            f"<td>{share(x)}</td>" for x in (found.both, found.first_only, found.second_only, found.neither)
        )
        rows.append(f"<tr><th scope='row'>{escaped(names[0])} and {escaped(name)}</th>{cells}</tr>")
    return (
        '<div class="card scroll"><table class="wide"><thead><tr><th scope="col">runs</th>'
        '<th scope="col">both</th><th scope="col">only the first</th><th scope="col">only the second</th>'
        f'<th scope="col">neither</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _passages(runs: Sequence[Measurement], names: Sequence[str], *, count: int, with_text: bool) -> str:
    cards = []
    for n, (run, name) in enumerate(zip(runs, names, strict=True)):
        listed = passage_list(run, n, count=count, with_text=with_text)
        if len(runs) > 1:
            opened = " open" if n == 0 else ""
            listed = f"<details{opened}><summary>{escaped(name)}</summary>{listed}</details>"
        cards.append(f'<div class="card passage-card" data-run="{n}">{listed}</div>')
    return "".join(cards)


def _charts(runs: Sequence[Measurement], names: Sequence[str]) -> str:
    figures = []
    for run, name in zip(runs, names, strict=True):
        of = f" · {escaped(name)}" if len(runs) > 1 else ""
        figures.append(
            f'<figure class="card histogram"><figcaption>Windows by p_z{of}</figcaption>{histogram_svg(run, name)}'
            f"<details><summary>Numbers</summary>{histogram_table(run)}</details></figure>"
        )
        figures.append(
            f'<figure class="card curves"><figcaption>Windows that n samples reveal with probability p{of}</figcaption>'
            f"{curves_svg(run, name)}<details><summary>Numbers</summary>{curves_table(run)}</details></figure>"
        )
    return f'<div class="charts">{"".join(figures)}</div>'


def _how_it_was_measured(runs: Sequence[Measurement], names: Sequence[str]) -> str:
    parts = []
    published = published_table(runs[0]) if len(runs) == 1 else ""
    if published:
        parts.append(f'<div class="card scroll">{published}</div>')
    for run, name in zip(runs, names, strict=True):
        manifest = json.dumps(run.book.manifest, indent=2, sort_keys=True, ensure_ascii=False, default=str)
        above = f"<p><b>{escaped(name)}</b></p>" if len(runs) > 1 else ""
        parts.append(
            f'<div class="card">{above}{facts(run)}<div class="scroll">{schemes_table(run)}</div>'
            f"<details><summary>Manifest</summary><pre>{escaped(manifest)}</pre></details></div>"
        )
    return "".join(parts)


def _asset(name: str) -> str:
    return resources.files("levanter.memorization.report").joinpath(name).read_text(encoding="utf-8")
