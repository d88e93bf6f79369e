"""Upstream's data sources and caches: files read by json and pyarrow, stores read by TensorStore alone."""

import asyncio
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from levanter.upstream.facades.caches import (
    SerialCacheWriter,
    ShardedDataSource,
    TreeCache,
    batched,
    build_or_load_cache,
)
from levanter.upstream.facades.datasets import BatchProcessor
from levanter.upstream.facades.jagged import JaggedArrayStore, PreparedBatch, TreeStore
from levanter.upstream.facades.sources import (
    ParquetDataSource,
    TextUrlDataSource,
    datasource_from_jsonl,
    sniff_format,
)
from levanter.upstream.unsupported.absent import AudioTextUrlDataSource

RECORDS = [{"text": f"row {n}", "n": n} for n in range(7)]
ROWS = [[5, 6, 7], [8], [], [9, 10]]


def jsonl(path: Path, records: list[dict] = RECORDS) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


class Doubled(BatchProcessor[dict, dict]):
    """The number of a record twice, in columns; counts its calls."""

    calls = 0

    def __call__(self, batch):
        self.calls += 1
        return {"ids": [[record["n"]] * 2 for record in batch]}

    @property
    def output_exemplar(self):
        return {"ids": np.zeros(0, np.int32)}

    @property
    def num_cpus(self):
        return 1

    @property
    def metadata(self):
        return {"by": 2}


class Numbers(ShardedDataSource[dict]):
    """Two shards of records; the second one fails at `broken`."""

    def __init__(self, broken: int | None = None):
        self.broken = broken

    @property
    def shard_names(self):
        return ["a", "b"]

    def open_shard_at_row(self, shard_name, row):
        for n in range(row, 5):
            if shard_name == "b" and n == self.broken:
                raise OSError("no such row")
            yield {"n": n + 10 * (shard_name == "b")}


def test_files_are_shards_from_any_row(tmp_path):
    whole = jsonl(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(Path(whole).read_bytes()))
    source = datasource_from_jsonl([str(tmp_path / "*.jsonl*")])
    assert list(source.shard_names) == ["a_jsonl", "b_jsonl_gz"] and source.num_shards == 2
    assert list(source) == RECORDS * 2
    assert list(source.open_shard_at_row("b_jsonl_gz", 4)) == RECORDS[4:]
    assert list(source.map(lambda record: record["n"]))[5:9] == [5, 6, 0, 1]
    pairs = source.map_batches(lambda rows: {"n": [row["n"] for row in rows for _ in range(2)]}, 3)
    assert [row["n"] for row in pairs.open_shard_at_row("a_jsonl", 3)] == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert list(batched(range(5), 2)) == [[0, 1], [2, 3], [4]]
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl[\s\S]*nor\.jsonl"):
        datasource_from_jsonl([str(tmp_path / "none.jsonl"), str(tmp_path / "nor.jsonl")]).shard_names  # noqa: B018
    with pytest.raises(ValueError, match="listed twice"):
        datasource_from_jsonl([whole, whole]).shard_names  # noqa: B018


def test_texts_and_columns(tmp_path):
    pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text("one\n\ntwo\n")
    texts = TextUrlDataSource([str(tmp_path / "a.parquet"), str(tmp_path / "b.txt")])
    assert list(texts) == [record["text"] for record in RECORDS] + ["one\n", "\n", "two\n"]
    columns = ParquetDataSource([str(tmp_path / "a.parquet")], columns=["n"])
    assert list(columns.open_shard_at_row(columns.shard_names[0], 5)) == [{"n": 5}, {"n": 6}]
    with pytest.raises(ValueError, match="no key m; the record has text, n"):
        list(ParquetDataSource([str(tmp_path / "a.parquet")], columns=["n", "m"]))
    with pytest.raises(NotImplementedError, match="text only"):
        AudioTextUrlDataSource(["a.jsonl"])


@pytest.mark.parametrize(
    ("content", "kind"), [('[{"a": 1}]', ".json"), ('{"a": 1}\n{"a": 2}\n', ".jsonl"), ('{\n"a": 1\n}', ".json")]
)
def test_the_kind_of_a_json_file_is_its_content(tmp_path, content, kind):
    (tmp_path / "a.json").write_text(content)
    assert sniff_format(str(tmp_path / "a.json")) == kind


