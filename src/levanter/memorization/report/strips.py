"""The heat strips of one text: a row per run over the entire book and over the part in view, and the text below.

The page's script draws them from the heat of every character, encoded in a few bytes. Heat has *levels*: 1 … 100 from
the lightest ink at the threshold to p_z = 1, uniform in log p_z; 101 … 200 below the threshold, uniform in log p per
token from just below it to `FLOOR`; 0 for anything less likely; 255 for characters that no window covers, about which
nothing is known. Neighbors mostly have the same level, so levels are run-length encoded: the run's length as a varint
(seven bits per byte, low ones first, the high bit set on all but the last) and one byte of level, all in base64.
"""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from levanter.html.format import exact_percent, probability_text
from levanter.html.markup import Html, escaped
from levanter.memorization.heatmap import FLOOR, LIGHTEST, shade
from levanter.memorization.measurement import Measurement
from levanter.memorization.report.charts import strip_svg

LEVELS, UNSCORED = 100, 255

_KEYS = "Heat strip. Arrow keys left and right move, up and down zoom, 0 shows the whole book."
_BUTTONS = (
    ("in", "Zoom in", "+"),
    ("out", "Zoom out", "−"),
    ("left", "Move left", "←"),
    ("right", "Move right", "→"),
    ("all", "Show the whole book", "Whole book"),
)


def strips(runs: Sequence[Measurement], names: Sequence[str], *, has_text: bool) -> Html:
    """The card with tools, strips, legend and the text in view.

    Args:
        runs: over one text.
        names: of the runs.
        has_text: whether the text is in the page.
    """
    several = len(runs) > 1
    # If no window reaches the threshold, ink relative to it is white throughout: ink per token is selected instead.
    faint = not any(run.reached.any() for run in runs)
    link = '<svg class="link" viewBox="0 0 100 16" preserveAspectRatio="none" aria-hidden="true"><path/></svg>'
    reader = (
        '<div class="reader script-only" tabindex="0" role="region" aria-label="The text in view"></div>'
        if has_text
        else '<p class="note">This report does not contain the text.</p>'
    )
    return Html(
        f'<div class="card strips{" several" if several else ""}">{_tools(names, has_text=has_text, faint=faint)}'
        f'<div class="navigator script-only" tabindex="0" role="group" aria-label="{_KEYS}">{_stack(names, "whole")}'
        f'{link}{_stack(names, "zoomed")}<canvas class="scale" aria-hidden="true"></canvas></div>'
        f"<noscript>{_static_strips(runs, names)}</noscript>{_legend(runs)}"
        '<p class="note script-only">Every character has the ink of the most likely suffix that spans it. Drag over '
        "the upper strip to zoom, drag the lower one to move; with the strips in focus, arrow keys move and zoom.</p>"
        f"{reader}</div>"
    )


def _tools(names: Sequence[str], *, has_text: bool, faint: bool) -> str:
    buttons = "".join(
        f'<button type="button" data-do="{do}" aria-label="{label}">{symbol}</button>' for do, label, symbol in _BUTTONS
    )
    by_token = " selected" if faint else ""
    choices = (
        '<label>ink <select class="ink"><option value="log">logarithmic</option>'
        f'<option value="linear">linear</option><option value="token"{by_token}>log p per token</option>'
        "</select></label>"
    )
    if len(names) > 1:
        options = [f'<option value="{n}">{escaped(name)}</option>' for n, name in enumerate(names)]
        second = [option.replace('value="1"', 'value="1" selected') for option in options]
        choices += (
            f'<label>difference <select class="first" aria-label="Difference: first run">{"".join(options)}</select>'
            f'</label><label>minus <select class="second" aria-label="Difference: second run">{"".join(second)}'
            "</select></label>"
        )
        if has_text:
            choices += f'<label>text by <select class="run">{"".join(options)}</select></label>'
    return (
        f'<div class="tools script-only">{buttons}{choices}<span class="where"></span>'
        '<span class="announcement" role="status"></span></div>'
    )


