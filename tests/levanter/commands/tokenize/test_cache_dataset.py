"""`cache_dataset`: stores are built from a training file, or from the old shape of its own; and go on."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.tokenize.cache_dataset import CacheDatasetConfig, main
from levanter.compat.open import load_tokenizer
from levanter.config import load
from levanter.data import evaluation_rows, resolve_evaluation


@pytest.fixture
def folder(tmp_path):
    """A byte-level tokenizer, and two files of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name in "ab":
        lines = [json.dumps({"text": f"{name}{i} é"}) + "\n" for i in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("".join([*lines, '{"text": ""}\n']))
    return tmp_path


def write(folder, document):
    path = folder / "config.yaml"
    path.write_text(json.dumps(document))
    return str(path)


def run(path, *words):
    return run_entry_point(CacheDatasetConfig, main, ["--config_path", path, *words])


def training_file(folder):
    return {
        "data": {
            "tokenizer": str(folder / "tokenizer.json"),
            "cache_dir": str(folder / "cache"),
            "components": {
                "both": {"source": {"train_urls": [f"{folder}/{{a,b}}.jsonl"]}},
                "docs": {"source": {"type": "python_docs", "hold_out_every": 4}},
                "held": {"source": {"validation_urls": [f"{folder}/a.jsonl"]}},
            },
        },
        "model": {"type": "llama", "vocab_size": 256},
        "trainer": {"train_batch_size": 8, "tracker": {"type": "noop"}},
    }


def test_a_run_that_begins_from_a_checkpoint_has_its_tokenizer(folder, capsys):
    document = training_file(folder)
    del document["data"]["tokenizer"], document["model"]
    document["hf_checkpoint"] = str(folder)
    assert run(write(folder, document)) == 0
    assert f"tokenizer: {folder}, 256 ids" in capsys.readouterr().out
    # As one that names it.
    assert run(write(folder, training_file(folder))) == 0
    assert "nothing was missing" in capsys.readouterr().out


def test_from_a_training_file(folder, capsys):
    path = write(folder, training_file(folder))
    assert run(path) == 0
    out = capsys.readouterr().out
    tokens = sum(len(f"{name}{i} é".encode()) for name in "ab" for i in range(20))
    assert f"both: {tokens} tokens, 40 documents, 2 empty documents left out, 2 shards" in out
    assert f"{folder}/cache/docs/train" in out
    assert "data.components.held: no training data, so it is not trained on" in out
    held = sum(len(f"a{i} é".encode()) for i in range(20))
    assert f"held (validation): {held} tokens, 20 documents, 1 empty documents left out, 1 shards" in out
    assert f"in {folder}/cache/held/validation" in out and "docs (validation): " in out
    assert "tokens/s" in out
    assert run(path, "--verify", "true") == 0
    out = capsys.readouterr().out
    assert "nothing was missing" in out and "every token was read against its checksum" in out


def test_pythons_documentation_needs_a_folder_that_is_written_down(folder, capsys, monkeypatch, caplog):
    """And what is there already is no progress."""
    monkeypatch.chdir(folder)
    document = training_file(folder)
    document["data"]["components"] = {"docs": document["data"]["components"]["docs"]}
    del document["data"]["cache_dir"]
    assert run(write(folder, document)) == 0
    assert "docs, docs (validation): tokenized at the start of a run" in capsys.readouterr().out
    for times in (1, 2):
        caplog.clear()
        assert run(write(folder, document), "--data.cache_dir", "tokens") == 0
        assert (folder / "tokens" / "docs" / "train" / "manifest.json").exists()
        assert any("tokenizing: done" in message for message in caplog.messages) == (times == 1)
    assert "nothing was missing" in capsys.readouterr().out


def test_damage_is_found_by_verifying(folder, capsys):
    path = write(folder, training_file(folder))
    assert run(path) == 0
    ids = folder / "cache" / "both" / "train" / "shards" / "00001" / "ids" / "c" / "0"
    content = bytearray(ids.read_bytes())
    content[8] ^= 1
    ids.write_bytes(content)
    assert run(path) == 0
    assert run(path, "--verify", "true") == 2
    assert "shards/00001/ids/c/0: its content has changed since it was written" in capsys.readouterr().err


def test_another_tokenizer_is_refused(folder, capsys):
    document = training_file(folder)
    assert run(write(folder, document)) == 0
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["pre_tokenizer"]["add_prefix_space"] = True
    (folder / "other.json").write_text(json.dumps(definition))
    document["data"]["tokenizer"] = str(folder / "other.json")
    assert run(write(folder, document)) == 2
    error = capsys.readouterr().err
    assert "tokenizer: built with" in error and "configured" in error


def test_the_old_shape(folder, capsys):
    old = {
        "train_urls": [f"{folder}/a.jsonl"],
        "validation_urls": [f"{folder}/b.jsonl"],
        "tokenizer": str(folder / "tokenizer.json"),
        "cache_dir": str(folder / "cache"),
        "cache_options": {"num_shard_groups": 4},
    }
    assert run(write(folder, old)) == 0
    assert (folder / "cache" / "train" / "manifest.json").exists()
    assert (folder / "cache" / "validation" / "manifest.json").exists()


def test_the_old_shape_of_a_mixture(folder, capsys):
    """What has a weight is trained on; what has none is evaluated all the same."""
    urls = {name: {f"{split}_urls": [f"{folder}/{name}.jsonl"] for split in ("train", "validation")} for name in "ab"}
    old = {"configs": urls, "train_weights": {"a": 0.9, "b": 0.0}, "mixture_block_size": 64}
    rest = {"tokenizer": str(folder / "tokenizer.json"), "cache_dir": str(folder / "cache")}
    assert run(write(folder, {**old, **rest})) == 0
    built = sorted(str(path.parent.relative_to(folder / "cache")) for path in folder.glob("cache/*/*/manifest.json"))
    assert built == ["a/train", "a/validation", "b/validation"]
    assert "data.components.b: no weight in data.train_weights, so it is not trained on" in capsys.readouterr().out


def test_a_configuration_that_only_evaluates(folder, capsys):
    document = training_file(folder)
    document["data"]["components"] = {"held": document["data"]["components"]["held"]}
    assert run(write(folder, document)) == 0
    assert (folder / "cache" / "held" / "validation" / "manifest.json").exists()
    document["data"]["components"]["held"]["source"]["validation_urls"] = [f"{folder}/no.jsonl"]
    assert run(write(folder, document)) == 2
    assert "no.jsonl: no such file" in capsys.readouterr().err


def test_an_evaluation_of_stores_is_that_of_their_files(folder, caplog):
    """Row for row, of text and of records; a store of something else is passed over."""
    pairs = [{"input": f"{n} + 1 =", "target": f" {n + 1}"} for n in range(9)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    document = training_file(folder)
    sums = {"source": {"validation_urls": [f"{folder}/pairs.jsonl"]}, "format": {"type": "supervised"}}
    document["data"]["components"] |= {"sums": sums}
    config = load(CacheDatasetConfig, ["--config_path", write(folder, document)]).data
    tokenizer = load_tokenizer(config.tokenizer)

    def rows(config):
        sets = resolve_evaluation(config, in_training=True).sets
        return evaluation_rows(config, sets, tokenizer, max_length=16)

    caplog.set_level("INFO", logger="levanter")
    without = rows(config)
    assert run(write(folder, document)) == 0
    assert not any("read from the token store" in message for message in caplog.messages)
    stored = rows(config)
    assert sum("read from the token store" in message for message in caplog.messages) == 3
    assert stored.sets == without.sets and [one.name for one in stored.sets] == ["docs", "held", "sums"]
    every = np.arange(stored.row_count)
    for one, other in zip(stored.take(every).inputs, without.take(every).inputs, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(stored.take(every).loss_mask, without.take(every).loss_mask)
    caplog.clear()
    (folder / "a.jsonl").write_text('{"text": "another"}\n')
    assert rows(config).sets[1].tokens == len("another")
    assert any("held: its token store is not used" in message for message in caplog.messages)


def test_without_data(folder, capsys):
    assert run(write(folder, {"data": {"tokenizer": str(folder / "tokenizer.json")}})) == 2
    assert "no data set is configured" in capsys.readouterr().err
    document = training_file(folder)
    document["data"]["components"]["gone"] = {"source": {"train_urls": [f"{folder}/c.jsonl"]}}
    assert run(write(folder, document)) == 2
    assert "c.jsonl: no such file; did you mean" in capsys.readouterr().err
