"""Readers: every kind of file gives the same documents, and damage is reported with its place."""

import gzip
import json
import random

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from levanter.data.errors import DataError
from levanter.data.formats import TextLmDatasetFormat
from levanter.data.readers import file_kind, read_documents, read_records
from levanter.io import MissingFileError

pytestmark = pytest.mark.quick

TEXTS = ["Erste Zeile\r\nzweite", "", "日本 é\u2028x", "last \N{GRINNING FACE}"]
FORMAT = TextLmDatasetFormat()


def texts_of(path, format=FORMAT):
    return [document.text for document in read_documents(str(path), format)]


def json_lines(texts, key="text"):
    return "".join(json.dumps({"id": i, key: text}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(texts))


def contents():
    lines = json_lines(TEXTS).encode()
    whole = json.dumps([{"text": text} for text in TEXTS]).encode()
    return {
        "x.jsonl": lines,
        "x.ndjson": lines.rstrip(b"\n"),
        "x.jsonl.gz": gzip.compress(lines, mtime=0),
        "x.jsonl.zst": zstandard.compress(lines),
        "frames.jsonl.zst": zstandard.compress(lines[:50]) + zstandard.compress(lines[50:]),
        "members.jsonl.gz": gzip.compress(lines[:50], mtime=0) + gzip.compress(lines[50:]),
        "mark.jsonl": b"\xef\xbb\xbf" + lines,
        "blank.jsonl": b"\n" + lines.replace(b"\n", b"\n \r\n"),
        "x.json": whole,
        "strings.json": json.dumps(TEXTS).encode(),
        "x.json.gz": gzip.compress(whole, mtime=0),
        # The name is not what the file is: compression, and one value or one on each line.
        "gzip.jsonl": gzip.compress(lines, mtime=0),
        "zstd.jsonl.gz": zstandard.compress(lines),
        "plain.jsonl.zst": lines,
        "lines.json.gz": gzip.compress(lines, mtime=0),
        "blank.json": b"\xef\xbb\xbf\r\n\n" + lines,
        "pretty.jsonl": json.dumps([{"text": text} for text in TEXTS], indent=1).encode(),
    }


@pytest.mark.parametrize("name", contents())
def test_records_in_every_wrapping(tmp_path, name):
    (tmp_path / name).write_bytes(contents()[name])
    assert texts_of(tmp_path / name) == TEXTS


def drawn_file(dice: random.Random) -> tuple[str, bytes, list[str]]:
    """A name, and a content whose compression, layout and texts the name does not decide."""
    texts = [dice.choice(TEXTS) + dice.choice(["", "x" * dice.randrange(4_000)]) for _ in range(dice.randrange(1, 9))]
    layout = dice.choice(["lines", "lines", "list", "strings", "blank lines"])
    content = json_lines(texts).encode()
    if layout == "blank lines":
        content = content.replace(b"\n", b"\n \r\n")
    elif layout != "lines":
        content = json.dumps(texts if layout == "strings" else [{"text": text} for text in texts]).encode()
    mark = b"\xef\xbb\xbf" if dice.random() < 0.2 else b""
    compress = dice.choice([None, gzip.compress, zstandard.compress])
    cut = dice.randrange(len(content)) if dice.random() < 0.4 else len(content)
    parts = [part for part in (mark + content[:cut], content[cut:]) if part]
    packed = b"".join(parts) if compress is None else b"".join(map(compress, parts))
    # A list of strings has no keys, which only a file of one value may lack.
    stem = "x.json" if layout in ("list", "strings") else dice.choice(["x.json", "x.jsonl", "x.ndjson"])
    return stem + dice.choice(["", ".gz", ".zst"]), packed, texts


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(n, marks=pytest.mark.slow) for n in range(40, 400))])
def test_drawn_wrappings_are_known_by_their_first_bytes(tmp_path, seed):
    name, content, texts = drawn_file(random.Random(f"wrapping {seed}"))
    (tmp_path / name).write_bytes(content)
    assert texts_of(tmp_path / name) == texts, name


KINDS = [
    pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view(),
    pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_string()),
]  # fmt: skip