def _stack(names: Sequence[str], kind: str) -> str:
    several = len(names) > 1
    rows = [
        f'<div class="row"><span class="label">{escaped(name) if several else ""}</span>'
        f'<canvas class="strip" data-run="{n}" aria-hidden="true"></canvas></div>'
        for n, name in enumerate(names)
    ]
    if several:
        rows.append(
            '<div class="row"><span class="label">difference</span>'
            '<canvas class="difference" aria-hidden="true"></canvas></div>'
        )
    return f'<div class="{kind}">{"".join(rows)}</div>'


def _static_strips(runs: Sequence[Measurement], names: Sequence[str]) -> str:
    several = len(runs) > 1
    return "".join(
        f"<p>{escaped(name) if several else ''}</p>{strip_svg(run, name)}"
        for run, name in zip(runs, names, strict=True)
    )


def _legend(runs: Sequence[Measurement]) -> str:
    thresholds = {run.log_threshold for run in runs}
    below = (
        f"p_z below {probability_text(runs[0].log_threshold)}" if len(thresholds) == 1 else "p_z below the threshold"
    )
    unscored = [run.characters - int(run.scored.sum()) for run in runs]
    hatched = ""
    if any(unscored):
        shares = dict.fromkeys(exact_percent(n / run.characters) for n, run in zip(unscored, runs, strict=True))
        hatched = f'<b class="unscored"></b><span>not scored: {", ".join(shares)} of the {runs[0].unit}</span>'
    return f'<div class="legend"><span>{below}</span><i></i><span>p_z = 1</span>{hatched}</div>'


def levels(measured: Measurement) -> np.ndarray:
    """The level of every character: uint8 `[characters]`."""
    # Inverts the logarithmic scale: `LIGHTEST` becomes level 1, full ink level 100.
    ink = shade(measured.heat, log_threshold=measured.log_threshold)
    above = 1 + np.rint((ink - LIGHTEST) / (1 - LIGHTEST) * (LEVELS - 1))
    tokens = measured.scheme.suffix_tokens or measured.book.suffix_tokens
    # The threshold per token; a calibration may give log τ above 0, where no level is.
    top, log_p = min(measured.log_threshold / tokens, 0.0), measured.heat / tokens
    # If the threshold itself is below the floor, no level lies between them.
    depth = (log_p - top) / (FLOOR - top) if top > FLOOR else np.full_like(log_p, np.inf)
    below = np.where(depth <= 1, LEVELS + 1 + np.rint(np.clip(depth, 0, 1) * (LEVELS - 1)), 0)
    # Unscored characters first: they have no heat, which is not the same as unlikely.
    return np.where(measured.scored, np.where(ink > 0, above, below), UNSCORED).astype(np.uint8)


def encode_levels(levels: np.ndarray) -> str:
    """Levels as runs in base64, see the module's docstring."""
    # `^ 1` makes the value before the first one differ from it, so that the first run has a start as well.
    starts = np.flatnonzero(np.diff(levels, prepend=levels[:1] ^ 1))
    lengths = np.diff(starts, append=levels.size)
    out = bytearray()
    for length, level in zip(lengths.tolist(), levels[starts].tolist(), strict=True):
        # A varint: seven bits per byte, the low ones first.
        while length > 0x7F:
            out.append(0x80 | length & 0x7F)
            length >>= 7
        # The last byte of a varint has its high bit clear.
        out.append(length)
        out.append(level)
    return base64.b64encode(bytes(out)).decode("ascii")


def book_payload(runs: Sequence[Measurement], names: Sequence[str], *, with_text: bool) -> dict[str, Any]:
    """The script's data for one text and the runs over it."""
    text = next((run.book.text for run in runs if run.book.text is not None), None) if with_text else None
    return {
        "characters": runs[0].characters,
        "unit": runs[0].unit,
        "text": text,
        "runs": [
            {
                "name": name,
                # As in `levels`: the script needs the threshold to turn levels back into log p_z.
                "logThreshold": min(run.log_threshold, 0.0),
                "tokens": run.scheme.suffix_tokens or run.book.suffix_tokens,
                "levels": encode_levels(levels(run)),
            }
            for name, run in zip(names, runs, strict=True)
        ],
    }
