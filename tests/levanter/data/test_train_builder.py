"""Training data against brute force: draw rows one by one, and compare any step with that."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers.small_tokenizer import BOS, EOS, SmallTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.data import AbsentTextError, DataError, batches, build_training, resolve_training
from levanter.data.config import (
    BlockShuffleConfig,
    ConcatDatasetComponent,
    DatasetComponent,
    DirectDatasetComponent,
    LmDataConfig,
)
from levanter.data.formats import SupervisedLmDatasetFormat
from levanter.data.sources import HfDatasetSource, PythonDocsSource, UrlDatasetSource
from levanter.data.train_dataset import BatchSchedule

TOKENIZER = SmallTokenizer()


def texts_of(name, documents, length=12):
    return [f"{name}{i:05d}" + "x" * (length - 6) for i in range(documents)]


def config_of(sizes, *, length=12, **more):
    """Sets of documents of equal length: with BOS and EOS, `length + 2` tokens; one row each at that length."""
    components = {
        name: DirectDatasetComponent(datasets={"train": texts_of(name, count, length)}) for name, count in sizes.items()
    }
    return LmDataConfig(cache_dir=None, components=components, **{"shuffle": False, **more})


def build(config, *, positions=14, batch_sizes=((0, 4),), seed=0):
    return build_training(config, TOKENIZER, positions=positions, batch_sizes=batch_sizes, seed=seed)


def texts_in(rows):
    return [TOKENIZER.decode(row[row > EOS])[:6] for row in rows.tokens]


def test_rows_in_order():
    data = build(config_of({"a": 10}))
    rows = data.rows(0)
    assert rows.tokens.shape == (4, 14)
    expected = [[BOS, *TOKENIZER.encode_with_offsets(text)[0].tolist(), EOS] for text in texts_of("a", 4)]
    assert rows.tokens.tolist() == expected
    assert texts_in(data.rows(2)) == ["a00008", "a00009", "a00000", "a00001"]
    assert data.steps is None and data.steps_of_epochs(1) == 2 and data.steps_of_epochs(2) == 5


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(0, 30),
    st.sampled_from([False, True, 3, BlockShuffleConfig(io_block_size=2, window_blocks=3)]),
    st.booleans(),
)
def test_any_step_is_what_counting_from_the_beginning_gives(stages, step, shuffle, staged):
    starts = np.cumsum([0] + [length for length, _ in stages[:-1]])
    batch_sizes = [(int(start), size) for start, (_, size) in zip(starts, stages, strict=True)]
    weights = {"a": 3.0, "b": 1.0}
    config = config_of(
        {"a": 11, "b": 5},
        shuffle=shuffle,
        mixture_block_size=8,
        train_weights=[(0, weights), (4, {"b": 1.0})] if staged else weights,
    )
    data = build(config, batch_sizes=batch_sizes)
    # One by one: a list of the draws' sets, and for each set its epochs one after the other.
    draws = data.schedule.first_draw(step + 1)
    which, _ = data.mixture.at(np.arange(draws))
    orders = {i: [] for i in range(2)}
    seen = Counter()
    expected = []
    for one in which:
        turn = seen[one]
        seen[one] += 1
        while len(orders[one]) <= turn:
            epoch = data.sets[one].numbers(np.arange(len(orders[one]), len(orders[one]) + data.sets[one].used))
            assert sorted(epoch.tolist()) == list(range(data.sets[one].used))
            orders[one] += epoch.tolist()
        expected.append(f"{'ab'[one]}{orders[one][turn]:05d}")
    sizes = [next(size for start, size in reversed(batch_sizes) if start <= s) for s in range(step + 1)]
    assert draws == sum(sizes)
    assert texts_in(data.rows(step)) == expected[-sizes[-1] :]
    half = sizes[-1] // 2
    assert texts_in(data.rows(step, half, sizes[-1])) == expected[len(expected) - sizes[-1] + half :]
    if staged and step >= 4:
        assert set(text[0] for text in texts_in(data.rows(step))) == {"b"}


def test_seed_and_epoch_change_the_order():
    config = config_of({"a": 64}, shuffle=True)
    one, same, other = build(config, seed=1), build(config, seed=1), build(config, seed=2)
    orders = [[texts_in(d.rows(step)) for step in range(16)] for d in (one, same, other)]
    assert orders[0] == orders[1] != orders[2]
    again = [texts_in(one.rows(16 + step)) for step in range(16)]
    assert again != orders[0]
    for epoch in (again, orders[0]):
        assert sorted(text for batch in epoch for text in batch) == [f"a{i:05d}" for i in range(64)]


def test_weights_by_share_of_rows():
    """0.7 : 0.2 : 0.1 over 20,000 rows, within what a block's rounding allows."""
    weights = {"a": 0.7, "b": 0.2, "c": 0.1}
    data = build(config_of({"a": 50, "b": 500, "c": 3}, train_weights=weights), batch_sizes=[(0, 100)])
    counted = Counter(text[0] for step in range(200) for text in texts_in(data.rows(step)))
    for name, weight in weights.items():
        assert counted[name] / 20_000 == pytest.approx(weight, abs=0.002)
    described = "\n".join(data.describe(200))
    assert f"c: {counted['c']:,} of 20,000 rows" in described
    assert "mixture from step 0: a 70.00%, b 20.00%, c 10.00%" in described


