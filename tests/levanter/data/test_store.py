"""The token store: what is written is read, whatever happens in between; what is wrong is named."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.small_tokenizer import BOS, EOS, SmallTokenizer

from levanter.data import DataError, StoreError, build_tokens, resolve_training, store_build, store_write
from levanter.data.config import CacheOptions, DatasetComponent, LmDataConfig
from levanter.data.manifest import read_manifest
from levanter.data.sources import UrlDatasetSource
from levanter.data.store import StoredTokens, open_store

BUILD = Path(__file__).parents[2] / "helpers" / "build_store.py"


class OtherTokenizer(SmallTokenizer):
    name = "other"
    hash = "0" * 64


@pytest.fixture
def texts(tmp_path):
    """Seven files of documents, one of them empty; returns their texts."""
    rng = random.Random(0)
    folder = tmp_path / "sources"
    folder.mkdir()
    texts = []
    for number in range(7):
        documents = [] if number == 3 else ["the " * rng.randrange(60) + f"{number}é日本"[: rng.randrange(5)]
                                            for _ in range(rng.randrange(20, 60))]  # fmt: skip
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        texts += documents
    return texts


def config_of(tmp_path, cache="cache", *, groups=5, **more):
    source = UrlDatasetSource(train_urls=[f"{tmp_path}/sources/*.jsonl"])
    return LmDataConfig(
        cache_dir=str(tmp_path / cache),
        cache_options=CacheOptions(num_shard_groups=groups),
        components={"text": DatasetComponent(source=source)},
        **more,
    )


def build(config, tokenizer=None, on_progress=None):
    (found,) = build_tokens(config, resolve_training(config).sets, tokenizer or SmallTokenizer(), on_progress)
    return found


def expected_stream(texts):
    documents = [[BOS, *SmallTokenizer().encode_with_offsets(text)[0].tolist(), EOS] for text in texts if text]
    return documents, [token for document in documents for token in document]


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("groups", [1, 3, 128])
@pytest.mark.parametrize("small_files", [False, True])
def test_what_is_written_is_read(tmp_path, texts, groups, small_files, monkeypatch):
    if small_files:
        monkeypatch.setattr(store_write, "FILE_VALUES", 512)
        monkeypatch.setattr(store_write, "CHUNK_VALUES", 64)
        monkeypatch.setattr(store_build, "BATCH_CHARS", 700)
    config = config_of(tmp_path, groups=groups)
    stored = build(config)
    assert isinstance(stored, StoredTokens) and len(stored.ids) == min(groups, 7)
    documents, stream = expected_stream(texts)
    assert stored.starts.tolist() == np.cumsum([0] + [len(d) for d in documents]).tolist()
    assert stored.largest_id == max(stream)
    rng = np.random.default_rng(0)
    begins = rng.integers(0, len(stream) - 1, 200)
    counts = np.minimum(rng.integers(0, 3000, 200), len(stream) - begins)
    ids, weights = stored.read(begins, counts)
    assert weights is None and ids.dtype == np.int32
    assert ids.tolist() == [t for b, n in zip(begins, counts, strict=True) for t in stream[b : b + n]]
    # In memory it is the same.
    live = build(replace(config, cache_dir=None))
    assert not isinstance(live, StoredTokens)
    assert live.ids.tolist() == stream and live.starts.tolist() == stored.starts.tolist()
    skipped = sum(mark.skipped for mark in stored.manifest.shards)
    assert skipped == sum(not text for text in texts) and stored.manifest.documents == len(documents)


def test_a_finished_store_is_opened_not_built(tmp_path, texts):
    config = config_of(tmp_path)
    build(config)
    before = tree(tmp_path / "cache")

    class NoTokenizer(SmallTokenizer):
        def encode_batch(self, texts):
            raise AssertionError("nothing is left to tokenize")

    build(config, NoTokenizer())
    assert tree(tmp_path / "cache") == before


def test_progress_ends_at_all_of_it(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(store_build, "BATCH_CHARS", 500)
    seen = []
    stored = build(config_of(tmp_path), on_progress=seen.append)
    assert [s.tokens for s in seen] == sorted(s.tokens for s in seen)
    assert [s.fraction for s in seen] == sorted(s.fraction for s in seen)
    assert seen[-1].tokens == stored.starts[-1] and 0.9 < seen[-1].fraction <= 1


def run_build(tmp_path, cache, moment=None):
    words = [sys.executable, str(BUILD), str(tmp_path / "sources"), str(tmp_path / cache)]
    return subprocess.run(
        words + ([] if moment is None else [str(moment)]), capture_output=True, text=True, check=False
    )


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path, texts):
    """`kill -9` at the n-th step of the build, for n over the whole of it, again and again on one folder."""
    done = run_build(tmp_path, "whole")
    assert done.returncode == 0, done.stderr
    wanted = tree(tmp_path / "whole")
    assert len([name for name in wanted if name.endswith("shard.json")]) == 5
    killed = 0
    for moment in (1, 5, 9, 14, 27):
        result = run_build(tmp_path, "often", moment)
        assert result.returncode in (-9, 0), result.stderr
        killed += result.returncode == -9
    assert killed >= 3
    for moment in (8, 21):
        assert run_build(tmp_path, f"once{moment}", moment).returncode == -9
        assert run_build(tmp_path, f"once{moment}").returncode == 0
        assert tree(tmp_path / f"once{moment}") == wanted
    assert run_build(tmp_path, "often").returncode == 0
    assert tree(tmp_path / "often") == wanted


def test_shards_that_count_are_not_made_again(tmp_path, texts):
    config = config_of(tmp_path)
    build(config)
    folder = tmp_path / "cache" / "text" / "train"
    manifest = read_manifest(str(folder))
    (folder / "manifest.json").write_bytes(replace(manifest, shards=None).content())
    (folder / "shards" / "00002" / "shard.json").unlink()
    (folder / "shards" / "00003" / "ids" / "c" / "0").write_bytes(b"cut")
    encoded = []

    class Counting(SmallTokenizer):
        def encode_batch(self, texts):
            encoded.extend(texts)
            return super().encode_batch(texts)

    build(config, Counting())
    documents = [manifest.shards[i].documents for i in (2, 3)]
    assert len(encoded) == sum(documents)
    assert read_manifest(str(folder)) == manifest


def test_another_tokenizer_is_named(tmp_path, texts):
    build(config_of(tmp_path))
    with pytest.raises(StoreError) as info:
        build(config_of(tmp_path, enforce_eos=False), OtherTokenizer())
    message = str(info.value)
    assert "was built from something else" in message and str(tmp_path / "cache" / "text" / "train") in message
    assert "tokenizer: built with small (264 ids, hash" in message and "configured other" in message
    assert "eos: built with 2, configured None" in message
    assert "give another cache_dir, or delete this folder" in message


def test_other_sources_are_named(tmp_path, texts):
    build(config_of(tmp_path))
    sources = tmp_path / "sources"
    (sources / "0.jsonl").write_text(json.dumps({"text": "x"}) + "\n")
    (sources / "5.jsonl").unlink()
    (sources / "9.jsonl").write_text(json.dumps({"text": "x"}) + "\n")
    with pytest.raises(StoreError) as info:
        build(config_of(tmp_path))
    message = str(info.value)
    assert f"source {sources}/5.jsonl: in the store, not configured" in message
    assert f"source {sources}/9.jsonl: configured, not in the store" in message
    assert f"source {sources}/0.jsonl: had " in message and "has 14" in message


def test_a_half_built_store_of_something_else_is_refused(tmp_path, texts):
    assert run_build(tmp_path, "cache", 14).returncode == -9
    assert read_manifest(str(tmp_path / "cache/text/train")).shards is None
    assert len([*(tmp_path / "cache").rglob("shard.json")]) > 0
    with pytest.raises(StoreError, match="tokenizer: built with small"):
        build(config_of(tmp_path), OtherTokenizer())


def test_files_that_are_cut_short_or_gone_are_named(tmp_path, texts):
    config = config_of(tmp_path)
    build(config)
    shards = tmp_path / "cache" / "text" / "train" / "shards"
    ids = shards / "00001" / "ids" / "c" / "0"
    size = ids.stat().st_size
    with open(ids, "r+b") as file:
        file.truncate(size - 1)
    (shards / "00004" / "offsets" / "zarr.json").unlink()
    with pytest.raises(StoreError) as info:
        build(config)
    message = str(info.value)
    assert f"{ids}: {size - 1:,} bytes, but {size:,} were written" in message
    assert f"{shards}/00004/offsets/zarr.json: missing" in message
    assert "token store is damaged; delete it to rebuild it" in message


def test_flipped_bytes_are_found_when_they_are_read(tmp_path, texts):
    config = config_of(tmp_path)
    stored = build(config)
    ids = tmp_path / "cache" / "text" / "train" / "shards" / "00001" / "ids" / "c" / "0"
    content = bytearray(ids.read_bytes())
    content[10] ^= 0x40
    ids.write_bytes(content)
    again = build(config)
    first = stored.manifest.shards[0].tokens
    assert len(again.read(np.array([0]), np.array([first]))[0]) == first
    with pytest.raises(StoreError, match=r"shards/00001/ids: tokens 0 to [0-9,]+ cannot be read; the file is damaged"):
        again.read(np.array([first]), np.array([5]))
    offsets = ids.parents[2] / "offsets" / "c" / "0"
    content = bytearray(offsets.read_bytes())
    content[10] ^= 0x40
    offsets.write_bytes(content)
    with pytest.raises(StoreError, match=r"shards/00001/offsets: damaged"):
        build(config)


def test_a_damaged_manifest_is_named(tmp_path, texts):
    config = config_of(tmp_path)
    build(config)
    manifest = tmp_path / "cache" / "text" / "train" / "manifest.json"
    content = manifest.read_text()
    for damage, message in (
        (content[:50], "damaged"),
        (content.replace('"version": 1', '"version": 7'), "expected version 1 of a token store, found 7"),
        (content.replace('"identity"', '"identty"'), "damaged"),
    ):
        manifest.write_text(damage)
        with pytest.raises(DataError, match=message):
            build(config)


def test_a_store_without_its_sources(tmp_path, texts):
    """Where the files are not, the store is enough; where neither is, both are named."""
    config = config_of(tmp_path)
    stored = build(config)
    for path in (tmp_path / "sources").iterdir():
        path.unlink()
    (one,) = resolve_training(config).sets
    assert "its files are not available here and were not compared" in str(one)
    assert build(config).starts.tolist() == stored.starts.tolist()
    alone = replace(config, components={"text": DatasetComponent(cache_dir=str(tmp_path / "cache" / "text"))})
    assert build(alone).starts.tolist() == stored.starts.tolist()
    with pytest.raises(StoreError, match="tokenizer"):
        build(alone, OtherTokenizer())
    with pytest.raises(DataError, match="no finished token store in /nowhere/train"):
        resolve_training(replace(config, components={"text": DatasetComponent(cache_dir="/nowhere")}))


def test_an_error_in_a_document_ends_the_build_and_keeps_what_is_done(tmp_path, texts):
    bad = tmp_path / "sources" / "6.jsonl"
    good = bad.read_text()
    bad.write_text('{"text": "fine"}\n{"txt": 1}\n')
    config = config_of(tmp_path, groups=128)
    with pytest.raises(DataError, match=r"6\.jsonl:2: no key 'text'"):
        build(config)
    folder = tmp_path / "cache" / "text" / "train"
    assert read_manifest(str(folder)).shards is None
    assert len(list(folder.rglob("shard.json"))) == 6
    # Another size is another source: the half-built store says so.
    bad.write_text(good)
    with pytest.raises(StoreError, match=r"6\.jsonl: had 28 bytes"):
        build(config)


def test_two_processes_do_not_build_one_store(tmp_path, texts):
    words = [sys.executable, str(BUILD), str(tmp_path / "sources"), str(tmp_path / "cache")]
    running = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outcomes = [process.communicate(timeout=250)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], outcomes
    run_build(tmp_path, "alone")
    assert tree(tmp_path / "cache") == tree(tmp_path / "alone")


def test_a_full_disk_is_an_error_and_nothing_counts(tmp_path, texts, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    config = config_of(tmp_path)
    monkeypatch.setattr(store_write.ShardWriter, "finish", full)
    with pytest.raises(OSError, match="No space left"):
        build(config)
    monkeypatch.undo()
    assert not list((tmp_path / "cache").rglob("shard.json"))
    build(config)


def test_stores_lie_where_they_can_be_written(tmp_path, monkeypatch):
    from levanter.data.store import kvstore

    monkeypatch.chdir(tmp_path)
    assert kvstore("gs://bucket/folder") == "gs://bucket/folder/"
    for written in ("relative/x", "./relative/x", "other/../relative/./x"):
        assert kvstore(written) == {"driver": "file", "path": f"{tmp_path}/relative/x/"}
    with pytest.raises(StoreError, match="token stores must be on a local disk, gs:// or s3://"):
        kvstore("memory://x")


def test_open_store_checks_counts(tmp_path, texts):
    config = config_of(tmp_path)
    build(config)
    folder = str(tmp_path / "cache" / "text" / "train")
    assert open_store(folder, read_manifest(folder)).weighted is False
