"""The files of a comparison of two models, and of the scores of one model, under upstream's names.

A comparison has `summary.json`, `report.md`, `worst_documents.jsonl` and a page; the scores of one model have
`summary.json` and `scored_documents.parquet`. Metrics for trackers have upstream's names too.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from levanter.eval.gap.byte_losses import ComparedDocument
from levanter.io import join

SUMMARY, REPORT, WORST, PAGE = "summary.json", "report.md", "worst_documents.jsonl", "page.html"
_TABLES = (("Datasets", "datasets"), ("Dataset Groups", "dataset_groups"), ("Pattern Buckets", "pattern_buckets"))
_LISTS = (
    ("Top Documents: Model A Worse", ("top_documents", "model_a_worse")),
    ("Top Documents: Model B Worse", ("top_documents", "model_b_worse")),
    ("Top Segments: Model A Worse", ("top_segments", "model_a_worse")),
    ("Top Segments: Model B Worse", ("top_segments", "model_b_worse")),
    ("Top Literals: Model A Worse", ("top_literals", "model_a_worse")),
    ("Top Literals: Model B Worse", ("top_literals", "model_b_worse")),
)
_LITERALS = (
    "Token boundaries are those of the occurrence with the largest difference: `|` is a boundary, an ellipsis says "
    "that a token goes on beyond the literal."
)
_MEASURED = ("tokens", "eval_seconds", "tokens_per_second")
SCORED_DOCUMENTS = "scored_documents.parquet"
_SECTIONS = ("datasets", "dataset_groups", "pattern_buckets")
_MODEL_MEASURED = (*_MEASURED, "bytes_per_second")


def gap_files(folder: str, summary: Mapping[str, Any], page: str) -> dict[str, bytes]:
    """Path → content of a comparison's files, in the order in which they are written: the summary comes last."""
    lines = "".join(json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in worst_documents(summary))
    # The summary is the marker of a finished run: it is written when all other files are complete.
    contents = {
        WORST: lines,
        REPORT: markdown(summary),
        PAGE: page,
        SUMMARY: json.dumps(summary, indent=2, sort_keys=True, ensure_ascii=False),
    }
    return {join(folder, name): content.encode(errors="backslashreplace") for name, content in contents.items()}


def worst_documents(summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The documents with the largest gap for each model, the largest first."""
    for direction in ("model_a_worse", "model_b_worse"):
        for rank, row in enumerate(summary["top_documents"][direction], 1):
            yield {"direction": direction, "rank": rank, **row}


def markdown(summary: Mapping[str, Any]) -> str:
    """The comparison as Markdown tables."""
    sections = ["# Perplexity Gap Report\n", f"**Model A:** {_escaped(str(summary['model_a']))}\n"]
    sections.append(f"**Model B:** {_escaped(str(summary['model_b']))}\n")
    sections += [_section(title, summary[key], None) for title, key in _TABLES]
    for title, (what, direction) in _LISTS:
        sections.append(_section(title, summary[what][direction], _LITERALS if what == "top_literals" else None))
    return "\n".join(sections)


def _section(title: str, rows: Sequence[Mapping[str, Any]], note: str | None) -> str:
    if not rows:
        return f"## {title}\n\nNo rows.\n"
    heads = list(rows[0])
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    lines += [f"| {' | '.join(_cell(row[head]) for head in heads)} |" for row in rows]
    return "\n".join([f"## {title}", *(["", note] if note else []), "", *lines, ""])


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.6f}" if isinstance(value, float) else str(value)
    # A line break would end the row of the table.
    return _escaped(text).replace("\r", " ").replace("\n", "<br>")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|")


def tracker_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a comparison for trackers."""
    metrics: dict[str, float] = {}
    for section, name in (("datasets", "datasets"), ("dataset_groups", "groups"), ("pattern_buckets", "patterns")):
        for row in summary[section]:
            # A set without counted bytes; trackers take numbers only.
            if row["gap_bpb"] is None:
                continue
            at = f"gap/{name}/{row['name']}"
            metrics[f"{at}/bpb_gap"] = row["gap_bpb"]
            if section == "datasets":
                metrics |= {f"{at}/model_{model}_bpb": row[f"model_{model}_bpb"] for model in "ab"}
            for key in (f"model_{model}_{what}" for model in "ab" for what in _MEASURED):
                if row.get(key) is not None:
                    metrics[f"{at}/{key}"] = float(row[key])
    return metrics


def gap_table(summary: Mapping[str, Any]) -> str:
    """Sets and categories as text lines: bytes, bits per byte of both models, the gap."""
    rows = [("", "bytes", "A", "B", "A − B, bits per byte")]
    for row in (*summary["datasets"], *summary["dataset_groups"], *summary["pattern_buckets"]):
        if row["gap_bpb"] is not None:
            numbers = (f"{row['model_a_bpb']:.4f}", f"{row['model_b_bpb']:.4f}", f"{row['gap_bpb']:+.4f}")
            rows.append((row["name"], f"{row['bytes']:,}", *numbers))
    widths = [max(len(row[n]) for row in rows) for n in range(5)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(row[n].rjust(widths[n]) for n in range(1, 5))]) for row in rows
    )


