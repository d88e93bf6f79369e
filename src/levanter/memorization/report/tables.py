"""Tables and lists of a report: main figures, compared runs, decoding schemes, published values, settings."""

from collections.abc import Sequence

from levanter.html.format import exact_percent, integer_text, probability_text
from levanter.html.markup import Content, Html, escaped, table, tag, tiles
from levanter.memorization import published
from levanter.memorization.calibration import Interval
from levanter.memorization.compare import model_name
from levanter.memorization.coverage import covered
from levanter.memorization.discoverability import expected_rate, max_extraction_rate
from levanter.memorization.measurement import Measurement, whole_suffix
from levanter.memorization.results import Scheme

_COVERS = {
    "suffix": "the characters of the suffix",
    "window": "the characters of the full window, prefix included",
    "paper_v1": "from as many characters after the window's start as the prefix has tokens, to its last character",
}


def main_figures(run: Measurement) -> Html:
    """The main figures of one run as tiles."""
    limit = max_extraction_rate(run.log_pz, top_k=run.scheme.top_k)
    entries = [
        ("coverage", exact_percent(run.coverage), f"{_interval(run.coverage_interval)} of all {run.unit}"),
        (
            "windows at the threshold",
            integer_text(int(run.reached.sum())),
            f"of {integer_text(len(run.log_pz))}: {exact_percent(run.reached_rate)}",
        ),
        ("longest covered span", integer_text(run.longest_run), f"{run.unit}, of {integer_text(run.characters)}"),
        (
            "one sample of each window reveals",
            exact_percent(expected_rate(run.log_pz)),
            "of the windows, on average",
        ),
    ]
    if limit is not None:
        entries.append(("any number of samples", exact_percent(limit), "of the windows have p_z > 0"))
    return tiles(entries)


def runs_table(runs: Sequence[Measurement], names: Sequence[str]) -> Html:
    """The runs of a report, one row each."""
    header = ("run", "model", "preset", "scheme", "windows", "coverage", "95 % interval", "at the threshold")
    rows: list[list[Content]] = []
    for run, name in zip(runs, names, strict=True):
        coverages = published.published_coverages(run.book.title, model_name(run)) if model_name(run) else {}
        rows.append(
            [
                name,
                model_name(run),
                run.book.preset,
                run.scheme.name,
                integer_text(len(run.log_pz)),
                tag("b", exact_percent(run.coverage)),
                _interval(run.coverage_interval),
                f"{integer_text(int(run.reached.sum()))} ({exact_percent(run.reached_rate)})",
                ", ".join(f"{value:.2f} %" for value in coverages.values()) or "–",
            ]
        )
    return table((*header, "published"), rows, numbers=range(1, 9))


def schemes_table(run: Measurement) -> Html:
    """The same windows under every decoding scheme of the results, at the same threshold."""
    schemes = whole_suffix(run.book)
    rows: list[list[Content]] = []
    for scheme in schemes:
        log_pz = run.book.log_pz(scheme)
        reached = log_pz >= run.log_threshold
        limit = max_extraction_rate(log_pz, top_k=scheme.top_k)
        rows.append(
            [
                describe_scheme(scheme),
                exact_percent(float(covered(run.spans[reached], run.characters).mean())),
                integer_text(int(reached.sum())),
                exact_percent(expected_rate(log_pz)),
                "–" if limit is None else exact_percent(limit),
            ]
        )
    header = ("decoding scheme", "coverage", "windows at the threshold", "one sample", "p_z > 0")
    marked = next((n for n, scheme in enumerate(schemes) if scheme == run.scheme), None)
    return table(header, rows, numbers=range(1, 5), marked=marked)


def published_table(run: Measurement) -> Html:
    """Published coverages of the same book together with that of this run; empty if none are published."""
    coverages = published.published_coverages(run.book.title)
    if not coverages:
        return Html("")
    run_name = f"this run ({model_name(run) or run.book.preset})"
    # This run is sorted in among the published values, the highest coverage first.
    values = sorted([*coverages.items(), (run_name, run.coverage * 100)], key=lambda item: -item[1])
    marked = next(n for n, (name, _) in enumerate(values) if name == run_name)
    differences = []
    if run.book.preset != published.PRESET or run.scheme.name != published.SCHEME:
        differences.append(f"preset {run.book.preset} and scheme {run.scheme.name} here, paper and k40 there")
    # Relative, because a threshold from a configuration may differ in its last digits.
    if abs(run.threshold / published.THRESHOLD - 1) > 1e-9:
        differences.append(f"threshold {run.threshold:.3g} here, {published.THRESHOLD:g} there")
    if run.cover != "suffix":
        differences.append(f"{run.cover} covers here, suffix there")
    note = (
        f"Not exactly comparable: {'; '.join(differences)}." if differences else "Same settings; editions may differ."
    )
    rows = [(name, f"{value:.2f} %") for name, value in values]
    return escaped(
        [
            table(("published coverage", "characters"), rows, numbers=(1,), marked=marked),
            tag("p", f"{note} Published values: arXiv 2505.12546 and its results site.", class_="note"),
        ]
    )


def facts(run: Measurement) -> Html:
    """The conventions of a run as a list of definitions."""
    book = run.book
    entries = [
        ("model", model_name(run) or "not named"),
        ("preset", book.preset),
        (
            "window",
            f"{book.prefix_tokens} tokens as prompt, {book.suffix_tokens} scored; {integer_text(len(book))} windows",
        ),
        ("decoding scheme", f"{run.scheme.name}: {describe_scheme(run.scheme)}"),
        ("p_z", "the product of the suffix tokens' probabilities, each given all preceding tokens of the window"),
        ("threshold", _threshold(run)),
        ("covered", _covered(run)),
        (
            "interval",
            f"95 %, circular block bootstrap: blocks of {integer_text(run.coverage_interval.block)} {run.unit}, "
            f"{integer_text(run.coverage_interval.resamples)} resamples",
        ),
    ]
    return tag("dl", [[tag("dt", name), tag("dd", value)] for name, value in entries], class_="facts")


def describe_scheme(scheme: Scheme) -> str:
    """A decoding scheme in words."""
    if scheme.top_k == 1:
        return "greedy, the most likely token"
    among = "the full vocabulary" if scheme.top_k is None else f"the {scheme.top_k} likeliest tokens"
    return f"{among}, temperature {scheme.temperature:g}"


def _covered(run: Measurement) -> str:
    if run.unit == "rows":
        return "rows of the prepared set with p_z at or above the threshold"
    return f"{_COVERS[run.cover]} of every window with p_z at or above the threshold"


def _threshold(run: Measurement) -> str:
    threshold, calibration = probability_text(run.log_threshold), run.calibration
    if calibration is None:
        return f"p_z = {threshold}"
    # A calibrated threshold may be just above 1, which is shown as 1.
    low, high = (probability_text(min(end, 0.0)) for end in (calibration.interval.low, calibration.interval.high))
    windows = integer_text(calibration.windows)
    return (
        f"p_z = {threshold}, which {exact_percent(calibration.reached)} of {windows} control windows reach "
        f"({exact_percent(calibration.requested)} allowed; 95 % interval of the threshold: {low} – {high})"
    )


def _interval(interval: Interval) -> str:
    return f"{exact_percent(interval.low)} – {exact_percent(interval.high)}"
