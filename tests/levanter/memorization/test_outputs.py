"""The files of a book: their bytes are the same twice, on any storage, and other programs read in them what is true."""

import dataclasses
import io
import json

import fsspec
import numpy as np
import pytest
from helpers.book_results import book_of_bytes

from levanter.io import open_read
from levanter.memorization.outputs import npy_name, write_outputs
from levanter.memorization.plots import INK
from levanter.memorization.results import FULL

TEXT = "A private text – nobody else has 字 it; it is $5_000 long, almost.\n" * 4
FILES = {
    "summary.json",
    "report.html",
    "heatmap.png",
    "heatmap.npy",
    "histogram.png",
    "np_curves.png",
    "pz_data.npz",
}


def test_files_are_complete_and_the_same_twice(tmp_path):
    book = book_of_bytes(TEXT, title="漢字 & <b>$x$")
    for folder in ("a", "b"):
        write_outputs(str(tmp_path / folder), book, threshold=0.01)
    assert {path.name for path in (tmp_path / "a").iterdir()} == FILES
    for name in FILES:
        content = (tmp_path / "a" / name).read_bytes()
        assert content == (tmp_path / "b" / name).read_bytes(), name
        if name.endswith(".png"):
            assert content.startswith(b"\x89PNG\r\n\x1a\n") and b"Software" not in content
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["title"] == "漢字 & <b>$x$" and 0 < summary["coverage"] < 1


def test_any_storage():
    book = book_of_bytes(TEXT)
    folder = "memory://memorization/outputs"
    returned = write_outputs(folder, book)
    assert {name.rsplit("/", 1)[-1] for name in fsspec.filesystem("memory").ls(folder, detail=False)} == FILES
    with open_read(f"{folder}/summary.json") as file:
        assert json.loads(file.read()) == json.loads(json.dumps(returned))


@pytest.mark.parametrize("mode", ["token", "text"])
def test_upstreams_layout(tmp_path, mode):
    book = book_of_bytes(TEXT, prefix=5, suffix=4, stride=3)
    if mode == "text":
        book = dataclasses.replace(book, token_spans=np.full_like(book.token_spans, -1))
    write_outputs(str(tmp_path), book)
    # No pickles in it.
    found = np.load(tmp_path / "pz_data.npz", allow_pickle=False)
    assert sorted(found) == ["config_info", "max_pz", "pz_values", "span_ranges"]
    pz = np.exp(book.log_pz(FULL))
    np.testing.assert_allclose(found["pz_values"], pz)
    spans = book.token_spans if mode == "token" else book.char_spans
    np.testing.assert_array_equal(found["span_ranges"], spans - [0, 1])
    length = int(spans[:, 1].max()) if mode == "token" else len(TEXT)
    curve = np.zeros(length)
    for (start, last), value in zip(found["span_ranges"], pz, strict=True):
        curve[start : last + 1] = np.maximum(curve[start : last + 1], value)
    np.testing.assert_allclose(found["max_pz"], curve, rtol=1e-6)
    np.testing.assert_array_equal(found["max_pz"], np.load(tmp_path / "heatmap.npy"))
    stride = 3 if mode == "token" else np.diff(np.unique(spans[:, 0])).min()
    assert found["config_info"].tolist() == [9, 5, stride, length]


def test_other_names(tmp_path):
    names = {"plot_path": "bar_plot.png", "histogram_path": "h.png", "pz_data_path": str(tmp_path / "else" / "p.npz")}
    write_outputs(str(tmp_path / "out"), book_of_bytes(TEXT), names=names)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"bar_plot.png", "bar_plot.npy", "h.png"} <= written and "heatmap.png" not in written
    assert (tmp_path / "else" / "p.npz").exists()
    assert npy_name("a.b/plot") == "a.b/plot.npy" and npy_name("x.png") == "x.npy"


def test_private_texts_stay_out(tmp_path):
    write_outputs(str(tmp_path), book_of_bytes(TEXT), with_text=False, threshold=0.01)
    page = (tmp_path / "report.html").read_text()
    assert "private" not in page and "nobody" not in page and "This report does not contain the text" in page


def test_extremes_are_drawn(tmp_path):
    book = book_of_bytes(TEXT)
    for n, value in enumerate((0.0, -2000.0)):
        certain = dataclasses.replace(
            book, logprobs=np.full_like(book.logprobs, value), ranks=np.full_like(book.ranks, 50 * n)
        )
        summary = write_outputs(str(tmp_path / str(n)), certain)
        assert summary["windows_reached_rate"] == 1 - n
    prepared = dataclasses.replace(
        book,
        text=None,
        char_spans=np.full_like(book.char_spans, -1),
        suffix_char_spans=np.full_like(book.char_spans, -1),
    )
    assert write_outputs(str(tmp_path / "rows"), prepared)["unit"] == "rows"


def test_the_picture_shows_the_book(tmp_path):
    matplotlib_image = pytest.importorskip("matplotlib.image")
    text = "x" * 4000
    log_pz = np.where(np.arange(0, 3994, 2) < 1994, 0.0, -100.0)
    write_outputs(str(tmp_path), book_of_bytes(text, log_pz))
    picture = matplotlib_image.imread(io.BytesIO((tmp_path / "heatmap.png").read_bytes()))[..., :3]
    row = picture[picture.shape[0] // 2]
    dark, light = (np.array([int(color[n : n + 2], 16) for n in (1, 3, 5)]) / 255 for color in (INK[-1], INK[0]))
    assert np.abs(row[400] - dark).max() < 0.02 and np.abs(row[1200] - light).max() < 0.02
