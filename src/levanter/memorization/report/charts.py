"""Charts as inline SVG: histogram of p_z, (n, p) curves, and a strip for readers without scripts.

Colours are CSS variables of the page, so light and dark follow the reader. Every bar and line has a `title`, which
browsers show on hover and screen readers read; the numbers themselves are in a table beside each chart.
"""

import math
from itertools import pairwise

import numpy as np

from levanter.memorization.heatmap import columns, shade
from levanter.memorization.measurement import Measurement
from levanter.memorization.report.words import count, escaped, share, superscript

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 16, 44
_INNER_WIDTH, _INNER_HEIGHT = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
STRIP_COLUMNS = 600
_UNDERFLOW = 76
"""Room on the left of a histogram for what a logarithm cannot show: p_z = 0, and p_z below the lowest edge."""


def histogram_svg(measured: Measurement, name: str) -> str:
    """Windows by p_z, both axes logarithmic."""
    found = measured.histogram
    tallest = max(int(found.counts.max(initial=0)), found.below, found.zero)
    top = max(1, math.ceil(math.log10(max(10, tallest * 1.2))))
    low = float(found.edges[0])
    left = _LEFT + _UNDERFLOW

    def x(log10: float) -> float:
        return left + (log10 - low) / -low * (_INNER_WIDTH - _UNDERFLOW)

    def y(windows: float) -> float:
        # A little room below 1, so that a single window is a visible bar.
        return _TOP + _INNER_HEIGHT * (1 - (math.log10(windows) + 0.15) / (top + 0.15))

    parts = [_rule(y(10**e), f"10{superscript(e)}" if e > 1 else str(10**e)) for e in range(top + 1)]
    parts += [_tick(x(e), _power(e)) for e in range(int(low) + 2 * bool(found.below), 1, 2)]
    log10_threshold = measured.log_threshold / math.log(10)
    base = _TOP + _INNER_HEIGHT
    for at, windows, said in ((0, found.zero, "p_z = 0"), (1, found.below, f"p_z above 0 and below 10^{low:g}")):
        if windows:
            begin, width, height = _LEFT + at * _UNDERFLOW / 2 + 3, _UNDERFLOW / 2 - 8, y(windows)
            parts.append(
                f'<rect class="bar underflow" x="{begin:.1f}" y="{height:.1f}" width="{width:.1f}" '
                f'height="{base - height:.1f}"><title>{count(windows)} windows with {said}</title></rect>'
            )
            parts.append(_tick(begin + width / 2, ("0", f"&lt; {_power(int(low))}")[at]))
    for start, stop, windows in zip(found.edges[:-1], found.edges[1:], found.counts, strict=True):
        if windows:
            kind = "reached" if start >= log10_threshold - 1e-9 else "bar"
            height = y(int(windows))
            said = f"{count(windows)} windows with p_z from 10^{start:g} to 10^{stop:g}"
            parts.append(
                f'<rect class="{kind}" x="{x(start) + 0.75:.1f}" y="{height:.1f}" '
                f'width="{x(stop) - x(start) - 1.5:.1f}" height="{base - height:.1f}"><title>{said}</title></rect>'
            )
    if low <= log10_threshold <= 0:
        at = x(log10_threshold)
        parts.append(f'<line class="threshold" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{base}"/>')
        parts.append(f'<text class="threshold" x="{at - 5:.1f}" y="{_TOP + 10}" text-anchor="end">threshold</text>')
    return _svg(parts, f"Histogram of p_z: {name}", "p_z of a window", "windows")


def curves_svg(measured: Measurement, name: str) -> str:
    """The share of windows that are (n, p)-discoverable over n, a line for each p."""
    curve = measured.curve
    high = float(curve.rate.max())
    step = _round_step(high)
    top = max(step, math.ceil(high / step - 1e-9) * step)
    log_n = np.log10(curve.n)
    x = _LEFT + log_n / log_n[-1] * (_INNER_WIDTH - 52)
    parts = [
        _rule(_TOP + _INNER_HEIGHT * (1 - value / top), _percent(value)) for value in np.arange(0, top + step / 2, step)
    ]
    parts += [_tick(_LEFT + e / log_n[-1] * (_INNER_WIDTH - 52), _power(e)) for e in range(0, int(log_n[-1]) + 1, 3)]
    # Names are at the lines' ends, pushed apart if the ends are close.
    ends = _TOP + _INNER_HEIGHT * (1 - curve.rate[:, -1] / top)
    label_at = _spread(ends, 13.0, _TOP + _INNER_HEIGHT)
    for n, (p, rate) in enumerate(zip(curve.p, curve.rate, strict=True)):
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, _TOP + _INNER_HEIGHT * (1 - rate / top), strict=True))
        parts.append(f'<polyline class="line p{n}" points="{points}"><title>p = {p:g}</title></polyline>')
        parts.append(f'<text class="end p{n}" x="{x[-1] + 6:.1f}" y="{label_at[n] + 4:.1f}">p = {p:g}</text>')
    return _svg(parts, f"(n, p)-discoverable windows: {name}", "samples n", "windows discovered")


