"""A page of a comparison of two models: sets and kinds of text as bars, and the gap drawn on the text.

It is one self-contained file. Texts are data in it, which its script shows, so a text is never taken for HTML. A text
is drawn in cells: the smallest pieces at whose ends both tokenizers have a border, so that no loss has to be spread.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from levanter.eval.gap.byte_losses import TokenLosses, cells
from levanter.eval.gap.sums import BITS, ComparedDocument
from levanter.html.page import result_page

_PAGE = Path(__file__).with_name("page.html")
SHOWN_BYTES = 16384
"""Of a text, around where the models part most."""


def gap_page(
    summary: Mapping[str, Any], shown: Sequence[ComparedDocument], *, title: str, facts: Mapping[str, str]
) -> str:
    """The page.

    Args:
        summary: see `GapReport.summary`.
        shown: the texts that are drawn, in order.
        title: above it.
        facts: of the run.
    """
    keys = ("name", "bytes", "model_a_bpb", "model_b_bpb", "gap_bpb", "delta_bits")
    models = {"model A": summary["model_a"], "model B": summary["model_b"]}
    data = {
        "tables": {
            name: [{key: row[key] for key in keys} for row in summary[section]]
            for name, section in (
                ("sets", "datasets"),
                ("groups", "dataset_groups"),
                ("kinds of text", "pattern_buckets"),
            )
        },
        "texts": [drawn(each) for each in shown],
    }
    return result_page(_PAGE, data, title=title, facts={**models, **facts})


def drawn(one: ComparedDocument) -> dict[str, Any]:
    """A text as cells: its piece, the bits of both models, and into how many tokens each cuts it."""
    content, sums = one.text.text.encode(), one.sums
    borders = cells(one.a, one.b)
    bits = [_in_cells(each, borders, each.nats * BITS) for each in (one.a, one.b)]
    counts = [_in_cells(each, borders, np.ones(len(each.nats))) for each in (one.a, one.b)]
    first, end = _shown(borders, bits[0] - bits[1])
    found = []
    for n in range(first, end):
        low, high = int(borders[n]), int(borders[n + 1])
        piece = content[low:high].decode(errors="replace")
        if low < one.begin:
            found.append([piece])
        else:
            found.append([piece, *(round(float(each[n]), 3) for each in bits), *(int(each[n]) for each in counts)])
    return {
        "set": one.text.name,
        "place": f"{one.text.shard}, document {one.text.row + 1:,}",
        "bytes": sums.bytes,
        "delta": sums.delta_bits,
        "bpb": [sums.a * BITS / sums.bytes, sums.b * BITS / sums.bytes] if sums.bytes else [None, None],
        "cut": [first > 0, end < len(borders) - 1],
        "cells": found,
    }


def _in_cells(losses: TokenLosses, borders: np.ndarray, values: np.ndarray) -> np.ndarray:
    """GapSums over the tokens of each cell: that in which a token begins."""
    where = np.clip(np.searchsorted(borders, losses.begins, side="right") - 1, 0, max(len(borders) - 2, 0))
    return np.bincount(where, weights=np.nan_to_num(values), minlength=len(borders) - 1)


def _shown(borders: np.ndarray, delta: np.ndarray) -> tuple[int, int]:
    """The cells of a long text that are drawn: so many bytes around the largest difference."""
    if borders[-1] <= SHOWN_BYTES or not len(delta):
        return 0, len(borders) - 1
    middle = int(borders[int(np.argmax(np.abs(delta)))])
    low = max(0, min(middle - SHOWN_BYTES // 2, int(borders[-1]) - SHOWN_BYTES))
    first = int(np.searchsorted(borders, low))
    return first, max(first + 1, int(np.searchsorted(borders, low + SHOWN_BYTES, side="right")) - 1)