def test_the_end_of_the_data():
    first = build(config_of({"a": 40, "b": 10}, stop_strategy="first_exhausted"))
    assert first.steps is not None
    counted = Counter(text for step in range(first.steps) for text in texts_in(first.rows(step)))
    assert max(counted.values()) == 1 and sum(text[0] == "b" for text in counted) >= 10 - 4
    with pytest.raises(IndexError, match=f"step {first.steps} needs rows up to"):
        first.rows(first.steps)
    every = build(config_of({"a": 40, "b": 10}, stop_strategy="all_exhausted"))
    counted = Counter(text for step in range(every.steps) for text in texts_in(every.rows(step)))
    assert len([text for text in counted if text[0] == "a"]) >= 40 - 4 and counted["b00000"] > 1
    assert "the data ends after" in "\n".join(every.describe(10))


def test_held_out_rows_are_never_trained_on():
    config = config_of({"a": 40, "b": 30}, num_validation_sequences={"a": 8}, shuffle=True)
    data = build(config)
    (held,) = [one for one in data.sets if one.name == "a"]
    out = texts_in(held.held_out_rows(0, 8))
    assert len(set(out)) == 8 and held.used == 32
    trained = {text for step in range(60) for text in texts_in(data.rows(step))}
    assert not trained & set(out)
    assert len(trained) == 32 + 30
    # Another seed orders the rest otherwise and holds the same rows out.
    other = build(config, seed=5)
    assert texts_in(other.sets[0].held_out_rows(0, 8)) == out
    in_order = build(replace(config, shuffle_before_trainval_split=False))
    assert texts_in(in_order.sets[0].held_out_rows(0, 8)) == [f"a{i:05d}" for i in range(32, 40)]


def test_fewer_rows_than_there_are():
    data = build(config_of({"a": 40, "b": 30}, max_train_batches={"a": 3}))
    assert [one.used for one in data.sets] == [12, 30]
    trained = {text for step in range(60) for text in texts_in(data.rows(step)) if text[0] == "a"}
    assert len(trained) == 12
    budget = build(config_of({"a": 40, "b": 30}, target_budget=1000, experiment_budget=100))
    assert [one.used for one in budget.sets] == [4, 3]


def test_packing_and_concatenation_side_by_side(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps({"text": "y" * n}) + "\n" for n in range(1, 40)))
    source = UrlDatasetSource(train_urls=[str(file)])
    config = LmDataConfig(
        cache_dir=str(tmp_path / "cache"),
        components={
            "cut": DatasetComponent(source=source),
            "whole": DatasetComponent(source=source, pack=True),
            "two": DatasetComponent(source=source, pack=2),
            "alone": DatasetComponent(source=source, pack="pad"),
        },
    )
    data = build(config, positions=64, batch_sizes=[(0, 32)])
    by_name = {one.name: one.rows for one in data.sets}
    for name, most in (("whole", 64), ("two", 2), ("alone", 1)):
        rows = by_name[name].take(np.arange(len(by_name[name])))
        assert (rows.segment_ids.max(axis=1) < most).all()
        # Every token but each document's last predicts one.
        assert rows.loss_weights.sum() == sum(n + 2 - 1 for n in range(1, 40))
    assert len(by_name["alone"]) == 39
    rows = by_name["cut"].take(np.arange(len(by_name["cut"])))
    assert (rows.tokens != 0).all()
    lines = "\n".join(data.describe())
    assert "whole documents, one to a row" in lines and "documents concatenated" in lines


def test_documents_may_see_each_other():
    separate = build(config_of({"a": 40}), positions=32).rows(0)
    together = build(config_of({"a": 40}, block_cross_document_attention=False), positions=32).rows(0)
    assert (separate.tokens == together.tokens).all()
    assert (together.segment_ids == 0).all() and separate.segment_ids.max() >= 2
    assert together.loss_weights[:, :-1].all() and not together.loss_weights[:, -1].any()
    ends = separate.tokens == EOS
    assert not separate.loss_weights[ends].any()


