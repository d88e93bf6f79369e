"""Tables and lists of a report: the main numbers, runs side by side, schemes, published values, settings."""

from collections.abc import Sequence

from levanter.memorization import published
from levanter.memorization.calibration import Interval
from levanter.memorization.compare import model_name
from levanter.memorization.coverage import covered
from levanter.memorization.discoverability import expected_rate, max_extraction_rate
from levanter.memorization.measurement import Measurement, whole_suffix
from levanter.memorization.report.words import count, escaped, probability, share
from levanter.memorization.results import Scheme

_COVERS = {
    "suffix": "the characters of the suffix",
    "window": "the characters of the full window, prefix included",
    "paper_v1": "from as many characters after the window's start as the prefix has tokens, to its last character",
}


def numbers(run: Measurement) -> str:
    """The main numbers of one run as cards."""
    limit = max_extraction_rate(run.log_pz, top_k=run.scheme.top_k)
    cards = [
        ("coverage", share(run.coverage), f"{_interval(run.coverage_interval)} of all {run.unit}"),
        (
            "windows at the threshold",
            count(int(run.reached.sum())),
            f"of {count(len(run.log_pz))}: {share(run.reached_rate)}",
        ),
        ("longest covered stretch", count(run.longest_run), f"{run.unit}, of {count(run.characters)}"),
        ("one sample of each window reveals", share(expected_rate(run.log_pz)), "of the windows, on average"),
    ]
    if limit is not None:
        cards.append(("any number of samples", share(limit), "of the windows have p_z > 0"))
    inner = "".join(
        f'<div class="card"><dt>{name}</dt><dd>{value}<small>{small}</small></dd></div>' for name, value, small in cards
    )
    return f'<dl class="numbers">{inner}</dl>'


def runs_table(runs: Sequence[Measurement], names: Sequence[str]) -> str:
    """Runs side by side, one row each."""
    head = ("run", "model", "preset", "scheme", "windows", "coverage", "95 % interval", "at the threshold", "published")
    lines = []
    for run, name in zip(runs, names, strict=True):
        coverages = published.published_coverages(run.book.title, model_name(run)) if model_name(run) else {}
        cells = (
            escaped(model_name(run)),
            escaped(run.book.preset),
            escaped(run.scheme.name),
            count(len(run.log_pz)),
            f"<b>{share(run.coverage)}</b>",
            f"{share(run.coverage_interval.low)} – {share(run.coverage_interval.high)}",
            f"{count(int(run.reached.sum()))} ({share(run.reached_rate)})",
            ", ".join(f"{value:.2f} %" for value in coverages.values()) or "–",
        )
        lines.append(f"<tr><th scope='row'>{escaped(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return _table(head, lines)


def schemes_table(run: Measurement) -> str:
    """The same windows under every scheme of the results, at the same threshold."""
    lines = []
    for scheme in whole_suffix(run.book):
        log_pz = run.book.log_pz(scheme)
        reached = log_pz >= run.log_threshold
        limit = max_extraction_rate(log_pz, top_k=scheme.top_k)
        cells = (
            share(float(covered(run.spans[reached], run.characters).mean())),
            count(int(reached.sum())),
            share(expected_rate(log_pz)),
            "–" if limit is None else share(limit),
        )
        ours = ' class="ours"' if scheme == run.scheme else ""
        lines.append(
            f"<tr{ours}><th scope='row'>{escaped(scheme_words(scheme))}</th>"
            f"{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        )
    return _table(("decoding scheme", "coverage", "windows at the threshold", "one sample", "p_z > 0"), lines)


def published_table(run: Measurement) -> str:
    """Published coverages of the same book, with this run among them; empty if there are none."""
    coverages = published.published_coverages(run.book.title)
    if not coverages:
        return ""
    ours = f"this run ({model_name(run) or run.book.preset})"
    values = sorted([*coverages.items(), (ours, run.coverage * 100)], key=lambda item: -item[1])
    lines = [
        f"<tr{' class=ours' if name == ours else ''}><th scope='row'>{escaped(name)}</th><td>{value:.2f} %</td></tr>"
        for name, value in values
    ]
    differing = []
    if run.book.preset != published.PRESET or run.scheme.name != published.SCHEME:
        differing.append(f"preset {run.book.preset} and scheme {run.scheme.name} here, paper and k40 there")
    if abs(run.threshold / published.THRESHOLD - 1) > 1e-9:
        differing.append(f"threshold {run.threshold:.3g} here, {published.THRESHOLD:g} there")
    if run.cover != "suffix":
        differing.append(f"{run.cover} covers here, suffix there")
    note = f"Not exactly comparable: {'; '.join(differing)}." if differing else "Same settings; editions may differ."
    return (
        f"{_table(('published coverage', 'characters'), lines)}"
        f'<p class="note">{escaped(note)} Published values: arXiv 2505.12546 and its results site.</p>'
    )


def facts(run: Measurement) -> str:
    """The conventions of a run, in words."""
    book = run.book
    rows = [
        ("model", escaped(model_name(run) or "not named")),
        ("preset", escaped(book.preset)),
        ("window", f"{book.prefix_tokens} tokens as prompt, {book.suffix_tokens} scored; {count(len(book))} windows"),
        ("decoding scheme", escaped(f"{run.scheme.name}: {scheme_words(run.scheme)}")),
        ("p_z", "the product of the suffix tokens' probabilities, each given all tokens of the window before it"),
        ("threshold", _threshold(run)),
        ("covered", _covered(run)),
        (
            "interval",
            f"95 %, circular block bootstrap: blocks of {count(run.coverage_interval.block)} {run.unit}, "
            f"{count(run.coverage_interval.resamples)} resamples",
        ),
    ]
    return f'<dl class="facts">{"".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows)}</dl>'


def scheme_words(scheme: Scheme) -> str:
    """A decoding scheme in words."""
    if scheme.top_k == 1:
        return "greedy, the likeliest token"
    among = "the full vocabulary" if scheme.top_k is None else f"the {scheme.top_k} likeliest tokens"
    return f"{among}, temperature {scheme.temperature:g}"


def _covered(run: Measurement) -> str:
    if run.unit == "rows":
        return "rows of the prepared set with p_z at or above the threshold"
    return f"{_COVERS[run.cover]} of every window with p_z at or above the threshold"


def _threshold(run: Measurement) -> str:
    written = probability(run.log_threshold)
    found = run.calibration
    if found is None:
        return f"p_z = {written}"
    low, high = probability(min(found.interval.low, 0.0)), probability(min(found.interval.high, 0.0))
    return (
        f"p_z = {written}, which {share(found.reached)} of {count(found.windows)} control windows reach "
        f"({share(found.asked)} allowed; 95 % interval of the threshold: {low} – {high})"
    )


def _interval(interval: Interval) -> str:
    return f"{share(interval.low)} – {share(interval.high)}"


def _table(head: Sequence[str], lines: Sequence[str]) -> str:
    cells = "".join(f'<th scope="col">{name}</th>' for name in head)
    return f'<table class="wide"><thead><tr>{cells}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
