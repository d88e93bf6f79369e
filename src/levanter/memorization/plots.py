"""Pictures of a measurement as PNG: heat map, histogram of p_z, (n, p) curves.

Drawn off screen, without the global state of plotting libraries, and without dates or versions in the file:
the same measurement gives the same bytes under the same version of the plotting library.
"""

import io
import math
import warnings

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from levanter.memorization.heatmap import Scale, columns, shade
from levanter.memorization.measurement import Measurement
from levanter.memorization.passages import runs

INK = ("#ffffff", "#cfe0f1", "#8fbbdf", "#4a8fc6", "#1f5fa5", "#0b2f66")
"""The colours from p_z below the threshold to p_z = 1."""
_STRIP_PIXELS = 1500
_TEXT, _FAINT = "#1c2430", "#6b7684"


def heatmap_png(measured: Measurement, *, scale: Scale = "log") -> bytes:
    """The book as one strip from first character to last; a column is the mean ink of its characters."""
    # `Figure` instead of pyplot, which keeps global state and is not thread-safe.
    figure = Figure(figsize=(16, 2.6), dpi=100)
    axes = figure.subplots()
    if scale == "log" and not measured.reached.any():
        # Ink relative to the threshold would be white throughout.
        scale = "token"
    tokens = measured.scheme.suffix_tokens or measured.book.suffix_tokens
    shaded = shade(measured.heat, log_threshold=measured.log_threshold, scale=scale, tokens=tokens)
    # One mean per pixel column: matplotlib would otherwise pick single characters and lose narrow passages.
    ink = columns(shaded, _STRIP_PIXELS)
    axes.imshow(
        ink[None, :],
        aspect="auto",
        cmap=LinearSegmentedColormap.from_list("ink", INK),
        vmin=0,
        vmax=1,
        interpolation="nearest",
        extent=(0, measured.characters, 0, 1),
    )
    # Hatched: white alone would read as "not memorized".
    for start, stop in runs(~measured.scored):
        axes.axvspan(start, stop, facecolor="#ffffff", edgecolor="#b4bcc8", hatch="////", linewidth=0)
    axes.set_yticks([])
    axes.set_xlabel(f"{measured.unit} of the book", color=_TEXT)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_title(
        f"{measured.book.title}: {measured.coverage:.2%} of {measured.characters:,} {measured.unit} covered "
        f"(p_z ≥ {measured.threshold:.3g}, scheme {measured.scheme.name}, preset {measured.book.preset})"
        + ("; ink is log p per token" if scale == "token" else "")
        + ("" if measured.scored.all() else f"; hatched: not scored ({1 - measured.scored.mean():.2%})"),
        loc="left",
        fontsize=11,
        color=_TEXT,
        # Titles may contain `$`, which matplotlib would parse as a formula.
        parse_math=False,
    )
    return _png(figure)


def histogram_png(measured: Measurement) -> bytes:
    """Windows by p_z, both axes logarithmic; the text above the bars counts the windows below the lowest bin."""
    counted = measured.histogram
    figure = Figure(figsize=(8, 4.6), dpi=100)
    axes = figure.subplots()
    log10_threshold = measured.log_threshold / math.log(10)
    # Two bars on the left for what a logarithm cannot show: p_z = 0, and p_z below the lowest edge.
    edges = np.concatenate([counted.edges[0] - np.array([1.5, 0.75]), counted.edges])
    counts = np.concatenate([[counted.zero, counted.below], counted.counts])
    names = {edges[0] + 0.3: "0", edges[1] + 0.3: f"$<10^{{{counted.edges[0]:g}}}$"}
    ticks = [float(e) for e in range(int(counted.edges[0]) + 2, 1, 2)]
    axes.set_xticks([*names, *ticks], [*names.values(), *(f"$10^{{{e:g}}}$" for e in ticks)])
    axes.bar(
        edges[:-1],
        counts,
        width=np.concatenate([[0.6, 0.6], np.diff(counted.edges)]),
        align="edge",
        # Bars at or above the threshold are dark; the tolerance covers a threshold that is an edge.
        color=np.where(edges[:-1] >= log10_threshold - 1e-9, INK[4], INK[2]).tolist(),
        edgecolor="white",
        linewidth=0.6,
        # A logarithmic axis needs at least one positive count.
        log=bool(counts.any()),
    )
    if counts.any():
        # Room below 1, so that a single window is a visible bar, and above the bars for the text.
        axes.set_ylim(0.7, 8.0 * counts.max())
    if edges[0] <= log10_threshold <= edges[-1]:
        axes.axvline(log10_threshold, color=_FAINT, linestyle="--", linewidth=1)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xlabel("$p_z$", color=_TEXT)
    axes.set_ylabel("windows", color=_TEXT)
    axes.set_title(measured.book.title, loc="left", fontsize=11, color=_TEXT, parse_math=False)
    axes.text(
        0.5,
        0.97,
        f"{int(measured.reached.sum()):,} of {len(measured.log_pz):,} windows reach p_z = {measured.threshold:.3g}\n"
        f"{counted.below:,} below the lowest bin, {counted.zero:,} with p_z = 0",
        transform=axes.transAxes,
        va="top",
        ha="center",
        fontsize=9,
        color=_FAINT,
    )
    return _png(figure)


def curves_png(measured: Measurement) -> bytes:
    """The share of windows that are (n, p)-discoverable over n, a line for each p."""
    curve = measured.curve
    figure = Figure(figsize=(8, 4.6), dpi=100)
    axes = figure.subplots()
    shades = LinearSegmentedColormap.from_list("ink", INK[2:])(np.linspace(0, 1, len(curve.p)))
    for p, rate, color in zip(curve.p, curve.rate, shades, strict=True):
        axes.plot(curve.n, rate, color=color, linewidth=1.8, label=f"p = {p:g}")
    axes.set_xscale("log", base=10)
    axes.set_xlim(curve.n.min(), curve.n.max())
    axes.set_ylim(0, None if curve.rate.max() > 0 else 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("samples n", color=_TEXT)
    axes.set_ylabel("(n, p)-discoverable windows", color=_TEXT)
    axes.set_title(measured.book.title, loc="left", fontsize=11, color=_TEXT, parse_math=False)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    return _png(figure)


def _png(figure: Figure) -> bytes:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(bool(axes.images))
        axes.tick_params(colors=_FAINT, labelsize=9)
        for side in axes.spines.values():
            side.set_color("#c8ced6")
    FigureCanvasAgg(figure)
    out = io.BytesIO()
    with warnings.catch_warnings():
        # A title in a script that the font lacks is drawn as boxes; the other files have it in full.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.tight_layout()
        # No library name or version, no date.
        figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()
