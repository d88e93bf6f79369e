# ruff: noqa: E501 - rows of tables
"""Mutations of text files, and of the paths that a run reads and writes."""

import gzip
import random
from pathlib import Path

from helpers.mutations.cases import EVALUATE, REFUSED, Case, evaluation


def text(dice: random.Random, here: Path) -> Case:
    rows = (here / "text.jsonl").read_bytes().splitlines()
    at = dice.randrange(len(rows))
    wrong = dice.choice([
        b'{"text": "the cat', b'{"txt": "x"}', b'{"text": null}', b'{"text": 3}', b"[1]", b"3", b'{"text": "\xff"}',
        b'{"text": "\\ud800"}', b"{" * 3000, b'{"text": ' + b"9" * 6000 + b"}", b"\x00", b"NaN",
        b'{"text": ' + b"[" * 900 + b"]" * 900 + b"}",
    ])  # fmt: skip
    rows[at] = wrong
    content = b"\n".join(rows) + b"\n"
    name = dice.choice(["text.jsonl", "text.jsonl.gz"])
    (here / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (here / "eval.yaml").write_text(EVALUATE.format(here=here, text=name))
    # A null text is an empty document.
    codes = (0,) if wrong == b'{"text": null}' else REFUSED
    return evaluation(here, f"{name}:{at + 1}: {wrong!r:.30}", codes, name if codes == REFUSED else "")


def files(dice: random.Random, here: Path) -> Case:
    content = (here / "text.jsonl").read_bytes()
    packed = gzip.compress(content)
    # What a file is compressed with is seen in its first bytes, whatever its name says.
    name, content, says = dice.choice([
        ("text.jsonl.gz", packed[: dice.randrange(1, len(packed))], "gz"), ("text.jsonl.zst", packed, None),
        ("text.parquet", content, "parquet"), ("text.parquet", b"PAR1" + content + b"PAR1", "parquet"),
        ("text.exe", content, "text.exe"), ("text.json", content, None), ("a{0..99999999999}.txt", b"", "limit"),
        ("missing/*.txt", b"", "missing"), ("a{b", b"", "braces"), ("text.jsonl.gz", content, None),
    ])  # fmt: skip
    if "/" not in name and "{" not in name:
        (here / name).write_bytes(content)
    (here / "eval.yaml").write_text(EVALUATE.format(here=here, text=name))
    return evaluation(here, f"text file {name}", (0,) if says is None else REFUSED, says or "")


def path_of(dice: random.Random, here: Path) -> Case:
    kind = dice.choice(["hf_checkpoint", "output_path", "hf_checkpoint", "checkpoint_path"])
    value = dice.choice(["/dev/null", "/dev/zero", str(here / "text.jsonl"), str(here / "nowhere"), "''", "gs:/", "\x01" * 9,
                         "a" * 5000, str(here / "eval.yaml" / "x"), "org/name@@@", "file://", "~nobody/x"])  # fmt: skip
    if kind == "output_path":
        value = dice.choice([str(here / "eval.yaml" / "x.json"), str(here), "''", "/proc/nothing/x.json"])
    more = ("--hf_checkpoint", "null") if kind == "checkpoint_path" else ()
    return evaluation(here, f"{kind} {value:.40}", REFUSED, "", f"--{kind}", value, *more)
