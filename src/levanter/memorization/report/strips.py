"""The strips of one text: a row per run over the entire book and over the part in view, and the text below."""

from collections.abc import Sequence

from levanter.memorization.measurement import Measurement
from levanter.memorization.report.charts import strip_svg
from levanter.memorization.report.words import escaped, probability, share

_KEYS = "Heat strip. Arrow keys left and right move, up and down zoom, 0 shows the whole book."
_BUTTONS = (
    ("in", "Zoom in", "+"),
    ("out", "Zoom out", "−"),
    ("left", "Move left", "←"),
    ("right", "Move right", "→"),
    ("all", "Show the whole book", "Whole book"),
)


def strips(runs: Sequence[Measurement], names: Sequence[str], *, has_text: bool) -> str:
    """The card with tools, strips, legend and the text in view.

    Args:
        runs: over one text.
        names: of the runs.
        has_text: whether the text is in the page.
    """
    several = len(runs) > 1
    # If nothing reaches the threshold, ink relative to it is white throughout.
    faint = not any(run.reached.any() for run in runs)
    link = '<svg class="link" viewBox="0 0 100 16" preserveAspectRatio="none" aria-hidden="true"><path/></svg>'
    reader = (
        '<div class="reader script-only" tabindex="0" role="region" aria-label="The text in view"></div>'
        if has_text
        else '<p class="note">The text is left out of this report.</p>'
    )
    return (
        f'<div class="card strips{" several" if several else ""}">{_tools(names, has_text=has_text, faint=faint)}'
        f'<div class="navigator script-only" tabindex="0" role="group" aria-label="{_KEYS}">{_stack(names, "whole")}'
        f'{link}{_stack(names, "zoomed")}<canvas class="scale" aria-hidden="true"></canvas></div>'
        f"<noscript>{_still(runs, names)}</noscript>{_legend(runs)}"
        '<p class="note script-only">Every character has the ink of the likeliest suffix that spans it. Drag over the '
        "upper strip to zoom, drag the lower one to move; with the strips in focus, arrow keys move and zoom.</p>"
        f"{reader}</div>"
    )


def _tools(names: Sequence[str], *, has_text: bool, faint: bool) -> str:
    buttons = "".join(
        f'<button type="button" data-do="{do}" aria-label="{label}">{sign}</button>' for do, label, sign in _BUTTONS
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
        '<span class="said" role="status"></span></div>'
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


def _still(runs: Sequence[Measurement], names: Sequence[str]) -> str:
    several = len(runs) > 1
    return "".join(
        f"<p>{escaped(name) if several else ''}</p>{strip_svg(run, name)}"
        for run, name in zip(runs, names, strict=True)
    )


def _legend(runs: Sequence[Measurement]) -> str:
    thresholds = {run.log_threshold for run in runs}
    below = f"p_z below {probability(runs[0].log_threshold)}" if len(thresholds) == 1 else "p_z below the threshold"
    unknown = [run.characters - int(run.scored.sum()) for run in runs]
    hatched = ""
    if any(unknown):
        shares = dict.fromkeys(share(n / run.characters) for n, run in zip(unknown, runs, strict=True))
        hatched = f'<b class="unscored"></b><span>not scored: {", ".join(shares)} of the {runs[0].unit}</span>'
    return f'<div class="legend"><span>{below}</span><i></i><span>p_z = 1</span>{hatched}</div>'
