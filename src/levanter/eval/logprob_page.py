"""A page that shows a text token by token, each shaded by its surprise.

The *surprise* of a token is −log p given the tokens before it, in nats: 0 for a certain token, ln(vocabulary) for a
uniform guess. Hovering over a token shows its numbers. Tokens without a score (the first one of a document) are gray.

In byte-level vocabularies a token may be part of a character: such tokens are shown as the character that they form,
with the sum of their surprises.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from levanter.data.tokenizer import Tokenizer
from levanter.html.charts import Axes, round_step
from levanter.html.markup import Content, Html, escaped, tag, tiles
from levanter.html.page import document, style_sheet

STEPS = 10
"""Shades of the scale."""
NATS_A_STEP = 0.8
BARS = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredText:
    """A piece of a document.

    Attributes:
        name: name of its data set.
        place: its position in the data set, for display.
        ids: int32 `[n]`.
        logprobs: float32 `[n]`, log-probability of each token given those before it; NaN if it was not scored.
    """

    name: str
    place: str
    ids: np.ndarray
    logprobs: np.ndarray

    @property
    def scored(self) -> np.ndarray:
        """The log-probabilities of the scored tokens."""
        return self.logprobs[~np.isnan(self.logprobs)]


def pieces(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[int, int, str]]:
    """The text of tokens as (first token, end, text): usually one token each.

    The concatenated texts are the text that the tokenizer gives for all tokens together.

    Args:
        ids: the tokens.
        tokenizer: of the tokens; incomplete characters become U+FFFD.
    """
    stream, lengths, first = tokenizer.stream(special=True), tokenizer.byte_lengths(), 0
    for at, id in enumerate(ids):
        text = stream.push(id)
        # The text of this token, and of those before it whose text was not final.
        if text:
            yield from _characters(first, [int(lengths[i]) for i in ids[first : at + 1]], text)
            first = at + 1
    if first < len(ids):
        yield first, len(ids), stream.finish()


def _characters(first: int, lengths: Sequence[int], text: str) -> Iterator[tuple[int, int, str]]:
    """The pieces of a text of several tokens, each of whole characters; one piece if their bytes are not the text's."""
    content = text.encode(errors="surrogatepass")
    if len(lengths) == 1 or sum(lengths) != len(content):
        yield first, first + len(lengths), text
        return
    begin = end = start = 0
    for n, length in enumerate(lengths):
        end += length
        # A byte of the form 10xxxxxx continues a character.
        if end == len(content) or content[end] & 0xC0 != 0x80:
            yield first + start, first + n + 1, content[begin:end].decode(errors="surrogatepass")
            begin, start = end, n + 1


def logprob_page(texts: Sequence[ScoredText], tokenizer: Tokenizer, *, title: str, facts: Mapping[str, str]) -> str:
    """The page.

    Args:
        texts: the texts that are shown, in order.
        tokenizer: of the model.
        title: heading of the page.
        facts: name → value, shown as a table at the end.
    """
    scored = np.concatenate([text.scored for text in texts]).astype(np.float64)
    lead = (
        "The darker a token, the more it surprised the model, given the tokens before it. "
        "Hover over one for its numbers."
    )
    facts_table = tag(
        "table", [tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in facts.items()]
    )
    body: list[Content] = [
        tag("header", tag("h1", title), tag("p", lead, class_="lead")),
        _main_figures(texts, scored),
        _legend(),
        tag("h2", "Distribution of surprise"),
        tag(
            "figure", _histogram(scored), tag("figcaption", "Tokens by surprise, in nats", class_="note"), class_="card"
        ),
        tag("h2", "The text"),
        [_section(text, tokenizer) for text in texts],
        tag("h2", "Settings"),
        tag("div", facts_table, class_="card scroll"),
    ]
    return document(title=title, style="\n" + style_sheet(_STYLE), body=tag("main", [[part, "\n"] for part in body]))


def _section(scored_text: ScoredText, tokenizer: Tokenizer) -> Html:
    spans: list[Content] = []
    for first, stop, text in pieces(scored_text.ids.tolist(), tokenizer):
        logprobs = scored_text.logprobs[first:stop]
        # Escaped before the symbol is inserted, so that the text cannot bring markup of its own.
        content = Html(escaped(text).replace("\n", "<i>↵</i>\n"))
        if np.isnan(logprobs).all():
            spans.append(tag("b", content, title="not scored"))
            continue
        # A piece of several tokens may contain one that was not scored, the first one of a document.
        logprob = float(np.nansum(logprobs))
        tokens = f", {stop - first} tokens" if stop - first > 1 else ""
        hint = f"{-logprob:.2f} nats, p {_percent(logprob)}{tokens}"
        spans.append(tag("b", content, class_=f"s{shade(logprob)}", title=hint))
    mean = -float(scored_text.scored.mean()) if len(scored_text.scored) else math.nan
    note = f"{scored_text.name}, {scored_text.place}: {len(scored_text.ids):,} tokens, {mean:.3f} nats per token"
    return tag("section", tag("p", note, class_="note"), tag("div", spans, class_="text"), class_="card")