def strip_svg(measured: Measurement, name: str) -> str:
    """The entire book as a static strip, for readers without scripts."""
    scale = "log" if measured.reached.any() else "token"
    tokens = measured.scheme.suffix_tokens or measured.book.suffix_tokens
    shaded = shade(measured.heat, log_threshold=measured.log_threshold, scale=scale, tokens=tokens)
    ink = np.rint(columns(shaded, STRIP_COLUMNS) * 10).astype(int)
    # 11 means not scored: more than half of a column.
    ink = np.where(columns((~measured.scored).astype(float), STRIP_COLUMNS) > 0.5, 11, ink)
    starts = np.flatnonzero(np.diff(ink, prepend=-1))
    widths = np.diff(starts, append=STRIP_COLUMNS)
    bars = "".join(
        _hatch(int(at), int(width))
        if ink[at] > 10
        else f'<rect class="i{ink[at]}" x="{at}" y="0" width="{width}" height="1"/>'
        for at, width in zip(starts, widths, strict=True)
        if ink[at]
    )
    return (
        f'<svg class="still" viewBox="0 0 {STRIP_COLUMNS} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="Heat strip: {escaped(name)}">{bars}</svg>'
    )


def _hatch(start: int, width: int) -> str:
    """A stretch that was not scored: lines, every fourth column. (An SVG pattern would be referenced by URL.)"""
    lines = "".join(f"M{at} 0h1v1h-1z" for at in range(start, start + width, 4))
    return f'<path class="unscored" d="{lines}"><title>not scored</title></path>'


def histogram_table(measured: Measurement) -> str:
    """The histogram's numbers as a table."""
    found = measured.histogram
    rows = [("p_z = 0", found.zero), (f"0 … 10^{found.edges[0]:g}", found.below)]
    rows += [
        (f"10^{start:g} … 10^{stop:g}", int(windows))
        for start, stop, windows in zip(found.edges[:-1], found.edges[1:], found.counts, strict=True)
        if windows
    ]
    body = "".join(f"<tr><th scope='row'>{name}</th><td>{count(windows)}</td></tr>" for name, windows in rows)
    head = "<th scope='col'>p_z</th><th scope='col'>windows</th>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def curves_table(measured: Measurement) -> str:
    """The curves' numbers as a table, every sixth n."""
    curve = measured.curve
    shown = [n for n in range(0, len(curve.n), 6)]
    head = "".join(f"<th scope='col'>p = {p:g}</th>" for p in curve.p)
    body = "".join(
        f"<tr><th scope='row'>{count(curve.n[n]) if curve.n[n] < 1e7 else f'{curve.n[n]:.1e}'}</th>"
        + "".join(f"<td>{share(rate[n])}</td>" for rate in curve.rate)
        + "</tr>"
        for n in shown
    )
    return f"<table><thead><tr><th scope='col'>n</th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _svg(parts: list[str], title: str, x_name: str, y_name: str) -> str:
    base = _TOP + _INNER_HEIGHT
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(title)}">'
        + "".join(parts)
        + f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>'
        + f'<text class="name" x="{_LEFT + _INNER_WIDTH / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{x_name}</text>'
        + f'<text class="name" transform="rotate(-90)" x="{-(_TOP + _INNER_HEIGHT / 2):.0f}" y="13" '
        f'text-anchor="middle">{y_name}</text></svg>'
    )


def _rule(y: float, label: str) -> str:
    return (
        f'<line class="rule" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    )


def _tick(x: float, label: str) -> str:
    return f'<text x="{x:.1f}" y="{_TOP + _INNER_HEIGHT + 17}" text-anchor="middle">{label}</text>'


def _power(exponent: int) -> str:
    return "1" if exponent == 0 else f"10{superscript(exponent)}"


def _percent(value: float) -> str:
    return f"{value * 100:.3g} %"


def _round_step(high: float) -> float:
    """A step of 1, 2, 2.5 or 5 times a power of ten that divides 0 … high into four to eight."""
    if high <= 0:
        return 0.25
    power = 10.0 ** math.floor(math.log10(high / 4))
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m * 8 >= high and power * m * 5 >= high)


def _spread(at: np.ndarray, gap: float, lowest: float) -> list[float]:
    """Positions at least `gap` apart, as near as possible to the wanted ones and none below `lowest`."""
    found = np.array(at, dtype=float)
    order = np.argsort(found, kind="stable")
    for before, after in pairwise(order):
        found[after] = max(found[after], found[before] + gap)
    limit = lowest
    for index in order[::-1]:
        found[index] = min(found[index], limit)
        limit = found[index] - gap
    return found.tolist()
