"""Old shapes of `data:` and `model:`: each becomes components, and what the data room then reads."""

# pyright: reportAttributeAccessIssue=false, reportOptionalSubscript=false, reportArgumentType=false

from typing import Any

import pytest

from levanter.commands.tokenize.cache_dataset import CacheDatasetConfig
from levanter.commands.train.config import TrainLmConfig
from levanter.config import ConfigError, load, parse_text
from levanter.config.errors import Problem
from levanter.config.upstream import translate, translate_plain
from levanter.config.yaml_nodes import MapNode, compose
from levanter.data.config import LmDataConfig
from levanter.tracker import NoopConfig


def data(**keys: Any) -> dict[str, Any]:
    document, translation = translate_plain({"data": keys})
    assert not translation.problems, [str(p) for p in translation.problems]
    return document["data"]


def lines(text: str) -> tuple[list[str], list[str]]:
    problems: list[Problem] = []
    node = compose(text, "old.yaml", problems, lambda *_: None)
    assert isinstance(node, MapNode) and not problems
    translation = translate(node)
    return [str(c) for c in translation.changes], [str(p) for p in translation.problems]


def test_files_become_one_component():
    old = {
        "train_urls": ["t{1..2}.jsonl"],
        "validation_urls": ["v.jsonl"],
        "cache_dir": "gs://c",
        "tags": ["web"],
        "tokenizer": "t",
        "enforce_eos": False,
    }
    assert data(**old) == {
        "cache_dir": "gs://c",
        "tokenizer": "t",
        "enforce_eos": False,
        "components": {
            "train": {
                "source": {"train_urls": ["t{1..2}.jsonl"], "validation_urls": ["v.jsonl"]},
                "cache_dir": "gs://c",
                "tags": ["web"],
            }
        },
        "shuffle": False,
    }


def test_a_data_set_of_the_hub_becomes_one_component():
    old = {
        "id": "org/set",
        "name": "small",
        "stream": False,
        "splits": ["a"],
        "format": {"type": "chat"},
        "shuffle": True,
    }
    assert data(**old) == {
        "shuffle": True,
        "components": {
            "train": {
                "source": {"type": "hf", "id": "org/set", "name": "small", "stream": False, "splits": ["a"]},
                "format": {"type": "chat"},
            }
        },
    }


def test_a_mixture_keeps_names_weights_and_order():
    old = {
        "configs": {
            "web": {"train_urls": ["w"], "cache_dir": "c/w", "tags": ["x"]},
            "wiki": {"id": "org/wiki"},
        },
        "train_weights": {"web": 0.7, "wiki": 0.3},
        "stop_strategy": "first_exhausted",
        "tokenizer": "t",
    }
    new = data(**old)
    assert new == {
        "train_weights": {"web": 0.7, "wiki": 0.3},
        "stop_strategy": "first_exhausted",
        "tokenizer": "t",
        "components": {
            "web": {"source": {"train_urls": ["w"]}, "cache_dir": "c/w", "tags": ["x"]},
            "wiki": {"source": {"type": "hf", "id": "org/wiki"}},
        },
        "shuffle": False,
    }
    assert list(new["components"]) == ["web", "wiki"]


def test_supervised_formats_get_their_old_names_and_defaults():
    mixture = {"configs": {"a": {"id": "s", "format": {"type": "supervised", "input_field": "q"}}}}
    assert data(**mixture)["components"]["a"]["format"] == {
        "type": "supervised",
        "input_key": "q",
        "target_key": "response",
    }
    new = {"components": {"a": {"format": {"type": "supervised", "output_field": "r"}}}}
    assert data(**new) == {"components": {"a": {"format": {"type": "supervised", "target_key": "r"}}}}


def test_new_shapes_and_blocks_without_a_source_are_left_alone():
    for block in ({"components": {"a": {}}, "tokenizer": "t"}, {"tokenizer": "t"}, {}):
        assert data(**block) == block


def test_every_key_is_reported():
    changes, problems = lines("data:\n  id: org/set\n  format: {type: text}\n  shuffle: false\n")
    assert problems == []
    assert changes == [
        "old.yaml:2: data.id: org/set → data.components.train.source.id: org/set (a single source is one component)",
        "old.yaml:3: data.format: {type: text} → data.components.train.format: {type: text} "
        "(a single source is one component)",
    ]
    changes, _ = lines("data:\n  configs:\n    a: {train_urls: [x]}\n    b: {id: y}\n")
    assert changes == [
        "old.yaml:2: data.configs: {a, b} → data.components: {a, b} "
        "(data sets are components, each with a source and a format)",
        "data.shuffle: (absent, false) → data.shuffle: false (the old layouts did not shuffle by default)",
    ]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "data:\n  components: {}\n  train_urls: [x]\n  configs: {}\n",
            [
                "old.yaml:3: data.train_urls: contradicts `data.components` (old.yaml:2): a document may have only "
                "one of them; keep data.components",
                "old.yaml:4: data.configs: contradicts `data.components` (old.yaml:2): a document may have only one "
                "of them; keep data.components",
            ],
        ),
        (
            "data:\n  configs: {}\n  id: x\n",
            [
                "old.yaml:3: data.id: contradicts `data.configs` (old.yaml:2): the sources of a mixture belong under "
                "`configs` only"
            ],
        ),
        (
            "data:\n  id: x\n  train_urls: [y]\n",
            ["old.yaml:3: data.train_urls: contradicts `data.id`: a source is either files or a Hub data set"],
        ),
        ("data:\n  configs: [a]\n", ["old.yaml:2: data.configs: expected a mapping of named sources, got [a]"]),
        ("data:\n  configs:\n    a: 5\n", ["old.yaml:3: data.configs.a: expected a mapping, got 5"]),
        (
            "data:\n  id: x\n  format: {type: supervised, input_field: a, input_key: b}\n",
            [
                "old.yaml:3: data.components.train.format.input_field: contradicts `input_key` beside it: "
                "they are one key, renamed"
            ],
        ),
    ],
)
def test_contradictions(text: str, problems: list[str]):
    assert lines(text)[1] == problems


