"""The files of a comparison, by upstream's names: `summary.json`, `report.md`, `worst_documents.jsonl`; and its page.

Numbers for trackers have upstream's names too.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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


def gap_files(folder: str, summary: Mapping[str, Any], page: str) -> dict[str, bytes]:
    """The files of a comparison by their paths, in the order in which they are written: the summary comes last."""
    lines = "".join(json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in worst_documents(summary))
    contents = {
        WORST: lines,
        REPORT: markdown(summary),
        PAGE: page,
        SUMMARY: json.dumps(summary, indent=2, sort_keys=True, ensure_ascii=False),
    }
    return {join(folder, name): content.encode() for name, content in contents.items()}


def worst_documents(summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The documents on which one model is furthest behind, the worst first."""
    for direction in ("model_a_worse", "model_b_worse"):
        for rank, row in enumerate(summary["top_documents"][direction], 1):
            yield {"direction": direction, "rank": rank, **row}


def markdown(summary: Mapping[str, Any]) -> str:
    """The comparison as tables."""
    parts = ["# Perplexity Gap Report\n", f"**Model A:** {_escaped(str(summary['model_a']))}\n"]
    parts.append(f"**Model B:** {_escaped(str(summary['model_b']))}\n")
    parts += [_section(title, summary[key], None) for title, key in _TABLES]
    for title, (what, direction) in _LISTS:
        parts.append(_section(title, summary[what][direction], _LITERALS if what == "top_literals" else None))
    return "\n".join(parts)


def _section(title: str, rows: Sequence[Mapping[str, Any]], note: str | None) -> str:
    if not rows:
        return f"## {title}\n\nNo rows.\n"
    heads = list(rows[0])
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    lines += [f"| {' | '.join(_cell(row[head]) for head in heads)} |" for row in rows]
    return "\n".join([f"## {title}", *(["", note] if note else []), "", *lines, ""])


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.6f}" if isinstance(value, float) else str(value)
    return _escaped(text).replace("\r", " ").replace("\n", "<br>")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|")


def tracked(summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a comparison for trackers."""
    found: dict[str, float] = {}
    for section, name in (("datasets", "datasets"), ("dataset_groups", "groups"), ("pattern_buckets", "patterns")):
        for row in summary[section]:
            if row["gap_bpb"] is None:
                continue
            at = f"gap/{name}/{row['name']}"
            found[f"{at}/bpb_gap"] = row["gap_bpb"]
            if section == "datasets":
                found |= {f"{at}/model_{model}_bpb": row[f"model_{model}_bpb"] for model in "ab"}
            for key in (f"model_{model}_{what}" for model in "ab" for what in _MEASURED):
                if row.get(key) is not None:
                    found[f"{at}/{key}"] = float(row[key])
    return found


def table_of(summary: Mapping[str, Any]) -> str:
    """Sets and kinds of text as lines: bytes, bits per byte of both models, the gap."""
    rows = [("", "bytes", "A", "B", "A − B, bits per byte")]
    for row in (*summary["datasets"], *summary["dataset_groups"], *summary["pattern_buckets"]):
        if row["gap_bpb"] is not None:
            numbers = (f"{row['model_a_bpb']:.4f}", f"{row['model_b_bpb']:.4f}", f"{row['gap_bpb']:+.4f}")
            rows.append((row["name"], f"{row['bytes']:,}", *numbers))
    widths = [max(len(row[n]) for row in rows) for n in range(5)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(row[n].rjust(widths[n]) for n in range(1, 5))]) for row in rows
    )
