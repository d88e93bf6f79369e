"""A page that shows a text token by token, each shaded by how much it surprised the model.

The page is one self-contained file. The *surprise* of a token is −log p given those before it, in nats: 0 for one the
model was sure of, ln(vocabulary) for a blind guess. Hovering over a token shows its numbers. Tokens without a score
(the first one of a document) are grey.

Tokens may hold parts of a character (byte-level vocabularies): such tokens are shown as the character they form, with
their surprises added up.
"""

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

STEPS = 10
"""Shades of the scale."""
NATS_A_STEP = 0.8
BARS = 32
_BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredText:
    """A piece of a document.

    Attributes:
        name: of its data set.
        place: where in the set it is, for people.
        ids: int32 `[n]`.
        logprobs: float32 `[n]`, of each token given those before it; NaN where it was not scored.
    """

    name: str
    place: str
    ids: np.ndarray
    logprobs: np.ndarray

    @property
    def scored(self) -> np.ndarray:
        """The log-probabilities of the scored tokens."""
        return self.logprobs[~np.isnan(self.logprobs)]


def pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Iterator[tuple[int, int, str]]:
    """The text of tokens as (first token, end, text): usually one token each.

    The concatenated texts are the text of all tokens.

    Args:
        ids: the tokens.
        decode: tokens to text; incomplete characters become U+FFFD.
    """
    context, first = 0, 0
    for at in range(len(ids)):
        # What a token looks like depends on the one before it (SentencePiece's spaces).
        before = decode(ids[context:first]) if first > context else ""
        whole = decode(ids[context : at + 1])
        last = at + 1 == len(ids)
        if whole.endswith(_BROKEN) and not last and at - first < 8:
            continue
        yield first, at + 1, whole[len(before) :]
        context, first = first, at + 1


def logprob_page(
    texts: Sequence[ScoredText], decode: Callable[[Sequence[int]], str], *, title: str, facts: Mapping[str, str]
) -> str:
    """The page.

    Args:
        texts: what is shown, in order.
        decode: tokens to text.
        title: its heading.
        facts: name → value, at the end.
    """
    scored = np.concatenate([each.scored for each in texts]).astype(np.float64)
    sections = "\n".join(_section(each, decode) for each in texts)
    rows = "".join(f"<tr><th scope='row'>{_escaped(k)}</th><td>{_escaped(v)}</td></tr>" for k, v in facts.items())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="generator" content="levanter">\n<link rel="icon" href="data:,">\n'
        f"<title>{_escaped(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{_escaped(title)}</h1>\n<p class='lead'>The darker a token, the more it surprised the model, "
        "given the tokens before it. Hover over one for its numbers.</p></header>\n"
        f"{_numbers(texts, scored)}\n{_legend()}\n"
        f"<h2>Distribution of surprise</h2>\n<figure class='card'>{_histogram(scored)}</figure>\n"
        f"<h2>The text</h2>\n{sections}\n"
        f"<h2>How it was measured</h2>\n<div class='card scroll'><table>{rows}</table></div>\n"
        "</main>\n</body>\n</html>\n"
    )


def _section(each: ScoredText, decode: Callable[[Sequence[int]], str]) -> str:
    spans = []
    for first, stop, text in pieces(each.ids.tolist(), decode):
        part = each.logprobs[first:stop]
        shown = _escaped(text).replace("\n", "<i>↵</i>\n")
        if np.isnan(part).all():
            spans.append(f"<b title='not scored'>{shown}</b>")
            continue
        logprob = float(np.nansum(part))
        of = f", {stop - first} tokens" if stop - first > 1 else ""
        spans.append(f"<b class=s{shade(logprob)} title='{-logprob:.2f} nats, p {_share(logprob)}{of}'>{shown}</b>")
    mean = -float(each.scored.mean()) if len(each.scored) else math.nan
    return (
        f"<section class='card'><p class='note'>{_escaped(each.name)}, {_escaped(each.place)}: "
        f"{len(each.ids):,} tokens, {mean:.3f} nats per token</p><div class='text'>{''.join(spans)}</div></section>"
    )


def shade(logprob: float) -> int:
    """The step of the scale, 0 for a certain token."""
    return min(STEPS, max(0, int(-logprob / NATS_A_STEP))) if logprob > -math.inf else STEPS


def _share(logprob: float) -> str:
    p = math.exp(min(logprob, 0.0))
    return f"{100 * p:.3g} %" if p >= 1e-4 else f"{p:.1e}"


def _numbers(texts: Sequence[ScoredText], scored: np.ndarray) -> str:
    loss = -float(scored.mean())
    sure, lost = float((scored > math.log(0.5)).mean()), float((scored < math.log(0.01)).mean())
    cells = (
        ("tokens scored", f"{len(scored):,}", f"in {len(texts)} pieces"),
        ("loss", f"{loss:.4f}", "nats per token"),
        ("perplexity", f"{math.exp(loss):,.2f}", ""),
        ("sure", f"{100 * sure:.1f} %", "of tokens have p above one half"),
        ("lost", f"{100 * lost:.1f} %", "of tokens have p below 1 %"),
    )
    return (
        "<dl class='numbers'>"
        + "".join(
            f"<div class='card'><dt>{name}</dt><dd>{value}<small>{what}</small></dd></div>"
            for name, value, what in cells
        )
        + "</dl>"
    )