def test_the_data_room_reads_what_comes_out():
    from dataclasses import dataclass, field

    @dataclass(frozen=True, kw_only=True)
    class Run:
        data: LmDataConfig = field(default_factory=LmDataConfig)

    text = """\
data:
  configs:
    web:
      train_urls: ["w{1..4}.jsonl.gz"]
    chat:
      id: org/chat
      format: {type: chat, single_turn: true}
  train_weights: {web: 0.9, chat: 0.1}
  tokenizer: org/tok
  cache_dir: "gs://bucket/cache"
"""
    config = parse_text(Run, text).data
    assert list(config.components) == ["web", "chat"]
    assert config.components["web"].source.train_urls == ["w{1..4}.jsonl.gz"]  # type: ignore[attr-defined]
    assert config.components["chat"].source.id == "org/chat"  # type: ignore[attr-defined]
    assert config.components["chat"].format.single_turn is True  # type: ignore[attr-defined]
    assert config.shuffle is False


def test_sequence_length_is_renamed():
    document, translation = translate_plain({"model": {"type": "gpt2", "seq_len": 1024, "hidden_dim": 8}})
    assert document == {"model": {"type": "gpt2", "hidden_dim": 8, "max_seq_len": 1024}}
    assert [c.key for c in translation.changes] == ["model.seq_len"]


def test_misspelt_keys_of_an_old_source_are_its_own_problem():
    _, problems = lines(
        "data:\n  configs:\n    web: {train_url: [a], stream: true}\n    b: {id: x, weight: 3, pack: true}\n"
    )
    assert problems == [
        "old.yaml:3: data.configs.web.train_url: unknown key; did you mean `train_urls`?",
        "old.yaml:4: data.configs.b.weight: unknown key; valid keys here are train_urls, validation_urls, id, name, "
        "stream, splits, tags, format, cache_dir",
    ]


@pytest.mark.parametrize("source", ["train_urls: [a.jsonl]", "id: acme/books"])
def test_a_document_that_is_a_data_set(source: str):
    """`cache_dataset` of 2025: the data set's keys at the top, with its tracker's and Ray's beside them."""
    text = f"{source}\ntokenizer: passthrough\nvocab_size: 8\ncache_dir: c\ntracker: {{type: noop}}\n"
    ray = "address: ray://head\nauto_start_cluster: true\nray: {start_workers: false}\n"
    config = parse_text(CacheDatasetConfig, text + ray)
    assert config.trainer.tracker == NoopConfig() and list(config.data.components) == ["train"]
    said, problems = lines(text + ray)
    assert not problems
    assert "old.yaml:5: tracker: {type: noop} → trainer.tracker: {type: noop} (cache_dataset used to take" in said[3]
    assert [line.split()[1:4] for line in said[:3]] == [
        [k, "is", "ignored:"] for k in ("ray", "address", "auto_start_cluster")
    ]


def test_a_stray_key_does_not_make_a_document_a_data_set():
    with pytest.raises(ConfigError, match=r"id: unknown key; it belongs at `trainer.id`"):
        parse_text(CacheDatasetConfig, "id: mine\n")


def test_a_source_of_nothing_is_a_cache_alone():
    assert data(configs={"web": {"cache_dir": "gs://c", "tags": ["a"]}})["components"] == {
        "web": {"cache_dir": "gs://c", "tags": ["a"]}
    }


def test_supervised_data_is_evaluated_and_not_trained_on():
    text = """
    data: {train_urls: [t.jsonl], tokenizer: t}
    supervised_data:
      sums: {train_urls: [s.jsonl], validation_urls: [v.jsonl], input_field: q, cache_dir: c, tags: [math]}
      hub: {id: org/set, output_field: answer}
    """
    config = parse_text(TrainLmConfig, text)
    trained, sums, hub = (config.data.components[name] for name in ("train", "sums", "hub"))
    assert trained.source.train_urls == ["t.jsonl"]
    assert (sums.source.train_urls, sums.source.validation_urls, sums.tags) == ([], ["v.jsonl"], ["math"])
    assert (sums.format.input_key, sums.format.target_key) == ("q", "response")
    assert (hub.source.id, hub.source.splits) == ("org/set", ["validation"])
    assert (hub.format.input_key, hub.format.target_key) == ("prompt", "answer")
    alone = parse_text(TrainLmConfig, "supervised_data: {validation_urls: [v.jsonl]}")
    assert list(alone.data.components) == ["supervised"]
    with pytest.raises(ConfigError, match=r"supervised_data\.a\.urls: unknown key"):
        parse_text(TrainLmConfig, "supervised_data: {a: {urls: [x]}}")
    with pytest.raises(ConfigError, match="supervised_data: expected a source, or sources by name, got 3"):
        parse_text(TrainLmConfig, "supervised_data: 3")


