"""Outputs: the files that a scored book produces, for people and for other programs.

    summary.json     every number, no text
    report.html      the report, one self-contained file
    heatmap.png      the book as a strip          heatmap.npy   the same as numbers (upstream's curve)
    histogram.png    windows by p_z               np_curves.png    (n, p) curves
    pz_data.npz      p_z of every window in upstream's layout

Each file is written atomically, on any storage; the same measurement gives the same bytes. `windows.parquet` and
`manifest.json`, from which all of them are derived, are written with the results (`BookResult.write`).

*Upstream's layout* (`pz_data.npz`): `pz_values` float64 `[N]`; `span_ranges` int64 `[N, 2]`, first and last token
(token mode) or character (text mode) of each full window, both inclusive; `max_pz` float32, per token or character the
largest p_z of the windows over it, prefix included, 0 where there is none; `config_info` int64, the numbers
(tokens of a window, tokens of its prefix, stride, length of the book).
"""

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from levanter.io import atomic_write, join
from levanter.memorization.calibration import Calibration
from levanter.memorization.coverage import DEFAULT_THRESHOLD, Cover
from levanter.memorization.heatmap import character_heat
from levanter.memorization.measurement import Measurement, measure
from levanter.memorization.plots import curves_png, heatmap_png, histogram_png
from levanter.memorization.report import report_html
from levanter.memorization.results import BookResult, Scheme, as_json_bytes

SUMMARY, REPORT = "summary.json", "report.html"
CURVES = "np_curves.png"
DEFAULT_NAMES: Mapping[str, str] = {
    "plot_path": "heatmap.png",
    "histogram_path": "histogram.png",
    "pz_data_path": "pz_data.npz",
}
"""Names that a config may change, by upstream's keys."""


def write_outputs(
    folder: str,
    book: BookResult,
    *,
    threshold: float = DEFAULT_THRESHOLD,
    cover: Cover = "suffix",
    scheme: Scheme | None = None,
    calibration: Calibration | None = None,
    names: Mapping[str, str] | None = None,
    with_text: bool = True,
    on_file: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Measures a book and writes everything reported about it.

    Args:
        folder: a local folder or a URL.
        book: its windows, scored.
        threshold: τ.
        cover: which characters a window covers.
        scheme: default the one that the book's preset reports first.
        calibration: τ from control texts, instead of `threshold`.
        names: other names for some files, see `DEFAULT_NAMES`; absolute ones and URLs leave the folder.
        with_text: whether `report.html` may contain the text.
        on_file: called with the name of every file that is written.

    Returns:
        The content of `summary.json`.

    Raises:
        ValueError: see `measure`.
    """
    measured = measure(book, scheme=scheme, threshold=threshold, cover=cover, calibration=calibration)
    # Insertion order is the order of writing.
    file_names = {**DEFAULT_NAMES, **(names or {})}
    summary = measured.summary()
    files = {
        file_names["plot_path"]: heatmap_png(measured),
        npy_name(file_names["plot_path"]): _npy(_upstream_curve(measured)[0].astype(np.float32)),
        file_names["histogram_path"]: histogram_png(measured),
        file_names["pz_data_path"]: upstream_npz(measured),
        CURVES: curves_png(measured),
        REPORT: report_html([measured], with_text=with_text).encode("utf-8"),
        # Last: if it exists, so do the others.
        SUMMARY: as_json_bytes(summary),
    }
    for name, content in files.items():
        with atomic_write(join(folder, name)) as file:
            file.write(content)
        on_file(name)
    return summary


def npy_name(plot: str) -> str:
    """The file name of a picture's array: the picture's name with the ending `.npy`."""
    stem, dot, suffix = plot.rpartition(".")
    # A dot in a folder's name is no ending.
    return f"{stem if dot and '/' not in suffix else plot}.npy"


def upstream_npz(measured: Measurement) -> bytes:
    """`pz_data.npz` in upstream's layout, see the module."""
    book = measured.book
    curve, spans, stride = _upstream_curve(measured)
    out = io.BytesIO()
    np.savez(
        out,
        pz_values=np.exp(measured.log_pz),
        # Our spans are half-open, upstream's include the last element.
        span_ranges=spans - np.array([0, 1]),
        max_pz=curve.astype(np.float32),
        config_info=np.array(
            [book.prefix_tokens + book.suffix_tokens, book.prefix_tokens, stride, curve.size], dtype=np.int64
        ),
    )
    return out.getvalue()


def _upstream_curve(measured: Measurement) -> tuple[np.ndarray, np.ndarray, int]:
    """Largest p_z over full windows, the windows' ranges, and the stride: in tokens if windows have token spans."""
    book = measured.book
    # Text mode tokenizes every window separately, so its windows have no positions among the book's tokens (−1).
    in_tokens = bool((book.token_spans >= 0).all())
    spans = book.token_spans if in_tokens else book.char_spans
    length = int(spans[:, 1].max()) if in_tokens else measured.characters
    if measured.unit == "rows" and not in_tokens:
        spans = measured.spans
    # The smallest distance of two windows is the stride even where windows were left out.
    steps = np.diff(np.unique(spans[:, 0]))
    stride = int(steps.min()) if steps.size else 0
    # Without the suffix restriction: upstream paints prefix and suffix.
    return np.exp(character_heat(measured.log_pz, spans, length)), spans, stride


def _npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()