def test_jagged_files_are_laid_out_as_upstream_lays_them_out(tmp_path):
    ts = pytest.importorskip("tensorstore")

    def stored(name: str):
        return ts.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/{name}/"}, open=True).result()

    store = JaggedArrayStore.open(str(tmp_path), item_rank=1, dtype=np.int32)
    store.extend([np.array(row, np.int32) for row in ROWS])
    # `offsets[0]` is the number of rows, where the first offset, which is 0, would be.
    assert stored("offsets")[:5].read().result().tolist() == [4, 3, 4, 4, 6]
    assert stored("data")[:6].read().result().tolist() == [5, 6, 7, 8, 9, 10]
    again = JaggedArrayStore.open(str(tmp_path), mode="r", item_rank=1, dtype=np.int32)
    assert [row.tolist() for row in again] == ROWS and again[-1].tolist() == [9, 10] and len(again[1:3]) == 2
    store.trim_to_size(2)
    store.append(np.array([1], np.int32))
    assert [row.tolist() for row in again.reload()] == [[5, 6, 7], [8], [1]]
    with pytest.raises(IndexError, match="row 3 of 3"):
        store[3]
    with pytest.raises(ValueError, match="rows of 1 axes, got 2"):
        store.extend(PreparedBatch.from_batch([np.zeros((2, 2), np.int32)]))
    with pytest.raises(FileNotFoundError, match="no array"):
        JaggedArrayStore.open(str(tmp_path / "none"), mode="r", dtype=np.int32)


def test_trees_of_several_axes_come_back(tmp_path):
    exemplar = {"a": np.zeros((0, 2), np.float32), "b": {"c": np.zeros(0, np.int64)}}
    rows = [{"a": np.ones((n, 2), np.float32) * n, "b": {"c": np.arange(n)}} for n in (3, 2, 1)]
    store = TreeStore.open(exemplar, str(tmp_path), mode="w")
    store.extend(rows[:2])
    follower = TreeStore.open(exemplar, str(tmp_path), mode="r")
    assert len(follower) == 2
    store.extend(rows[2:])
    for row, expected in zip(follower.reload(), rows, strict=True):
        np.testing.assert_array_equal(row["a"], expected["a"])
        np.testing.assert_array_equal(row["b"]["c"], expected["b"]["c"])
    in_memory = TreeStore.open(exemplar, None)
    in_memory.extend_with_batch({"a": [row["a"] for row in rows], "b": {"c": [row["b"]["c"] for row in rows]}})
    assert len(in_memory) == 3 and in_memory[0]["a"].shape == (3, 2)


def test_a_cache_is_built_once_in_the_order_of_its_source(tmp_path):
    expected = [[n, n] for shard in (0, 10) for n in range(shard, shard + 5)]
    processor = Doubled()
    for _ in range(2):
        cache = build_or_load_cache(str(tmp_path / "c"), Numbers(), processor)
        assert [row["ids"].tolist() for row in cache] == expected and processor.calls == 2
    ledger = json.loads((tmp_path / "c/shard_ledger.json").read_text())
    assert ledger["is_finished"] and ledger["shard_rows"] == {"a": 5, "b": 5} and ledger["total_num_rows"] == 10
    assert ledger["metadata"] == {"preprocessor_metadata": {"by": 2}}
    lazy = build_or_load_cache(str(tmp_path / "d"), Numbers(), Doubled(), await_finished=False)
    assert [row["ids"].tolist() for row in asyncio.run(lazy.get_batch([9, 0]))] == [[14, 14], [0, 0]]
    doubled = Numbers().map_batches(processor, 4, output_exemplar=processor.output_exemplar)
    assert [row["ids"].tolist() for row in doubled.build_or_load_cache(str(tmp_path / "e"))] == expected


def test_a_failed_build_says_so_and_leaves_no_valid_cache(tmp_path):
    with pytest.raises(OSError, match="no such row"):
        build_or_load_cache(str(tmp_path), Numbers(broken=3), Doubled())
    late = build_or_load_cache(str(tmp_path), Numbers(broken=3), Doubled(), await_finished=False)
    with pytest.raises(OSError, match="no such row"):
        asyncio.run(late.get_batch([9]))
    with pytest.raises(FileNotFoundError):
        TreeCache.load(str(tmp_path), Doubled().output_exemplar)
    assert len(build_or_load_cache(str(tmp_path), Numbers(), Doubled())) == 10


def test_the_serial_writer_is_valid_only_at_its_end(tmp_path):
    exemplar = {"input_ids": np.zeros(0, np.int32)}
    writer = SerialCacheWriter(str(tmp_path), exemplar)
    writer.write_batch([{"input_ids": [1]}])
    writer.__exit__(KeyError)
    with pytest.raises(ValueError, match="with"):
        writer.result()
    with SerialCacheWriter(str(tmp_path), exemplar) as writer:
        writer.write_batch([{"input_ids": row} for row in ROWS])
        writer.write_batch({"input_ids": ROWS})
    assert [row["input_ids"].tolist() for row in writer.result()] == ROWS * 2
