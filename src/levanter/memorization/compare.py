"""Comparisons: several runs side by side, and warnings if they are not comparable.

Runs over the same text share its characters, so their strips are aligned and show which characters one run covers and
another does not. Runs over different texts only share a table. p_z under another preset, scheme, suffix length or
threshold is a different quantity: `cautions` reports what differs.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from levanter.memorization.measurement import Measurement


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The characters of a text that two runs cover, as shares of all characters; the four add up to 1."""

    both: float
    first_only: float
    second_only: float
    neither: float


def overlap(first: Measurement, second: Measurement) -> Overlap:
    """Compares what two runs over one text cover.

    Raises:
        ValueError: the runs are over different texts.
    """
    if text_key(first) != text_key(second):
        raise ValueError(
            f"{first.book.title} and {second.book.title}: two texts ({first.characters:,} and {second.characters:,} "
            "characters); only runs over the same text can be compared character by character"
        )
    one, two = first.covered, second.covered
    return Overlap(
        both=float(np.mean(one & two)),
        first_only=float(np.mean(one & ~two)),
        second_only=float(np.mean(~one & two)),
        neither=float(np.mean(~one & ~two)),
    )


def by_text(runs: Sequence[Measurement]) -> list[list[Measurement]]:
    """The runs grouped by text, in the order in which they were given."""
    groups: dict[str, list[Measurement]] = {}
    for run in runs:
        groups.setdefault(text_key(run), []).append(run)
    return list(groups.values())


def text_key(run: Measurement) -> str:
    """The identity of a text: the file's hash in the manifest, else the text's; else title and length."""
    identity = run.book.manifest.get("identity", {})
    digest = identity.get("text.sha256") if isinstance(identity, Mapping) else None
    if isinstance(digest, str):
        return digest
    if run.book.text is not None:
        # Texts may contain surrogates from broken files, which strict UTF-8 refuses.
        return hashlib.sha256(run.book.text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{run.book.title}/{run.characters}"


def model_name(run: Measurement) -> str:
    """The model's name in the manifest; empty if it has none."""
    return str(run.book.manifest.get("model") or "")


def labels(runs: Sequence[Measurement]) -> list[str]:
    """A distinguishing name for each run: title or model, and the settings that differ."""
    settings: dict[str, list[str]] = {
        "model": [model_name(run) for run in runs],
        "title": [run.book.title for run in runs],
        "preset": [run.book.preset for run in runs],
        "scheme": [run.scheme.name for run in runs],
    }
    # Only settings in which the runs differ are shown; equal ones would make every label longer.
    differing = [name for name, values in settings.items() if len(set(values)) > 1] or ["title"]
    names = [" · ".join(value for name in differing if (value := settings[name][n])) or "run" for n in range(len(runs))]
    # Runs that nothing distinguishes are numbered.
    return [
        f"{label} ({names[: n + 1].count(label)})" if names.count(label) > 1 else label for n, label in enumerate(names)
    ]


def cautions(runs: Sequence[Measurement]) -> list[str]:
    """Why the results of these runs are not comparable, one full sentence each."""
    aspects = {
        "presets": [run.book.preset for run in runs],
        "decoding schemes": [run.scheme.name for run in runs],
        "prefix lengths": [f"{run.book.prefix_tokens} tokens" for run in runs],
        "suffix lengths": [f"{run.book.suffix_tokens} tokens" for run in runs],
        "thresholds": [f"{run.threshold:.3g}" for run in runs],
        "ways to count covered characters": [run.cover for run in runs],
    }
    return [
        f"The runs have different {name} ({', '.join(dict.fromkeys(values))}), so their p_z are not comparable."
        for name, values in aspects.items()
        if len(set(values)) > 1
    ]
