"""The HTML page of a comparison of two models: bars for sets and categories, and the gap drawn on the text.

Texts are data in the page, which its script inserts as text. A text is drawn in cells: the smallest pieces at whose
ends both tokenizers have a boundary, so that no loss has to be spread.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from levanter.eval.gap.byte_losses import BITS, ComparedDocument, TokenLosses, cells
from levanter.html.page import result_page

_PAGE = Path(__file__).with_name("page.html")
SHOWN_BYTES = 16384
"""Maximum number of bytes of a text that are shown, around the largest difference."""


def gap_page(
    summary: Mapping[str, Any], shown: Sequence[ComparedDocument], *, title: str, facts: Mapping[str, str]
) -> str:
    """The page.

    Args:
        summary: see `GapReport.summary`.
        shown: the texts that are drawn, in order.
        title: heading of the page.
        facts: facts of the run, by name.
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
        "texts": [text_cells(document) for document in shown],
    }
    return result_page(_PAGE, data, title=title, facts={**models, **facts})


def text_cells(one: ComparedDocument) -> dict[str, Any]:
    """A text as cells: the text, the bits of both models, and the number of tokens of both tokenizers."""
    content, sums = one.text.text.encode(), one.sums
    borders = cells(one.a, one.b)
    bits = [_sum_by_cell(values, borders, values.nats * BITS) for values in (one.a, one.b)]
    counts = [_sum_by_cell(values, borders, np.ones(len(values.nats))) for values in (one.a, one.b)]
    first, end = _visible_cells(borders, bits[0] - bits[1])
    text_pieces = []
    for n in range(first, end):
        low, high = int(borders[n]), int(borders[n + 1])
        piece = content[low:high].decode(errors="replace")
        # Bytes before the first scored one are shown without numbers.
        if low < one.begin:
            text_pieces.append([piece])
        else:
            text_pieces.append(
                [piece, *(round(float(values[n]), 3) for values in bits), *(int(values[n]) for values in counts)]
            )
    return {
        "set": one.text.name,
        "place": f"{one.text.shard}, document {one.text.row + 1:,}",
        "bytes": sums.bytes,
        "delta": sums.delta_bits,
        "bpb": [sums.a * BITS / sums.bytes, sums.b * BITS / sums.bytes] if sums.bytes else [None, None],
        "cut": [first > 0, end < len(borders) - 1],
        "cells": text_pieces,
    }


def _sum_by_cell(losses: TokenLosses, borders: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sums over the tokens of each cell; a token belongs to the cell in which it begins."""
    where = np.clip(np.searchsorted(borders, losses.begins, side="right") - 1, 0, max(len(borders) - 2, 0))
    # A token without a loss is NaN, and adds nothing.
    return np.bincount(where, weights=np.nan_to_num(values), minlength=len(borders) - 1)


def _visible_cells(borders: np.ndarray, delta: np.ndarray) -> tuple[int, int]:
    """The cells of a long text that are shown: `SHOWN_BYTES` around the largest difference."""
    if borders[-1] <= SHOWN_BYTES or not len(delta):
        return 0, len(borders) - 1
    middle = int(borders[int(np.argmax(np.abs(delta)))])
    # Centered on the largest difference, and moved inwards at the ends of the text.
    low = max(0, min(middle - SHOWN_BYTES // 2, int(borders[-1]) - SHOWN_BYTES))
    first = int(np.searchsorted(borders, low))
    # At least one cell, even if it alone is longer than the limit.
    return first, max(first + 1, int(np.searchsorted(borders, low + SHOWN_BYTES, side="right")) - 1)
