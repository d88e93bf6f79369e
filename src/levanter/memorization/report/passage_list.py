"""The list of top passages: how likely, where, and prefix and suffix where the text may be shown."""

from levanter.memorization.discoverability import log_required_n
from levanter.memorization.measurement import Measurement
from levanter.memorization.passages import Passage
from levanter.memorization.report.words import count, escaped, probability, samples

SHOWN = 5
"""Passages that are visible without opening the rest of the list."""


def passage_list(run: Measurement, index: int, *, count: int, with_text: bool) -> str:
    """An ordered list of the likeliest passages of a run.

    Args:
        run: the measurement.
        index: the run's index in its section.
        count: how many at most.
        with_text: whether prefix and suffix are shown.
    """
    found = run.passages(count)
    text = run.book.text if with_text else None
    under = run.below(max(count - len(found), 0))
    below = _listed([_item(passage, n, index, text, run.unit, reached=False) for n, passage in enumerate(under, 1)])
    if not found:
        above = '<p class="lead">No window reaches the threshold.'
        return f"{above} The likeliest below it:</p>{below}" if under else f"{above}</p>"
    listed = _listed([_item(passage, n, index, text, run.unit) for n, passage in enumerate(found, 1)])
    if under:
        listed += f"<details><summary>{len(under)} likeliest below the threshold</summary>{below}</details>"
    return listed


def _listed(items: list[str]) -> str:
    listed = f'<ol class="passages">{"".join(items[:SHOWN])}</ol>'
    if len(items) > SHOWN:
        listed += (
            f"<details><summary>{len(items) - SHOWN} more</summary>"
            f'<ol class="passages" start="{SHOWN + 1}">{"".join(items[SHOWN:])}</ol></details>'
        )
    return listed


def _item(passage: Passage, rank: int, index: int, text: str | None, unit: str, *, reached: bool = True) -> str:
    needed = samples(float(log_required_n(passage.log_pz, 0.5)))
    start, stop = passage.suffix
    facts = [
        f"{unit} {count(start)} – {count(stop)}",
        f"{needed} {'sample' if needed == '1' else 'samples'} for an even chance",
    ]
    if reached:
        facts.append(f"covered around it: {count(passage.run[1] - passage.run[0])}")
    if passage.merged > 1:
        facts.append(f"{count(passage.merged)} windows")
    quote = ""
    if text is not None:
        prefix, suffix = text[slice(*passage.prefix)], text[slice(*passage.suffix)]
        quote = (
            f'<blockquote><span class="prefix">{escaped(prefix)}</span>'
            f'<span class="suffix">{escaped(suffix)}</span></blockquote>'
        )
    return (
        f'<li value="{rank}"><div class="head"><b>{probability(passage.log_pz)}</b>'
        + "".join(f"<span>{escaped(fact)}</span>" for fact in facts)
        + f'<button type="button" class="script-only" data-run="{index}" data-start="{start}" data-stop="{stop}">'
        f"Show in the strip</button></div>{quote}</li>"
    )