def score_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of model A of a comparison alone, in descending order of bits."""
    result: dict[str, Any] = {"model": summary["model_a"]}
    for section in _SECTIONS:
        rows = []
        for row in summary[section]:
            bpb = row["model_a_bpb"]
            entry = {"name": row["name"], "documents": row["documents"], "bytes": row["bytes"], "bpb": bpb}
            # Rows are sorted by bits, not by bits per byte: what weighs most comes first.
            entry["bits"] = 0.0 if bpb is None else bpb * row["bytes"]
            rows.append(entry | {key: row[f"model_a_{key}"] for key in _MODEL_MEASURED if f"model_a_{key}" in row})
        result[section] = sorted(rows, key=lambda row: -row["bits"])
    return result


def tracked_score(summary: Mapping[str, Any]) -> dict[str, float]:
    """The metrics for trackers."""
    metrics: dict[str, float] = {}
    for section, name in zip(_SECTIONS, ("datasets", "groups", "patterns"), strict=True):
        for row in summary[section]:
            if row["bpb"] is not None:
                keys = ("bpb", *_MODEL_MEASURED[:3])
                metrics |= {f"score/{name}/{row['name']}/{k}": float(row[k]) for k in keys if row.get(k) is not None}
    return metrics


def score_table(summary: Mapping[str, Any]) -> str:
    """Sets and categories as text lines: bytes, and bits per byte."""
    rows = [("", "bytes", "bits per byte")]
    for section in _SECTIONS:
        rows += [(r["name"], f"{r['bytes']:,}", f"{r['bpb']:.4f}") for r in summary[section] if r["bpb"] is not None]
    widths = [max(len(row[n]) for row in rows) for n in range(3)]
    return "\n".join(f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c.rjust(widths[2])}" for a, b, c in rows)


def score_files(
    folder: str, summary: Mapping[str, Any], texts: Sequence[ComparedDocument], ids: Sequence[np.ndarray]
) -> dict[str, bytes]:
    """Path → content of a model's files, in the order in which they are written: the summary comes last."""
    return {
        join(folder, SCORED_DOCUMENTS): _parquet(texts, ids),
        join(folder, SUMMARY): json.dumps(summary, indent=2, sort_keys=True, ensure_ascii=False).encode(
            errors="backslashreplace"
        ),
    }


def _parquet(texts: Sequence[ComparedDocument], ids: Sequence[np.ndarray]) -> bytes:
    # Imported here: only the scores of one model are written as Parquet, and the import takes long.
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "dataset_name": pa.array([document.text.name for document in texts], pa.string()),
        "tags": pa.array([list(document.text.tags) for document in texts], pa.list_(pa.string())),
        "shard_name": pa.array([document.text.shard for document in texts], pa.string()),
        "row_index": pa.array([document.text.row for document in texts], pa.int64()),
        "text": pa.array([document.text.text for document in texts], pa.string()),
        "score_byte_start": pa.array([document.begin for document in texts], pa.int32()),
        "score_byte_end": pa.array([document.a.bytes for document in texts], pa.int32()),
        "token_ids": pa.array(list(ids), pa.list_(pa.int32())),
        "per_byte_loss": pa.array([document.a.per_byte for document in texts], pa.list_(pa.float64())),
        "token_byte_starts": pa.array([document.a.begins.astype(np.int32) for document in texts], pa.list_(pa.int32())),
        "token_byte_ends": pa.array([document.a.ends.astype(np.int32) for document in texts], pa.list_(pa.int32())),
        "num_bytes": pa.array([document.a.bytes for document in texts], pa.int32()),
    }
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()
