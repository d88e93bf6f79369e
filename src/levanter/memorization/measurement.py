"""Measurements: everything reported about one book under one decoding scheme and one threshold.

A `BookResult` holds the model's scores; a `Measurement` holds what follows from them: log p_z, covered characters,
heat, the (n, p) surface, intervals, passages. Pictures, the report, `summary.json` and comparisons are all derived from
it, so they cannot disagree.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from levanter.memorization.calibration import Calibration, Interval, block_bootstrap, block_length
from levanter.memorization.coverage import DEFAULT_THRESHOLD, Cover, characters, cover_spans, covered, log_or_minus_inf
from levanter.memorization.discoverability import ExtractionCurve, expected_rate, extraction_curve, max_extraction_rate
from levanter.memorization.heatmap import character_heat
from levanter.memorization.histogram import Histogram, histogram
from levanter.memorization.passages import Passage, runs, top_passages
from levanter.memorization.published import published_coverages
from levanter.memorization.results import BookResult, Scheme


@dataclass(frozen=True, kw_only=True, eq=False)
class Measurement:
    """One book, one scheme, one threshold. Made by `measure`.

    Attributes:
        book: the model's scores.
        scheme: how tokens would be drawn.
        log_threshold: log τ.
        cover: the definition of the characters that a window covers.
        characters: the number of characters of the book, or of rows of a prepared set without a text.
        unit: the unit of positions in the book: `characters` or `rows`.
        log_pz: float64 `[N]`.
        spans: int64 `[N, 2]`, the characters that each window covers.
        heat: float64 `[characters]`, log max p_z.
        calibration: where τ comes from, if it was not chosen.
    """

    book: BookResult
    scheme: Scheme
    log_threshold: float
    cover: Cover
    characters: int
    log_pz: np.ndarray = field(repr=False)
    spans: np.ndarray = field(repr=False)
    heat: np.ndarray = field(repr=False)
    unit: str = "characters"
    calibration: Calibration | None = None

    @property
    def threshold(self) -> float:
        """τ as a probability."""
        return math.exp(self.log_threshold)

    @cached_property
    def reached(self) -> np.ndarray:
        """Which windows have p_z ≥ τ: bool `[N]`."""
        return self.log_pz >= self.log_threshold

    @cached_property
    def covered(self) -> np.ndarray:
        """Which characters are covered: bool `[characters]`."""
        return covered(self.spans[self.reached], self.characters)

    @cached_property
    def scored(self) -> np.ndarray:
        """Which characters are in some window: bool `[characters]`. Nothing is known about the others."""
        return covered(self.spans, self.characters)

    @property
    def log_p_a_token(self) -> np.ndarray:
        """The mean log-probability of a suffix token in each window, nats: float64 `[N]`."""
        return self.log_pz / (self.scheme.suffix_tokens or self.book.suffix_tokens)

    @property
    def coverage(self) -> float:
        """The share of characters that are covered."""
        return float(self.covered.mean())

    @cached_property
    def coverage_interval(self) -> Interval:
        """The interval of `coverage`: circular blocks of characters, several windows long."""
        spans = self.spans if self.unit == "rows" else self.book.char_spans
        # Blocks must be longer than whole windows (prefix included), because overlapping windows share their fate.
        window = float(np.mean(spans[:, 1] - spans[:, 0]))
        return block_bootstrap(self.covered, block=block_length(window, self.characters))

    @property
    def reached_rate(self) -> float:
        """The share of windows at or above τ."""
        return float(self.reached.mean())

    @cached_property
    def reached_interval(self) -> Interval:
        """The interval of `reached_rate`: circular blocks of windows."""
        return block_bootstrap(self.reached, block=windows_block(self.book))

    @cached_property
    def curve(self) -> ExtractionCurve:
        """The (n, p) surface."""
        return extraction_curve(self.log_pz)

    @cached_property
    def histogram(self) -> Histogram:
        """Windows by p_z."""
        return histogram(self.log_pz)

    @cached_property
    def runs(self) -> np.ndarray:
        """The covered stretches: int64 `[R, 2]`."""
        return runs(self.covered)

    @property
    def longest_run(self) -> int:
        """Characters of the longest covered stretch."""
        return int((self.runs[:, 1] - self.runs[:, 0]).max(initial=0))

    def passages(self, count: int = 20) -> tuple[Passage, ...]:
        """The likeliest passages."""
        rows = self.unit == "rows"
        return top_passages(
            self.log_pz,
            self.spans if rows else self.book.char_spans,
            self.spans if rows else self.book.suffix_char_spans,
            self.characters,
            log_threshold=self.log_threshold,
            count=count,
        )

    def below(self, count: int = 20) -> tuple[Passage, ...]:
        """The likeliest passages below the threshold, with p_z above 0."""
        rows = self.unit == "rows"
        suffixes = self.spans if rows else self.book.suffix_char_spans
        # p_z = 0 is left out: such a window cannot be reproduced, so it is not nearly memorized.
        under = np.flatnonzero(~self.reached & (self.log_pz > -np.inf))
        above = top_passages(
            self.log_pz[under],
            (self.spans if rows else self.book.char_spans)[under],
            suffixes[under],
            self.characters,
            log_threshold=-np.inf,
            count=count,
        )
        # If a window next to it reaches the threshold, the passage is listed already.
        return tuple(
            # Map the index back from the selected windows to all windows. No stretch is covered here, so the run is the
            # suffix.
            replace(passage, window=int(under[passage.window]), run=passage.suffix)
            for passage in above
            if not self.covered[slice(*passage.suffix)].any()
        )

    @property
    def published(self) -> dict[str, float]:
        """Published coverages of a book of this title, in %."""
        return dict(published_coverages(self.book.title))

    def summary(self) -> dict[str, Any]:
        # Other programs read these keys, so their names are fixed.
        """The measurement as JSON values; no text of the book, no times."""
        return {
            "title": self.book.title,
            "preset": self.book.preset,
            "scheme": self.scheme.name,
            "prefix_tokens": self.book.prefix_tokens,
            "suffix_tokens": self.book.suffix_tokens,
            "cover": self.cover,
            "unit": self.unit,
            "threshold": self.threshold,
            "log_threshold": self.log_threshold,
            "calibration": None if self.calibration is None else _calibration_json(self.calibration),
            "characters": self.characters,
            "windows": len(self.book),
            "coverage": self.coverage,
            "coverage_interval": _interval_json(self.coverage_interval),
            "covered_characters": int(self.covered.sum()),
            "scored_characters": int(self.scored.sum()),
            "longest_covered_run": self.longest_run,
            "covered_runs": len(self.runs),
            "windows_reached": int(self.reached.sum()),
            "windows_reached_rate": self.reached_rate,
            "windows_reached_interval": _interval_json(self.reached_interval),
            "expected_rate": expected_rate(self.log_pz),
            "max_extraction_rate": max_extraction_rate(self.log_pz, top_k=self.scheme.top_k),
            "log_pz": _distribution(self.log_pz),
            "log_p_a_token": _distribution(self.log_p_a_token),
            "extraction_curve": {
                "n": self.curve.n.tolist(),
                "p": self.curve.p.tolist(),
                "rate": self.curve.rate.tolist(),
            },
            "histogram": {
                "log10_edges": self.histogram.edges.tolist(),
                "counts": self.histogram.counts.tolist(),
                "below": self.histogram.below,
                "zero": self.histogram.zero,
            },
            "schemes": {scheme.name: self._under(scheme) for scheme in whole_suffix(self.book)},
            "passages": [
                {
                    "window": passage.window,
                    "log_pz": passage.log_pz,
                    "prefix": list(passage.prefix),
                    "suffix": list(passage.suffix),
                    "merged": passage.merged,
                    "run": list(passage.run),
                }
                for passage in self.passages()
            ],
            "passages_below": [
                {"window": item.window, "log_pz": item.log_pz, "prefix": list(item.prefix), "suffix": list(item.suffix)}
                for item in self.below()
            ],
            "published_coverage_percent": self.published,
        }

    def _under(self, scheme: Scheme) -> dict[str, Any]:
        """The main results at the same threshold under another scheme."""
        log_pz = self.book.log_pz(scheme)
        reached = log_pz >= self.log_threshold
        return {
            "coverage": float(covered(self.spans[reached], self.characters).mean()),
            "windows_reached": int(reached.sum()),
            "expected_rate": expected_rate(log_pz),
            "max_extraction_rate": max_extraction_rate(log_pz, top_k=scheme.top_k),
        }


def measure(
    book: BookResult,
    *,
    scheme: Scheme | None = None,
    threshold: float = DEFAULT_THRESHOLD,
    cover: Cover = "suffix",
    calibration: Calibration | None = None,
) -> Measurement:
    """Measures a book.

    Args:
        book: its windows, scored. Rows of a prepared set have no position in a text; coverage is then of rows.
        scheme: default the one that its preset reports first.
        threshold: τ, a probability; ignored if `calibration` is given.
        cover: the definition of the characters that a window covers.
        calibration: τ from control texts.

    Raises:
        ValueError: no windows; an unknown `cover`, a threshold that is not a probability, a scheme that the results do
            not include or that covers only part of the suffix (spans are known for full suffixes only).
    """
    scheme = book.scheme if scheme is None else scheme
    # A prepared set has no underlying text: it is measured row by row.
    rows = len(book) > 0 and bool((book.char_spans < 0).all())
    total = len(book) if rows else characters(book)
    problems = []
    if len(book) == 0 or total == 0:
        problems.append(f"{book.title}: no windows were scored; there is nothing to measure")
    if scheme.suffix_tokens not in (None, book.suffix_tokens):
        problems.append(
            f"scheme {scheme.name} uses {scheme.suffix_tokens} of {book.suffix_tokens} suffix tokens, but spans "
            "are known for full suffixes only\n  → score the book with that suffix length"
        )
    if problems:
        raise ValueError("\n".join(problems))
    log_pz = book.log_pz(scheme)
    # Row i of a prepared set covers the unit [i, i + 1), so the code for characters works for rows.
    first = np.arange(len(book), dtype=np.int64)
    spans = np.stack([first, first + 1], axis=1) if rows else cover_spans(book, cover)
    return Measurement(
        book=book,
        scheme=scheme,
        # A calibration may give log τ slightly above 0 (nothing counts), which `log_or_minus_inf` would refuse.
        log_threshold=log_or_minus_inf(threshold) if calibration is None else calibration.log_threshold,
        cover=cover,
        characters=total,
        log_pz=log_pz,
        spans=spans,
        heat=character_heat(log_pz, spans, total),
        unit="rows" if rows else "characters",
        calibration=calibration,
    )


def whole_suffix(book: BookResult) -> tuple[Scheme, ...]:
    """The schemes of a book's results that use full suffixes."""
    return tuple(scheme for scheme in book.schemes if scheme.suffix_tokens in (None, book.suffix_tokens))


