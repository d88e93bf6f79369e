"""Resolving the `data:` block: the sets, the notes, and everything that is wrong at once."""

import pydoc_data.topics

import draccus
import pytest

from levanter.data import DataError, LmDataConfig, python_docs_text, resolve_evaluation

pytestmark = pytest.mark.quick


def config_of(**block):
    return draccus.decode(LmDataConfig, block)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a-1.txt", "a-2.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "b.jsonl").write_text('{"body": "first"}\n{"body": "second"}\n')
    return tmp_path


def test_sets_in_order_with_tags_and_documents(folder):
    data = resolve_evaluation(
        config_of(
            components={
                "wiki": {"source": {"validation_urls": ["a-{1..2}.txt"]}, "tags": ["web", "wiki"]},
                "books": {"source": {"validation_urls": ["*.jsonl"], "format": {"text_key": "body"}, "tags": ["long"]}},
                "only_training": {"source": {"train_urls": ["a-1.txt"]}},
                "both": {
                    "type": "concat",
                    "children": {
                        "x": {"source": {"validation_urls": ["a-2.txt"]}},
                        "y": {"source": {"validation_urls": ["b.jsonl"]}, "format": {"text_key": "body"}},
                    },
                },
                "given": {"type": "direct", "datasets": {"validation": ["one", "two"]}},
            }
        )
    )
    assert [(one.name, one.tags) for one in data.sets] == [
        ("wiki", ("web", "wiki")),
        ("books", ("long", "books")),
        ("both", ("both",)),
        ("given", ("given",)),
    ]
    assert [[document.text for document in one.documents()] for one in data.sets] == [
        ["text of a-1.txt", "text of a-2.txt"],
        ["first", "second"],
        ["text of a-2.txt", "first", "second"],
        ["one", "two"],
    ]
    assert data.notes == ("only_training: no validation data, so it is not evaluated",)
    assert str(data.sets[0]) == "wiki: 2 files: a-1.txt, …"


def test_training_data(folder):
    config = config_of(components={"x": {"source": {"train_urls": ["a-1.txt"], "validation_urls": ["a-2.txt"]}}})
    (train,) = resolve_evaluation(config, split="train").sets
    assert [document.text for document in train.documents()] == ["text of a-1.txt"]


def test_everything_that_is_wrong_is_listed(folder):
    with pytest.raises(DataError) as info:
        resolve_evaluation(
            config_of(
                num_validation_sequences={"x": 10},
                components={
                    "x": {"source": {"validation_urls": ["a-3.txt", "*.parquet"]}},
                    "y": {"source": {"type": "hf", "id": "org/name", "revision": "v1"}},
                    "z": {
                        "source": {"validation_urls": ["b.jsonl"]},
                        "format": {"type": "chat", "chat_template": "{% if"},
                    },
                    "c": {"cache_dir": "cache/c"},
                    "n": {
                        "source": {"validation_urls": ["b.jsonl"], "format": {"text_key": "body"}},
                        "format": {"text_key": "content"},
                    },
                },
            )
        )
    message = str(info.value)
    assert "6 problems with the data" in message
    for expected in (
        "data.components.x.source.validation_urls: a-3.txt: no such file; did you mean a-2.txt or a-1.txt?",
        "data.components.x.source.validation_urls: *.parquet: matches no file",
        "validation_urls: [hf://datasets/org/name@v1/PATH/*.parquet]",
        "data.components.z.format.chat_template: not a Jinja template",
        "data.components.c: has no source",
        "data.components.n: format is",
        "data.num_validation_sequences: these sequences",
    ):
        assert expected in message


def test_unknown_endings_are_found_before_reading(folder):
    (folder / "x.csv").write_text("a")
    with pytest.raises(DataError, match=r"data\.components\.x\.source\.validation_urls: x\.csv: no reader"):
        resolve_evaluation(config_of(components={"x": {"source": {"validation_urls": ["x.csv"]}}}))


def test_nothing_to_evaluate():
    with pytest.raises(DataError, match=r"no data set is configured; expected NAME: \{source:"):
        resolve_evaluation(LmDataConfig())
    with pytest.raises(DataError, match=r"none of x has validation data \(validation_urls is empty\)"):
        resolve_evaluation(config_of(components={"x": {"source": {"train_urls": ["a.txt"]}}}))


def test_keys_without_effect_are_named(folder):
    data = resolve_evaluation(
        config_of(
            cache_dir="gs://bucket/cache",
            auto_build_caches=False,
            shuffle=1000,
            train_weights={"x": 1.0},
            chat_template="{{ x }}",
            components={"x": {"source": {"validation_urls": ["a-1.txt"]}, "pack": True, "cache_dir": "there"}},
        )
    )
    assert data.notes == (
        "data.auto_build_caches: no effect; an evaluation builds no token store, cache_dataset does",
        "data.shuffle, data.train_weights, data.components.x.pack: no effect; only training uses them",
        "data.chat_template: no effect; no evaluated set holds conversations",
    )
    plain = config_of(components={"x": {"source": {"validation_urls": ["a-1.txt"]}}})
    assert resolve_evaluation(plain).notes == ()


def test_python_docs():
    text = python_docs_text(120_000)
    assert len(text) == 120_000
    assert text.startswith(pydoc_data.topics.topics[min(pydoc_data.topics.topics)])
    assert len(python_docs_text()) > 200_000
    data = resolve_evaluation(config_of(components={"docs": {"source": {"type": "python_docs", "max_chars": 500}}}))
    assert [document.text for document in data.sets[0].documents()] == [text[:500]]
    assert str(data.sets[0]) == "docs: python: pydoc_data.topics, first 500 characters"


def test_weights_of_unknown_components_are_refused():
    with pytest.raises(ValueError, match=r"data\.train_weights: 'wki' is not a component \(components: none\)"):
        LmDataConfig(train_weights={"wki": 1.0})
    with pytest.raises(ValueError, match="negative"):
        LmDataConfig(train_weights=[(0, {"wki": -1.0})])
