"""What the page's script draws from: the heat of every character in a few bytes, and the text.

Heat has *levels*: 1 … 100 from the lightest ink to p_z = 1, uniform in log p_z; 101 … 200 below the threshold, uniform
in log p per token from just below it to `FLOOR`; 0 for anything less likely; 255 for what no window covers, about which
nothing is known. Neighbours mostly share a level, so levels are run-length encoded: the run's length as a varint (seven
bits per byte, low ones first, the high bit set on all but the last) and one byte of level, all in base64.
"""

import base64
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from levanter.memorization.heatmap import FLOOR, LIGHTEST, shade
from levanter.memorization.measurement import Measurement

LEVELS, UNSCORED = 100, 255


def levels(measured: Measurement) -> np.ndarray:
    """The level of every character: uint8 `[characters]`."""
    ink = shade(measured.heat, log_threshold=measured.log_threshold)
    above = 1 + np.rint((ink - LIGHTEST) / (1 - LIGHTEST) * (LEVELS - 1))
    tokens = measured.scheme.suffix_tokens or measured.book.suffix_tokens
    top, each = min(measured.log_threshold / tokens, 0.0), measured.heat / tokens
    # If the threshold itself is below the floor, there is nothing between them.
    depth = (each - top) / (FLOOR - top) if top > FLOOR else np.full_like(each, np.inf)
    below = np.where(depth <= 1, LEVELS + 1 + np.rint(np.clip(depth, 0, 1) * (LEVELS - 1)), 0)
    return np.where(measured.scored, np.where(ink > 0, above, below), UNSCORED).astype(np.uint8)


def encoded(levels: np.ndarray) -> str:
    """Levels as runs in base64, see the module."""
    starts = np.flatnonzero(np.diff(levels, prepend=levels[:1] ^ 1))
    lengths = np.diff(starts, append=levels.size)
    out = bytearray()
    for length, level in zip(lengths.tolist(), levels[starts].tolist(), strict=True):
        while length > 0x7F:
            out.append(0x80 | length & 0x7F)
            length >>= 7
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
                "logThreshold": min(run.log_threshold, 0.0),
                "tokens": run.scheme.suffix_tokens or run.book.suffix_tokens,
                "levels": encoded(levels(run)),
            }
            for name, run in zip(names, runs, strict=True)
        ],
    }


def as_script(payload: object) -> str:
    """JSON that is safe inside a `script` element, whatever the text contains."""
    written = json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Characters that could end the element, that scripts take for line endings, and that UTF-8 cannot encode.
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda sign: f"\\u{ord(sign[0]):04x}", written)
