"""Charts as inline SVG: histogram of p_z, (n, p) curves, and a static heat strip for readers without scripts."""

import math

import numpy as np

from levanter.html.charts import Axes, power_of_ten, round_step, separate_labels
from levanter.html.format import exact_percent, integer_text, superscript
from levanter.html.markup import Content, Html, escaped, table
from levanter.memorization.heatmap import columns, shade
from levanter.memorization.measurement import Measurement

STRIP_COLUMNS = 600
_AXES = Axes()
_UNDERFLOW = 76
"""Width of the two bars left of a logarithmic axis: windows with p_z = 0, and with p_z below the lowest edge."""
_LEGEND = 38
"""Width at the right of the curves for their names."""


def histogram_svg(measured: Measurement, name: str) -> Html:
    """Windows by p_z, both axes logarithmic."""
    histogram, axes = measured.histogram, _AXES
    tallest = max(int(histogram.counts.max(initial=0)), histogram.below, histogram.zero)
    # The axis ends at the next power of ten above the tallest bar, with some room for labels.
    top = max(1, math.ceil(math.log10(max(10, tallest * 1.2))))
    low = float(histogram.edges[0])
    plot_left = axes.left_margin + _UNDERFLOW

    def x(log10: float) -> float:
        # log10 p_z from `low` to 0 fills the plot to the right of the underflow bars.
        return plot_left + (log10 - low) / -low * (axes.inner_width - _UNDERFLOW)

    def y(windows: float) -> float:
        # The axis begins a little below 1, so that a single window is a visible bar.
        return axes.top_margin + axes.inner_height * (1 - (math.log10(windows) + 0.15) / (top + 0.15))

    elements = [axes.rule(y(10**e), f"10{superscript(e)}" if e > 1 else str(10**e)) for e in range(top + 1)]
    # With an underflow bar, the tick at the lowest edge would overlap its label, so it is left out.
    elements += [axes.tick(x(e), power_of_ten(e)) for e in range(int(low) + 2 * bool(histogram.below), 1, 2)]
    log10_threshold = measured.log_threshold / math.log(10)
    underflow = (
        (histogram.zero, "p_z = 0", "0"),
        (histogram.below, f"p_z above 0 and below 10^{low:g}", f"&lt; {power_of_ten(int(low))}"),
    )
    for column, (windows, values, label) in enumerate(underflow):
        if windows:
            begin, width = axes.left_margin + column * _UNDERFLOW / 2 + 3, _UNDERFLOW / 2 - 8
            title = f"{integer_text(windows)} windows with {values}"
            elements.append(axes.bar(begin, width, y(windows), css_class="bar underflow", title=title))
            elements.append(axes.tick(begin + width / 2, label))
    for start, stop, windows in zip(histogram.edges[:-1], histogram.edges[1:], histogram.counts, strict=True):
        if windows:
            # The tolerance covers a threshold that is an edge, whose logarithms differ by rounding.
            css_class = "reached" if start >= log10_threshold - 1e-9 else "bar"
            title = f"{integer_text(windows)} windows with p_z from 10^{start:g} to 10^{stop:g}"
            # Gaps of 1.5 units separate the bars.
            begin, width = x(start) + 0.75, x(stop) - x(start) - 1.5
            elements.append(axes.bar(begin, width, y(int(windows)), css_class=css_class, title=title))
    if low <= log10_threshold <= 0:
        at = x(log10_threshold)
        elements.append(
            f'<line class="threshold" x1="{at:.1f}" x2="{at:.1f}" y1="{axes.top_margin:g}" y2="{axes.baseline:g}"/>'
            f'<text class="threshold" x="{at - 5:.1f}" y="{axes.top_margin + 10:g}" text-anchor="end">threshold</text>'
        )
    return axes.svg(elements, title=f"Histogram of p_z: {name}", x_name="p_z of a window", y_name="windows")


