"""Caches that are written twice, at once, by a process that is killed, or from values that do not fit."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from levanter.io.lease import LeaseTakenError
from levanter.upstream.facades.caches import SerialCacheWriter, ShardedDataSource, TreeCache, build_or_load_cache
from levanter.upstream.facades.jagged import JaggedArrayStore

EXEMPLAR = {"input_ids": np.zeros((0,), np.int32)}
KILLED = """
import os, signal, sys
import numpy as np
from levanter.upstream.facades.caches import SerialCacheWriter
with SerialCacheWriter(sys.argv[1], {"input_ids": np.zeros((0,), np.int32)}, mode=sys.argv[2]) as writer:
    writer.write_batch([{"input_ids": [9, 9]}])
    os.kill(os.getpid(), signal.SIGKILL)
"""
BUILDS = """
import json, sys, time
import numpy as np
from levanter.upstream.facades.caches import ShardedDataSource, build_or_load_cache
opened = 0
class Source(ShardedDataSource):
    shard_names = ["a", "b"]
    def open_shard_at_row(self, shard_name, row):
        global opened
        opened += 1
        for number in range(row, 40):
            time.sleep(0.05)
            yield {"input_ids": np.full(number % 5 + 1, number + 1000 * (shard_name == "b"), np.int32)}
cache = build_or_load_cache(sys.argv[1], Source(), None)
rows = [row["input_ids"].tolist() for row in cache.get_batch_sync(range(len(cache)))]
print(json.dumps({"rows": rows, "opened": opened}))
"""


class Source(ShardedDataSource):
    """Rows of two shards."""

    @property
    def shard_names(self) -> Sequence[str]:
        return ["a", "b"]

    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[dict]:
        for number in range(row, 40):
            yield {"input_ids": np.full(number % 5 + 1, number + 1000 * (shard_name == "b"), np.int32)}


def ids_of(cache: TreeCache) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in cache.get_batch_sync(range(len(cache)))]


EXPECTED = [[n + 1000 * b] * (n % 5 + 1) for b in (0, 1) for n in range(40)]


def write(folder: str) -> None:
    with SerialCacheWriter(folder, EXEMPLAR) as writer:
        writer.write_batch([{"input_ids": [1, 2]}, {"input_ids": [3]}])


@pytest.mark.parametrize("mode", ["w", "a"])
def test_a_cache_whose_rewriting_was_killed_is_not_finished(tmp_path, mode):
    """Its old ledger would vouch for new rows."""
    folder = str(tmp_path / "cache")
    write(folder)
    assert subprocess.run([sys.executable, "-c", KILLED, folder, mode], check=False).returncode == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match="not finished"):
        TreeCache.load(folder, EXEMPLAR)
    assert ids_of(build_or_load_cache(folder, Source(), None)) == EXPECTED


def test_two_processes_build_one_cache_once(tmp_path):
    folder = str(tmp_path / "cache")
    processes = [
        subprocess.Popen([sys.executable, "-c", BUILDS, folder], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    results = [json.loads(process.communicate(timeout=200)[0]) for process in processes]
    assert [result["rows"] for result in results] == [EXPECTED, EXPECTED]
    # Both open a shard for its first record; the other one waited and read what the first had built.
    assert sorted(result["opened"] for result in results) == [1, 3]


def test_a_second_writer_is_refused_while_the_first_writes(tmp_path):
    folder = str(tmp_path / "cache")
    with SerialCacheWriter(folder, EXEMPLAR) as first:
        first.write_batch([{"input_ids": [5]}])
        with pytest.raises(LeaseTakenError, match="building a cache"):
            SerialCacheWriter(folder, EXEMPLAR)
        first.write_batch([{"input_ids": [6]}])
    assert ids_of(first.result()) == [[5], [6]]
    write(folder)
    assert ids_of(TreeCache.load(folder, EXEMPLAR)) == [[1, 2], [3]]


def test_a_source_that_fails_leaves_no_cache_and_no_lease(tmp_path):
    class Failing(Source):
        def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[dict]:
            yield from super().open_shard_at_row(shard_name, row)
            raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        build_or_load_cache(str(tmp_path), Failing(), None)
    with pytest.raises(FileNotFoundError):
        TreeCache.load(str(tmp_path), EXEMPLAR)
    assert ids_of(build_or_load_cache(str(tmp_path), Source(), None)) == EXPECTED


def test_a_ledger_of_other_rows_is_damage(tmp_path):
    write(str(tmp_path))
    ledger = tmp_path / "shard_ledger.json"
    ledger.write_text(json.dumps(json.loads(ledger.read_text()) | {"total_num_rows": 3}))
    with pytest.raises(ValueError, match="its ledger counts 3 rows and its arrays have 2"):
        TreeCache.load(str(tmp_path), EXEMPLAR)
    ledger.write_text("{")
    with pytest.raises(ValueError, match=r"shard_ledger.json: not a cache's ledger"):
        TreeCache.load(str(tmp_path), EXEMPLAR)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 1.5, float("nan")])
def test_integers_that_do_not_fit_are_refused(value):
    store = JaggedArrayStore.open(None, mode="w", dtype=np.int32)
    store.append([1, 2.0])
    with pytest.raises(ValueError, match="cannot be stored as int32"):
        store.append([3, value])
    assert len(store) == 1 and store[0].tolist() == [1, 2]