def write_rows(table, path):
    """A table as Parquet, or as an Arrow file of one of its two formats."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=3, compression="zstd")
        return
    new = pa.ipc.new_stream if path.suffix == ".arrow" else pa.ipc.new_file
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


@pytest.mark.parametrize("ending", ["parquet", "arrow", "feather"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_text_columns(tmp_path, kind, ending):
    """Text is text however a column stores it, and a null is an empty text."""
    path = tmp_path / f"x.{ending}"
    texts = pa.array([*TEXTS, None]).cast(pa.large_string())
    texts = texts.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else texts.cast(kind)
    write_rows(pa.table({"n": [1, 2, 3, 4, 5], "text": texts}), path)
    documents = list(read_documents(str(path), FORMAT))
    assert [document.text for document in documents] == [*TEXTS, ""]
    assert documents[3].origin == f"{path}:3"
    (tmp_path / "x.jsonl").write_text(json_lines([*TEXTS, None]))
    assert texts_of(tmp_path / "x.jsonl") == [*TEXTS, ""]


def test_text_files_are_one_document_or_one_a_line(tmp_path):
    text = "one\r\n\n  two é\nthree"
    for name, content in (
        ("x.txt", text.encode()),
        ("x.txt.gz", gzip.compress(text.encode())),
        ("x.txt.zst", zstandard.compress(text.encode())),
        ("mark.txt", b"\xef\xbb\xbf" + text.encode()),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        assert texts_of(path) == [text]
        assert texts_of(path, TextLmDatasetFormat(txt_documents="line")) == ["one", "  two é", "three"]
    (tmp_path / "empty.txt").write_bytes(b"")
    assert texts_of(tmp_path / "empty.txt") == []


def test_large_compressed_streams_are_read_whole(tmp_path):
    texts = [f"document {i} " + "x" * (i % 997) for i in range(5000)]
    (tmp_path / "x.jsonl.zst").write_bytes(zstandard.compress(json_lines(texts).encode()))
    assert texts_of(tmp_path / "x.jsonl.zst") == texts


def test_remote_files():
    fs = fsspec.filesystem("memory")
    fs.pipe("/bucket/x.jsonl.gz", gzip.compress(json_lines(TEXTS).encode()))
    assert texts_of("memory://bucket/x.jsonl.gz") == TEXTS
    fs.store.clear()


def test_another_key(tmp_path):
    (tmp_path / "x.jsonl").write_text(json_lines(["a", "b"], key="content"))
    assert texts_of(tmp_path / "x.jsonl", TextLmDatasetFormat(text_key="content")) == ["a", "b"]


def error_of(path, format=FORMAT):
    with pytest.raises(DataError) as info:
        texts_of(path, format)
    return str(info.value).replace(str(path.parent), "")


def test_a_missing_key_names_line_and_keys(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n\n{"id": 1, "txt": "b"}\n')
    assert error_of(path) == "/x.jsonl:3: no key 'text' (format.text_key); it has 'id', 'txt'; did you mean 'txt'?"
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"body": ["a"], "n": [1]}), path)
    assert error_of(path) == "/x.parquet: no column 'text' (format.text_key); it has 'body', 'n'"


BAD_UTF8 = b'{"text": "a"}\n{"text": "\xe9t"}\n'
ENDINGS = ".txt, .md, .jsonl, .ndjson, .json (each also with .gz or .zst), .parquet, .arrow, .feather"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.txt", b"fine \xff\xfe", "/x.txt: not UTF-8 at byte 5 (ff fe: invalid start byte)"),
        ("x.jsonl", BAD_UTF8, "/x.jsonl: not UTF-8 at byte 24 (e9 74 22 7d: invalid continuation byte)"),
        ("x.txt.gz", gzip.compress(b"fine \xff", mtime=0), "/x.txt.gz: not UTF-8 at byte 5 (ff: invalid start byte)"),
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', "/x.jsonl:2: not JSON at column 10 (Expecting value)"),
        ("x.jsonl", b"[\n1]\n", "/x.jsonl[0]: expected an object with the key 'text', found int"),
        ("x.jsonl", b'{"text": \n{"text": "a"}\n', "/x.jsonl:1: not JSON at column 10 (Expecting value)"),
        ("x.jsonl", b'\n{"text: "a"}\n', "/x.jsonl:2: not JSON at column 10 (Expecting ':' delimiter)"),
        ("x.jsonl", b'["a"]\n', "/x.jsonl:1: expected an object with the key 'text', found list"),
        ("x.jsonl", b'{"text": 7}\n', "/x.jsonl:1: 'text' is int, expected a string"),
        ("x.jsonl", b'{"text": "ab\\ud83d"}\n', "/x.jsonl:1: 'text': not text: \\ud83d at character 2 is "
         "half of a surrogate pair"),
        ("x.json", b'{"text": "a"}\n{"text": "b"\n', "/x.json:2: not JSON at column 13 (Expecting ',' delimiter)"),
        ("x.json", b'{"a": 1,\n"text": "b"\n', "/x.json:3: not JSON at column 1 (Expecting ',' delimiter)"),
        ("x.json", b'', "/x.json:1: not JSON at column 1 (Expecting value)"),
        ("x.jsonl", b"PAR1PAR1", "/x.jsonl: the content is Parquet: its name must end in .parquet"),
        ("x.jsonl", b"BZh91AY&SYx", "/x.jsonl: the content is compressed with bzip2: decompress it, or compress it "
         "with gzip or Zstandard"),
        ("x.json", b'[{"text": "a"}, {"no": 1}]', "/x.json[1]: no key 'text' (format.text_key); it has 'no'"),
        ("x.csv", b"a,b", f"/x.csv: no reader for this kind of file; known: {ENDINGS}"),
    ],
)  # fmt: skip
def test_bad_content(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content)
    assert error_of(path) == expected


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["cut off", "flipped"])
def test_damaged_streams(tmp_path, kind, damage):
    content = json_lines([f"document {i}" for i in range(3000)]).encode()
    zstd = zstandard.ZstdCompressor(write_checksum=True)
    packed = gzip.compress(content, mtime=0) if kind == "gz" else zstd.compress(content)
    if damage == "flipped":
        packed = packed[:2000] + bytes([packed[2000] ^ 0x55]) + packed[2001:]
    path = tmp_path / f"x.jsonl.{kind}"
    path.write_bytes({"cut off": packed[: len(packed) // 2], "flipped": packed}[damage])
    message = error_of(path)
    assert message.startswith("/x.jsonl") and (
        "damaged or truncated" in message or "not UTF-8" in message or "not JSON" in message
    )
    if damage != "flipped":
        assert "damaged or truncated" in message


def test_damaged_parquet(tmp_path):
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 nothing else")
    assert "/x.parquet: not a Parquet file" in error_of(path)
    pq.write_table(pa.table({"text": [1, 2], "body": ["a", "b"]}), path)
    assert error_of(path) == (
        "/x.parquet: column 'text' is int64, expected string; set format.text_key to a column of text: body"
    )
    pq.write_table(pa.table({"text": [b"a", b"\xff"]}), path)
    assert error_of(path) == "/x.parquet:1: 'text' is not UTF-8 at byte 0 (invalid start byte)"
    (tmp_path / "x.arrow").write_bytes(b"ARROW1 nothing else")
    assert "/x.arrow: not an Arrow file" in error_of(tmp_path / "x.arrow")


def test_missing_files(tmp_path):
    (tmp_path / "data.parquet").write_bytes(b"")
    with pytest.raises(MissingFileError, match=r"did you mean data\.parquet"):
        texts_of(tmp_path / "date.parquet")


def test_kinds():
    assert file_kind("gs://b/X.JSONL.GZ") == ("jsonl", "gz")
    assert file_kind("https://host/x.txt?download=true") == ("txt", None)


def test_records_whole(tmp_path):
    """The same records out of every kind of file, each with its place."""
    records = [{"ids": [1, 2], "who": {"a": "é"}}, {"ids": [], "who": {"a": "b"}}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "x.json").write_text(json.dumps(records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "x.parquet")
    write_rows(pa.Table.from_pylist(records), tmp_path / "x.arrow")
    rows, lines = (":0", ":1"), (":1", ":2")
    for name, places in (("x.jsonl", lines), ("x.json", ("[0]", "[1]")), ("x.parquet", rows), ("x.arrow", rows)):
        path = str(tmp_path / name)
        assert list(read_records(path)) == [(record, path + at) for record, at in zip(records, places, strict=True)]
    with pytest.raises(DataError, match=r"and \.parquet, not from \.txt"):
        list(read_records(str(tmp_path / "x.txt")))