def shade(logprob: float) -> int:
    """The step of the scale, 0 for a certain token."""
    # A probability of 0 has infinite surprise, which has no integer.
    return min(STEPS, max(0, int(-logprob / NATS_A_STEP))) if logprob > -math.inf else STEPS


def _percent(logprob: float) -> str:
    # Rounding may give a log-probability slightly above 0.
    p = math.exp(min(logprob, 0.0))
    return f"{100 * p:.3g} %" if p >= 1e-4 else f"{p:.1e}"


def _main_figures(texts: Sequence[ScoredText], scored: np.ndarray) -> Html:
    loss = -float(scored.mean())
    likely, unlikely = float((scored > math.log(0.5)).mean()), float((scored < math.log(0.01)).mean())
    return tiles(
        (
            ("tokens scored", f"{len(scored):,}", f"in {len(texts)} pieces"),
            ("loss", f"{loss:.4f}", "nats per token"),
            ("perplexity", f"{math.exp(loss):,.2f}", ""),
            ("likely", f"{100 * likely:.1f} %", "of tokens have p above one half"),
            ("unlikely", f"{100 * unlikely:.1f} %", "of tokens have p below 1 %"),
        )
    )


def _legend() -> Html:
    steps = [
        tag("b", f"{n * NATS_A_STEP:.1f}{' and more' if n == STEPS else ''}", class_=f"s{n}") for n in range(STEPS + 1)
    ]
    return tag("p", "nats: ", steps, " ", tag("b", "not scored"), class_="legend")


def _histogram(scored: np.ndarray) -> Html:
    """A histogram of tokens by surprise, with two bars for each step of the scale."""
    bar_nats = NATS_A_STEP / 2
    axes = Axes(height=190)
    # The last bar has all tokens beyond the scale.
    indices = np.minimum((-scored / bar_nats).astype(np.int64).clip(0), BARS - 1)
    counts = np.bincount(indices, minlength=BARS)
    step = round_step(float(counts.max()))
    # The upper end of the axis is a grid line. The small number keeps a count that equals one from getting another
    # line.
    top = max(step, math.ceil(counts.max() / step - 1e-9) * step)
    width = axes.inner_width / BARS
    elements = [
        axes.rule(axes.baseline - axes.inner_height * n * step / top, f"{n * step:,.3g}")
        for n in range(round(top / step) + 1)
    ]
    for n, count in enumerate(counts.tolist()):
        nats = f"{n * bar_nats:.1f} to {(n + 1) * bar_nats:.1f}" if n + 1 < BARS else f"{n * bar_nats:.1f} and more"
        y = axes.baseline - axes.inner_height * count / top
        title = f"{nats} nats: {count:,} tokens"
        elements.append(
            axes.bar(axes.left_margin + n * width, width - 2, y, css_class=f"f{shade(-n * bar_nats)}", title=title)
        )
    elements += [axes.tick(axes.left_margin + n * width, f"{n * bar_nats:.1f}") for n in range(0, BARS, 4)]
    return axes.svg(elements, title="Tokens by surprise in nats", x_name="surprise, nats", y_name="tokens")


_STYLE = (
    """/* Tokens with the ink of their surprise: .s0 to .s10 behind text, .f0 to .f10 in the chart. */
header .lead { max-width: none; }
.note { margin: 0 0 8px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.7 ui-monospace, "DejaVu Sans Mono", monospace; }
.text b, .legend b { font-weight: 400; border-radius: 2px; }
.text b:hover { outline: 2px solid var(--minus); }
.text b:not([class]), .legend b:not([class]) { color: var(--faint); }
.text i { font-style: normal; opacity: .45; }
.legend b { padding: 1px 7px; border: 1px solid var(--line); font-variant-numeric: tabular-nums; }
figure { margin: 0; } svg.chart { max-width: 720px; } svg.chart rect { stroke: var(--faint); stroke-width: .5; }
th { white-space: nowrap; } td { overflow-wrap: anywhere; }
.s0 { background: var(--card); } .f0 { fill: var(--card); }
"""
    + "".join(
        f".s{n} {{ background: var(--i{n});{' color: var(--on-ink);' if n >= 6 else ''} }} "
        f".f{n} {{ fill: var(--i{n}); }}\n"
        for n in range(1, STEPS + 1)
    )
    # In the dark palette the ramp becomes bright one step later.
    + "@media (prefers-color-scheme: dark) { .s6 { color: var(--text); } }\n"
)