def windows_block(book: BookResult) -> int:
    """Windows of a bootstrap block: several times as many as overlap one window; 1 for separate rows."""
    spans = book.char_spans
    # Rows of a prepared set have character spans of −1.
    if len(book) == 0 or spans[0, 0] < 0:
        return 1
    # The mean stride: windows that were left out as duplicates widen it in places.
    stride = max(1.0, float(spans[-1, 0] - spans[0, 0]) / max(1, len(book) - 1))
    # Windows that overlap one window: its length over the stride.
    length = float(np.mean(spans[:, 1] - spans[:, 0]))
    return block_length(length / stride, len(book))


def _interval_json(interval: Interval) -> dict[str, Any]:
    return {
        "low": interval.low,
        "high": interval.high,
        "confidence": interval.confidence,
        "block": interval.block,
        "resamples": interval.resamples,
    }


def _calibration_json(calibration: Calibration) -> dict[str, Any]:
    return {
        "false_positive_rate_asked": calibration.requested,
        "false_positive_rate_reached": calibration.reached,
        "control_windows": calibration.windows,
        "log_threshold_interval": _interval_json(calibration.interval),
    }


def _distribution(log_pz: np.ndarray) -> dict[str, Any]:
    """Quantiles of log p_z; null for −inf, which JSON lacks."""
    # `nearest`, because interpolating between −inf and a number is meaningless.
    quantiles = np.quantile(log_pz, [0.0, 0.25, 0.5, 0.75, 1.0], method="nearest")
    names = ("min", "lower_quartile", "median", "upper_quartile", "max")
    return {
        **{name: float(q) if np.isfinite(q) else None for name, q in zip(names, quantiles, strict=True)},
        "zero": int((log_pz == -np.inf).sum()),
    }
