"""One model's losses over the bytes of texts: upstream's `summary.json` and `scored_documents.parquet` of a model."""

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from levanter.eval.gap.sums import ComparedDocument
from levanter.io import join

SUMMARY, DOCUMENTS = "summary.json", "scored_documents.parquet"
_SECTIONS = ("datasets", "dataset_groups", "pattern_buckets")
_MEASURED = ("tokens", "eval_seconds", "tokens_per_second", "bytes_per_second")


def score_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Model A of a comparison by itself, with the most bits first."""
    found: dict[str, Any] = {"model": summary["model_a"]}
    for section in _SECTIONS:
        rows = []
        for row in summary[section]:
            bpb = row["model_a_bpb"]
            own = {"name": row["name"], "documents": row["documents"], "bytes": row["bytes"], "bpb": bpb}
            own["bits"] = 0.0 if bpb is None else bpb * row["bytes"]
            rows.append(own | {key: row[f"model_a_{key}"] for key in _MEASURED if f"model_a_{key}" in row})
        found[section] = sorted(rows, key=lambda row: -row["bits"])
    return found


def tracked_score(summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers for trackers."""
    found: dict[str, float] = {}
    for section, name in zip(_SECTIONS, ("datasets", "groups", "patterns"), strict=True):
        for row in summary[section]:
            if row["bpb"] is not None:
                keys = ("bpb", *_MEASURED[:3])
                found |= {f"score/{name}/{row['name']}/{k}": float(row[k]) for k in keys if row.get(k) is not None}
    return found


def score_table(summary: Mapping[str, Any]) -> str:
    """Sets and kinds of text as lines: bytes, and bits per byte."""
    rows = [("", "bytes", "bits per byte")]
    for section in _SECTIONS:
        rows += [(r["name"], f"{r['bytes']:,}", f"{r['bpb']:.4f}") for r in summary[section] if r["bpb"] is not None]
    widths = [max(len(row[n]) for row in rows) for n in range(3)]
    return "\n".join(f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c.rjust(widths[2])}" for a, b, c in rows)


def score_files(
    folder: str, summary: Mapping[str, Any], texts: Sequence[ComparedDocument], ids: Sequence[np.ndarray]
) -> dict[str, bytes]:
    """The files of a model by their paths, in the order in which they are written: the summary comes last."""
    return {
        join(folder, DOCUMENTS): _parquet(texts, ids),
        join(folder, SUMMARY): json.dumps(summary, indent=2, sort_keys=True, ensure_ascii=False).encode(),
    }


def _parquet(texts: Sequence[ComparedDocument], ids: Sequence[np.ndarray]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "dataset_name": pa.array([each.text.name for each in texts], pa.string()),
        "tags": pa.array([list(each.text.tags) for each in texts], pa.list_(pa.string())),
        "shard_name": pa.array([each.text.shard for each in texts], pa.string()),
        "row_index": pa.array([each.text.row for each in texts], pa.int64()),
        "text": pa.array([each.text.text for each in texts], pa.string()),
        "score_byte_start": pa.array([each.begin for each in texts], pa.int32()),
        "score_byte_end": pa.array([each.a.bytes for each in texts], pa.int32()),
        "token_ids": pa.array(list(ids), pa.list_(pa.int32())),
        "per_byte_loss": pa.array([each.a.per_byte for each in texts], pa.list_(pa.float64())),
        "token_byte_starts": pa.array([each.a.begins.astype(np.int32) for each in texts], pa.list_(pa.int32())),
        "token_byte_ends": pa.array([each.a.ends.astype(np.int32) for each in texts], pa.list_(pa.int32())),
        "num_bytes": pa.array([each.a.bytes for each in texts], pa.int32()),
    }
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()
