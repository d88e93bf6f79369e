"""The report of a comparison: every row by brute force, byte for byte; A beside itself is 0 everywhere."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from levanter.data.gap_texts import ComparedText, cut
from levanter.eval.gap.byte_losses import ComparedDocument, token_losses
from levanter.eval.gap.files import gap_files, gap_table, markdown, tracker_metrics, worst_documents
from levanter.eval.gap.page import SHOWN_BYTES, gap_page, text_cells
from levanter.eval.gap.report import GapReport, segments

pytestmark = pytest.mark.quick

TEXTS = {
    "web/a": ["The cat | sat.\n\nOn 12 mats — naïve!", "see https://a.b/c now"],
    "web/b": ["a b a b a b", "  x\ty" * 5],
    "code": ["def f(x):\n    return x"],
}


def tokens_of(text: str, rng: np.random.Generator) -> np.ndarray:
    """Some tokenization: spans of characters."""
    inside = rng.choice(np.arange(1, len(text)), size=len(text) // 3, replace=False)
    return np.array(list(pairwise([0, *sorted(inside), len(text)])))


def scored(seed: int = 0, *, same: bool = False) -> list[ComparedDocument]:
    rng = np.random.default_rng(seed)
    found = []
    for name, texts in TEXTS.items():
        for row, text in enumerate(texts):
            both = []
            for _ in range(2):
                spans = tokens_of(text, rng)
                nats = np.concatenate([[np.nan], rng.exponential(size=len(spans))])
                both.append(token_losses(text, spans, nats, leading=1))
            a, b = (both[0], both[0]) if same else both
            one = ComparedText(name=name, tags=("all", name), shard="f.jsonl", row=row, text=text, begin=3 * row)
            found.append(ComparedDocument(text=one, a=a, b=b))
    return found


def summary_of(texts: list[ComparedDocument]) -> dict:
    report = GapReport(model_a="A|x", model_b="B")
    for text in texts:
        report.add(text)
    return report.summary((2.0, 1.0))


def test_rows_are_sums_of_bytes():
    texts = scored()
    summary = summary_of(texts)
    rows = {row["name"]: row for section in ("datasets", "dataset_groups") for row in summary[section]}
    assert rows.keys() == {*TEXTS, "web", "all"}
    for name, row in rows.items():
        mine = [
            each for each in texts if name == "all" or each.text.name == name or each.text.name.startswith(f"{name}/")
        ]
        count = sum(len(each.text.text.encode()) - each.text.begin for each in mine)
        a, b = (
            sum(model.per_byte[each.text.begin :].sum() for each in mine for model in [getattr(each, m)]) for m in "ab"
        )
        assert (row["documents"], row["bytes"]) == (len(mine), count)
        assert row["model_a_bpb"] == pytest.approx(a / math.log(2) / count, rel=1e-12)
        assert row["gap_bpb"] == pytest.approx((a - b) / math.log(2) / count, rel=1e-9)
        assert row["model_a_eval_seconds"] > 0 and row["model_b_tokens"] == sum(len(each.b.nats) for each in mine)
    kinds: dict[str, list[float]] = {}
    for each in texts:
        for first, end, kind in segments(each.text.text):
            low, high = (len(each.text.text[:n].encode()) for n in (max(first, each.text.begin), end))
            if high > low:
                sums = kinds.setdefault(kind, [0.0, 0.0, 0])
                sums[0] += each.a.per_byte[low:high].sum()
                sums[1] += each.b.per_byte[low:high].sum()
                sums[2] += high - low
    assert {row["name"] for row in summary["pattern_buckets"]} == kinds.keys()
    for row in summary["pattern_buckets"]:
        a, b, count = kinds[row["name"]]
        assert row["bytes"] == count and row["delta_bits"] == pytest.approx((a - b) / math.log(2), rel=1e-9)
    assert sum(row["bytes"] for row in summary["pattern_buckets"]) == sum(row["bytes"] for row in summary["datasets"])


def test_what_stands_out_is_listed_first():
    texts = scored()
    summary = summary_of(texts)
    deltas = sorted((each.sums.delta_bits for each in texts), key=abs, reverse=True)
    listed = summary["top_documents"]
    assert [row["delta_bits"] for row in listed["model_a_worse"]] == [each for each in deltas if each > 0]
    assert [row["delta_bits"] for row in listed["model_b_worse"]] == [each for each in deltas if each < 0]
    ranks = list(worst_documents(summary))
    assert len(ranks) == len(texts) and ranks[0]["rank"] == 1 and ranks[0]["direction"] == "model_a_worse"
    (a,) = [
        row
        for rows in summary["top_literals"].values()
        for row in rows
        if row["name"] == "a" and row["bucket"] == "text/word"
    ]
    # "a b a b a b" has three, of which the document's first three bytes count.
    assert a["documents"] == 3 and a["bytes"] == 3 and a["model_a_token_boundaries"].startswith("|")
    for rows in summary["top_segments"].values():
        assert [abs(row["delta_bits"]) for row in rows] == sorted((abs(r["delta_bits"]) for r in rows), reverse=True)


def test_a_model_beside_itself_is_zero_everywhere():
    summary = summary_of(scored(same=True))
    for section in ("datasets", "dataset_groups", "pattern_buckets"):
        assert summary[section] and {row["gap_bpb"] for row in summary[section]} == {0.0}
    for section in ("top_documents", "top_segments", "top_literals"):
        assert summary[section] == {"model_a_worse": [], "model_b_worse": []}


def test_files_have_upstreams_names(tmp_path):
    texts = scored()
    summary = summary_of(texts)
    page = gap_page(summary, texts, title="T", facts={})
    for path, content in gap_files(str(tmp_path), summary, page).items():
        Path(path).write_bytes(content)
    assert {path.name for path in tmp_path.iterdir()} == {
        "summary.json",
        "report.md",
        "worst_documents.jsonl",
        "page.html",
    }
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(summary))
    report = (tmp_path / "report.md").read_text()
    assert report == markdown(summary) and "**Model A:** A\\|x" in report
    assert report.count("\n## ") == 9 and "| name | documents | bytes |" in report
    metrics = tracker_metrics(summary)
    assert metrics["gap/datasets/web/a/bpb_gap"] == summary_row(summary, "web/a")["gap_bpb"]
    assert metrics["gap/groups/web/model_a_tokens"] > 0 and "gap/patterns/text/word/bpb_gap" in metrics
    assert "web/a" in gap_table(summary)


def summary_row(summary: dict, name: str) -> dict:
    (row,) = [row for row in summary["datasets"] if row["name"] == name]
    return row


def test_cells_of_a_drawn_text_are_the_text_and_its_bits():
    for one in scored():
        shown = text_cells(one)
        assert "".join(cell[0] for cell in shown["cells"]) == one.text.text
        if not one.text.begin:
            for n, model in ((1, one.a), (2, one.b)):
                total = sum(cell[n] for cell in shown["cells"])
                assert total == pytest.approx(np.nansum(model.nats) / math.log(2), abs=0.01)
            assert sum(cell[3] for cell in shown["cells"]) == len(one.a.nats)


def test_a_long_text_is_drawn_where_models_part():
    text = "x" * (3 * SHOWN_BYTES)
    spans = [[n, n + 1] for n in range(len(text))]
    nats = np.ones(len(text))
    a, b = (token_losses(text, spans, nats.copy(), leading=0) for _ in range(2))
    b.nats[2 * SHOWN_BYTES] = 9
    one = ComparedDocument(text=ComparedText(name="n", tags=("n",), shard="s", row=0, text=text), a=a, b=b)
    shown = text_cells(one)
    assert shown["cut"] == [True, True] and sum(len(cell[0]) for cell in shown["cells"]) == SHOWN_BYTES
    assert any(cell[2] > 12 for cell in shown["cells"])


@pytest.mark.parametrize(("text", "most", "kept"), [("abc", 2, "ab"), ("aé", 2, "a"), ("日本", 5, "日"), ("日", 2, "")])
def test_documents_are_cut_at_characters(text: str, most: int, kept: str):
    assert cut(text, most) == kept