def curves_svg(measured: Measurement, name: str) -> Html:
    """The share of windows that are (n, p)-discoverable by n, one line for each p."""
    curve, axes = measured.curve, _AXES
    high = float(curve.rate.max())
    step = round_step(high)
    # The smallest multiple of the step that is not below the highest rate; 1e-9 absorbs rounding.
    top = max(step, math.ceil(high / step - 1e-9) * step)
    log_n = np.log10(curve.n)
    width = axes.inner_width - _LEGEND
    x = axes.left_margin + log_n / log_n[-1] * width
    elements = [
        axes.rule(axes.top_margin + axes.inner_height * (1 - value / top), f"{value * 100:.3g} %")
        for value in np.arange(0, top + step / 2, step)
    ]
    elements += [
        axes.tick(axes.left_margin + e / log_n[-1] * width, power_of_ten(e)) for e in range(0, int(log_n[-1]) + 1, 3)
    ]
    # The names are at the right ends of the lines.
    ends = axes.top_margin + axes.inner_height * (1 - curve.rate[:, -1] / top)
    # Curves that end close together would have overlapping names.
    label_y = separate_labels(ends.tolist(), 13.0, axes.baseline)
    for n, (p, rate) in enumerate(zip(curve.p, curve.rate, strict=True)):
        y = axes.top_margin + axes.inner_height * (1 - rate / top)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        elements.append(f'<polyline class="line p{n}" points="{points}"><title>p = {p:g}</title></polyline>')
        elements.append(f'<text class="end p{n}" x="{x[-1] + 6:.1f}" y="{label_y[n] + 4:.1f}">p = {p:g}</text>')
    return axes.svg(
        elements, title=f"(n, p)-discoverable windows: {name}", x_name="samples n", y_name="windows discovered"
    )


def strip_svg(measured: Measurement, name: str) -> Html:
    """The heat of the entire book as a static strip, for readers without scripts."""
    scale = "log" if measured.reached.any() else "token"
    tokens = measured.scheme.suffix_tokens or measured.book.suffix_tokens
    shaded = shade(measured.heat, log_threshold=measured.log_threshold, scale=scale, tokens=tokens)
    ink = np.rint(columns(shaded, STRIP_COLUMNS) * 10).astype(int)
    # 0 is no ink and 10 full ink; 11 marks a column of which more than half was not scored.
    ink = np.where(columns((~measured.scored).astype(float), STRIP_COLUMNS) > 0.5, 11, ink)
    # Runs of equal ink become one rectangle, which keeps the page small.
    starts = np.flatnonzero(np.diff(ink, prepend=-1))
    widths = np.diff(starts, append=STRIP_COLUMNS)
    bars = "".join(
        _hatched_columns(int(at), int(width))
        if ink[at] > 10
        else f'<rect class="i{ink[at]}" x="{at}" y="0" width="{width}" height="1"/>'
        for at, width in zip(starts, widths, strict=True)
        if ink[at]
    )
    return Html(
        f'<svg class="still" viewBox="0 0 {STRIP_COLUMNS} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="Heat strip: {escaped(name)}">{bars}</svg>'
    )


def _hatched_columns(start: int, width: int) -> str:
    """Columns that were not scored, hatched: a line every fourth column."""
    # Lines rather than an SVG pattern, which has to be referenced by URL: the page must not contain any.
    lines = "".join(f"M{at} 0h1v1h-1z" for at in range(start, start + width, 4))
    return f'<path class="unscored" d="{lines}"><title>not scored</title></path>'


def histogram_table(measured: Measurement) -> Html:
    """The histogram's numbers as a table."""
    histogram = measured.histogram
    rows = [("p_z = 0", histogram.zero), (f"0 … 10^{histogram.edges[0]:g}", histogram.below)]
    rows += [
        (f"10^{start:g} … 10^{stop:g}", int(windows))
        for start, stop, windows in zip(histogram.edges[:-1], histogram.edges[1:], histogram.counts, strict=True)
        if windows
    ]
    return table(("p_z", "windows"), [(name, integer_text(windows)) for name, windows in rows], numbers=(1,))


def curves_table(measured: Measurement) -> Html:
    """The curves' numbers as a table, every sixth n."""
    curve = measured.curve
    rows: list[list[Content]] = [
        [
            integer_text(curve.n[n]) if curve.n[n] < 1e7 else f"{curve.n[n]:.1e}",
            *(exact_percent(rate[n]) for rate in curve.rate),
        ]
        for n in range(0, len(curve.n), 6)
    ]
    return table(("n", *(f"p = {p:g}" for p in curve.p)), rows, numbers=range(1, len(curve.p) + 1))