def test_the_loader_makes_the_same_batches():
    data = build(config_of({"a": 50, "b": 7}, shuffle=True), batch_sizes=[(0, 4), (3, 6)])
    found = list(batches(data, first=2, stop=9))
    assert [step for step, _ in found] == list(range(2, 9))
    for step, rows in found:
        assert (rows.tokens == data.rows(step).tokens).all()
    parts = [rows for _, rows in batches(data, first=4, stop=6, rows=lambda step: (step - 3, step - 1))]
    assert (parts[0].tokens == data.rows(4).tokens[1:3]).all()
    assert (parts[1].tokens == data.rows(5).tokens[2:4]).all()
    assert data.rows(5, 6, 6).tokens.shape == (0, data.positions)
    stopped = batches(data, first=0, stop=10**9)
    next(stopped)
    stopped.close()
    ended = build(config_of({"a": 5}, stop_strategy="first_exhausted"))
    with pytest.raises(IndexError):
        list(batches(ended, first=0, stop=3))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=4))
@settings(deadline=None)
def test_batch_schedule(stages):
    starts = np.cumsum([0] + [length for length, _ in stages[:-1]])
    schedule = BatchSchedule.of([(int(start), size) for start, (_, size) in zip(starts, stages, strict=True)])
    sizes = [schedule.rows(step) for step in range(30)]
    assert sizes[: sum(n for n, _ in stages)] == [size for n, size in stages for _ in range(n)][:30]
    assert [schedule.first_draw(step) for step in range(30)] == np.cumsum([0, *sizes])[:30].tolist()
    total = np.cumsum(sizes)
    for draws in range(int(total[-1])):
        assert schedule.whole_steps(draws) == int((total <= draws).sum())


def test_python_docs_are_divided():
    source = PythonDocsSource(hold_out_every=5)
    config = LmDataConfig(components={"docs": DatasetComponent(source=source)})
    (train,) = resolve_training(config).sets
    assert train.folder is None
    documents = [document.text for part in train.document_sources for document in part]
    from levanter.data import python_docs_text, resolve_evaluation

    (held,) = resolve_evaluation(config).sets
    out = [document.text for document in held.documents()]
    assert not set(documents) & set(out) and len(out) == (len(documents) + len(out)) // 5
    assert len("\n\n".join(documents + out)) == len(python_docs_text())
    with pytest.raises(AbsentTextError, match="none of docs has training data"):
        resolve_training(LmDataConfig(components={"docs": DatasetComponent(source=PythonDocsSource())}))


def test_components_of_several_children(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"text of {name}")
    children = {
        name: DatasetComponent(source=UrlDatasetSource(train_urls=[str(tmp_path / f"{name}.txt")])) for name in "ab"
    }
    config = LmDataConfig(cache_dir=None, components={"both": ConcatDatasetComponent(children=children)})
    data = build(config, positions=26, batch_sizes=[(0, 1)])
    (tokens,) = data.rows(0).tokens
    assert TOKENIZER.decode(tokens) == "text of atext of b"
    children["b"] = replace(children["b"], pack=True)
    with pytest.raises(DataError, match="have different formats or packing"):
        resolve_training(LmDataConfig(components={"both": ConcatDatasetComponent(children=children)}))