def _legend() -> str:
    steps = "".join(
        f"<b class=s{n}>{n * NATS_A_STEP:.1f}{' and more' if n == STEPS else ''}</b>" for n in range(STEPS + 1)
    )
    return f"<p class='legend'>nats: {steps} <b>not scored</b></p>"


def _histogram(scored: np.ndarray) -> str:
    """Bars of how many tokens had which surprise, each as wide as half a step of the scale."""
    width, height, wide = 640, 120, NATS_A_STEP / 2
    which = np.minimum((-scored / wide).astype(np.int64).clip(0), BARS - 1)
    counts = np.bincount(which, minlength=BARS)
    bars = []
    for n, count in enumerate(counts.tolist()):
        tall = height * count / max(1, int(counts.max()))
        ends = f"{n * wide:.1f} to {(n + 1) * wide:.1f}" if n + 1 < BARS else f"{n * wide:.1f} and more"
        bars.append(
            f"<rect class=f{shade(-n * wide)} x='{n * width / BARS:.1f}' y='{height - tall:.1f}' "
            f"width='{width / BARS - 2:.1f}' height='{tall:.1f}'><title>{ends} nats: {count:,} tokens</title></rect>"
        )
    ticks = "".join(
        f"<text x='{n * width / BARS:.1f}' y='{height + 16}'>{n * wide:.1f}</text>" for n in range(0, BARS, 4)
    )
    return (
        f"<svg viewBox='0 0 {width} {height + 22}' role='img' aria-label='Tokens by surprise in nats'>"
        f"<line x1='0' y1='{height}' x2='{width}' y2='{height}'/>{''.join(bars)}{ticks}</svg>"
        "<figcaption class='note'>Tokens by surprise, in nats</figcaption>"
    )


def _escaped(text: object) -> str:
    return html.escape(str(text), quote=True)


_LIGHT = (
    "#ffffff",
    "#ebf3fa",
    "#cfe0f1",
    "#afcde8",
    "#8fbbdf",
    "#6da5d3",
    "#4a8fc6",
    "#3577b6",
    "#1f5fa5",
    "#154786",
    "#0b2f66",
)
_DARK = (
    "#151a21",
    "#162537",
    "#16304d",
    "#1b426a",
    "#1f5487",
    "#2d6da8",
    "#3b86c8",
    "#61a2da",
    "#86bdec",
    "#b5d8f6",
    "#e3f2ff",
)


def _scale(shades: Sequence[str], light_from: int, light: str) -> str:
    return "".join(
        f" .s{n} {{ background: {color};{f' color: {light};' if n >= light_from else ''} }} .f{n} {{ fill: {color}; }}"
        for n, color in enumerate(shades)
    )


_STYLE = (
    """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1c2430; --faint: #5b6673;
  --line: #dde2e8; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 20px; margin: 34px 0 10px; }
.lead, .note, dt, small, figcaption { color: var(--faint); }
.note { font-size: 13.5px; margin: 0 0 8px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; margin: 0; }
.card + .card { margin-top: 12px; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 18px 0; }
.numbers .card + .card { margin-top: 0; }
.numbers dt { font-size: 13px; }
.numbers dd { margin: 0; font-size: 25px; font-weight: 600; font-variant-numeric: tabular-nums; }
.numbers small { display: block; font-size: 12.5px; font-weight: 400; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.7 ui-monospace, "DejaVu Sans Mono", monospace; }
.text b, .legend b { font-weight: 400; border-radius: 2px; }
.text b:hover { outline: 2px solid #e08a2c; }
.text b:not([class]), .legend b:not([class]) { color: var(--faint); }
.text i { font-style: normal; opacity: .45; }
.legend b { padding: 1px 7px; border: 1px solid var(--line); font-variant-numeric: tabular-nums; }
svg { width: 100%; max-width: 720px; height: auto; } svg line { stroke: var(--line); }
svg rect { stroke: var(--faint); stroke-width: .5; } svg text { fill: var(--faint); font-size: 11px; }
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: 4px 16px 4px 0; text-align: left; vertical-align: top; }
th { font-weight: 500; color: var(--faint); white-space: nowrap; } td { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
"""
    + _scale(_LIGHT, 6, "#ffffff")
    + "\n@media (prefers-color-scheme: dark) { :root { --page: #0e1116; --card: #151a21; --text: #dfe6ee;"
    " --faint: #94a1b0; --line: #2a323d; }" + _scale(_DARK, 7, "#0b1220") + " }\n"
)