def test_what_happens_to_long_conversations_has_the_name_of_a_newer_upstream():
    text = "data: {components: {a: {format: {type: %s, slice_strategy: drop}}}}"
    assert parse_text(TrainLmConfig, text % "chat").data.components["a"].format.overlength == "drop"
    changes, problems = lines(text % "chat")
    assert not problems and "a.format.slice_strategy: drop → data.components.a.format.overlength: drop" in changes[0]
    assert lines(text % "preference_chat") == ([], [])
    with pytest.raises(ConfigError, match=r"slice_strategy: contradicts `data\.components\.a\.format\.overlength`"):
        parse_text(
            TrainLmConfig, "data: {components: {a: {format: {type: chat, slice_strategy: drop, overlength: left}}}}"
        )


FILE_AND_COMMAND_LINE = [
    # A file's block, words of the command line, the sets, and what is ignored.
    ("id: a/b, splits: [x]", ["--data.train_urls", "[t.jsonl]"], {"train": ["t.jsonl"]}, ["id", "splits"]),
    ("train_urls: [f.jsonl], validation_urls: [v.jsonl]", ["--data.id", "a/b"], {"train": "a/b"}, 2),
    ("train_urls: [f.jsonl]", ["--data.train_urls", "[t.jsonl]"], {"train": ["t.jsonl"]}, 0),
    (
        "configs: {a: {train_urls: [f.jsonl]}}, train_weights: {a: 1}",
        ["--data.train_urls", "[t.jsonl]"],
        {"train": ["t.jsonl"]},
        ["configs", "train_weights"],
    ),
    (
        "components: {a: {source: {train_urls: [f.jsonl]}}}, train_weights: {a: 1}",
        ["--data.id", "c/d"],
        {"train": "c/d"},
        ["components", "train_weights"],
    ),
    (
        "train_urls: [f.jsonl]",
        ["--data.components.w.source.train_urls", "[t.jsonl]"],
        {"w": ["t.jsonl"]},
        ["train_urls"],
    ),
    (
        "components: {a: {source: {type: hf, id: a/b}}, k: {source: {type: hf, id: k/k}}}",
        ["--data.components.a.source.train_urls", "[t.jsonl]"],
        {"a": ["t.jsonl"], "k": "k/k"},
        ["source.id", "source.type"],
    ),
    (
        "components: {a: {source: {train_urls: [f.jsonl]}}}",
        ["--data.components.a.source.id", "c/d"],
        {"a": "c/d"},
        ["source.train_urls"],
    ),
]


@pytest.mark.parametrize(("block", "words", "sets", "ignored"), FILE_AND_COMMAND_LINE)
def test_the_command_line_wins_where_both_name_a_source(block, words, sets, ignored, tmp_path, caplog):
    path = tmp_path / "file.yaml"
    path.write_text(f"data: {{{block}}}\n")
    config = load(TrainLmConfig, ["--config_path", str(path), *words])
    found = {
        name: component.source.id if hasattr(component.source, "id") else component.source.train_urls
        for name, component in config.data.components.items()
    }
    assert found == sets
    notes = [line for line in caplog.messages if "is ignored: the command line names another source" in line]
    assert len(notes) == (ignored if isinstance(ignored, int) else len(ignored))
    for key in () if isinstance(ignored, int) else ignored:
        assert any(f"{key} is ignored" in line for line in notes), (key, notes)


def test_two_sources_in_one_file_still_contradict_each_other(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text("data: {id: a/b, train_urls: [t.jsonl]}\n")
    with pytest.raises(ConfigError, match=r"contradicts `data\.id`"):
        load(TrainLmConfig, ["--config_path", str(path), "--data.shuffle", "false"])


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("trainer: {batch_size: 4}", "trainer.batch_size: unknown key; here it is `train_batch_size`"),
        ("max_tune_length: 5", "max_tune_length: unknown key; here it is `train_seq_len`"),
        ("data: {configs: {a: {id: x, train_split: y}}}", "a.train_split: unknown key; here it is `splits`"),
        (
            "data: {components: {a: {source: {type: hf, id: x, validation_split: y}}}}",
            "validation_split: unknown key; here it is `splits`",
        ),
    ],
)
def test_hints_name_the_key_of_the_same_thing(text: str, hint: str):
    with pytest.raises(ConfigError) as caught:
        parse_text(TrainLmConfig, text)
    assert hint in str(caught.value)