def test_everything_that_is_wrong_is_listed(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    there = UrlDatasetSource(train_urls=[str(tmp_path / "a.txt")])
    with pytest.raises(DataError) as info:
        resolve_training(
            LmDataConfig(
                components={
                    "good": DatasetComponent(source=there),
                    "gone": DatasetComponent(source=UrlDatasetSource(train_urls=[str(tmp_path / "b.txt")])),
                    "only_validation": DatasetComponent(source=UrlDatasetSource(validation_urls=["x.txt"])),
                    "pairs": DatasetComponent(source=there, format=SupervisedLmDatasetFormat()),
                    "nothing": DatasetComponent(),
                },
                train_weights=[
                    (0, {"good": 1.0, "gone": 1.0, "only_validation": 0.5}),
                    (0, {"pairs": 1.0, "nothing": 1}),
                    (9, {"good": 0}),
                ],
                num_validation_sequences={"god": 1},
                target_budget=3,
            )
        )
    message = str(info.value)
    for expected in (
        "data.components.gone.source.train_urls: ",
        "b.txt: no such file; did you mean a.txt?",
        "data.components.only_validation: has a weight in data.train_weights but no training data",
        "data.components.nothing: has no source, and there is no finished token store in cache/nothing/train",
        "data.train_weights: the stage at step 0 comes after one at step 0",
        "data.train_weights: no weight is positive from step 9 on",
        "data.num_validation_sequences: 'god' is not a component (components: gone, good, ",
        "data.target_budget and data.experiment_budget: give both or neither",
    ):
        assert expected in message, expected


def test_absent_data_alone_is_told_apart(tmp_path):
    """Planning goes on without the data; everything else that is wrong stops it."""
    gone = DatasetComponent(source=UrlDatasetSource(train_urls=[str(tmp_path / "b.txt"), "gs://bucket/*.jsonl"]))
    hub = DatasetComponent(source=HfDatasetSource(id="org/name"))
    for config in (LmDataConfig(), LmDataConfig(components={"gone": gone})):
        with pytest.raises(AbsentTextError):
            resolve_training(config)
    with pytest.raises(DataError) as info:
        resolve_training(LmDataConfig(components={"gone": gone}, target_budget=3))
    assert not isinstance(info.value, AbsentTextError)
    pinned = replace(hub, source=HfDatasetSource(id="org/name", revision="v1"))
    with pytest.raises(DataError, match=r"train_urls: \[hf://datasets/org/name@v1/PATH"):
        resolve_training(LmDataConfig(components={"hub": pinned}))
    (tmp_path / "a.txt").write_text("text")
    there = {"a": DatasetComponent(source=UrlDatasetSource(train_urls=[str(tmp_path / "a.txt")]))}
    with pytest.raises(AbsentTextError, match="auto_build_caches is false"):
        resolve_training(LmDataConfig(cache_dir=str(tmp_path), components=there, auto_build_caches=False))


def test_sets_without_text_and_ids_out_of_range():
    empty = LmDataConfig(
        cache_dir=None,
        components={
            "a": DirectDatasetComponent(datasets={"train": ["", ""]}),
            "b": DirectDatasetComponent(datasets={"train": ["", "text"]}),
            "c": DirectDatasetComponent(datasets={"train": [""]}),
        },
    )
    with pytest.raises(DataError) as info:
        build(empty)
    assert "data set 'a' is empty: no text in 2 texts" in str(info.value) and "data set 'c'" in str(info.value)
    with pytest.raises(DataError, match=r"data set 'a': token id 262 is outside the model's vocabulary of 200"):
        build_training(
            LmDataConfig(cache_dir=None, components={"a": DirectDatasetComponent(datasets={"train": ["é"]})}),
            TOKENIZER,
            positions=8,
            batch_sizes=[(0, 1)],
            seed=0,
            vocab_size=200,
        )
    with pytest.raises(DataError, match="nothing is left to train on"):
        build(config_of({"a": 4}, num_validation_sequences={"a": 4}))
    with pytest.raises(DataError, match=r"max_train_batches.a: 9 batches of 4 rows each; there are 4 rows, 1 batches"):
        build(config_of({"a": 4}, max_train_batches={"a": 9}))
    with pytest.raises(ValueError, match="train_seq_len must be at least 2"):
        build(config_of({"a": 4}), positions=1)


def test_an_id_that_is_never_predicted():
    data = build(config_of({"a": 5}, ignore_token_id=EOS))
    rows = data.rows(0)
    expected = build(config_of({"a": 5})).rows(0).loss_weights
    expected[:, :-1][rows.tokens[:, 1:] == EOS] = 0
    assert (rows.loss_weights == expected).all() and (rows.loss_weights.sum(axis=1) == 12).all()


def test_fingerprints_tell_data_apart():
    same = build(config_of({"a": 9, "b": 5})).fingerprint
    assert build(config_of({"a": 9, "b": 5}), batch_sizes=[(0, 7)]).fingerprint == same
    others = [
        build(config_of({"a": 9, "b": 6})),
        build(config_of({"a": 9, "c": 5})),
        build(config_of({"a": 9, "b": 5}), seed=1),
        build(config_of({"a": 9, "b": 5}), positions=7),
        build(config_of({"a": 9, "b": 5}, shuffle=True)),
        build(config_of({"a": 9, "b": 5}, train_weights={"a": 1, "b": 2})),
        build(config_of({"a": 9, "b": 5}, mixture_block_size=64)),
    ]
    assert len({same, *(data.fingerprint for data in others)}) == 8


def test_the_order_is_described():
    for shuffle, expected in (
        (False, "rows in document order"),
        (True, "all rows shuffled (feistel)"),
        (100, "rows shuffled within eras of 100 (feistel)"),
        (BlockShuffleConfig(), "blocks of 256 rows shuffled, then rows within 512 blocks (feistel)"),
    ):
        lines = build(config_of({"a": 5}, shuffle=shuffle)).describe()
        assert f"order: {expected}, seed 0; stop_strategy restart" in lines


def test_notes_name_what_is_not_used(tmp_path):
    config = config_of({"a": 4, "b": 4}, train_weights={"a": 1.0, "b": 0.0})
    assert (
        "data.components.b: no weight in data.train_weights, so it is not trained on" in resolve_training(config).notes
    )
    without = replace(
        config_of({"a": 4}),
        components={**config_of({"a": 4}).components, "v": DirectDatasetComponent(datasets={"validation": ["x"]})},
    )
    assert "data.components.v: no training data, so it is not trained on" in resolve_training(without).notes
