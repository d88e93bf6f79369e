"""`best_fit_cropped` against nanochat's algorithm by its description, on lists of documents."""

import json
from itertools import chain, pairwise

import numpy as np
import pytest
from helpers.small_tokenizer import SmallTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.data import DataError, DatasetComponent, LmDataConfig, UrlDatasetSource, build_training
from levanter.data.best_fit_packing import RowPlanner, best_fit_rows, plan_best_fit
from levanter.data.formats import SupervisedLmDatasetFormat
from levanter.data.store import MemoryTokens

pytestmark = pytest.mark.quick


def reference_rows(documents, positions, *, buffer, refill):
    """Rows as lists of ids, and how many ids were dropped: every step searches the whole buffer."""
    coming, waiting, rows, dropped = list(documents), [], [], 0
    while coming or waiting:
        row = []
        while len(row) < positions:
            while len(waiting) < buffer and coming:
                waiting, coming = waiting + coming[:refill], coming[refill:]
            if not waiting:
                break
            space = positions - len(row)
            fitting = [document for document in waiting if len(document) <= space]
            chosen = max(fitting, key=len) if fitting else min(waiting, key=len)
            waiting.pop(next(i for i, document in enumerate(waiting) if document is chosen))
            row += chosen[:space]
            dropped += max(len(chosen) - space, 0)
        rows.append(row)
    return rows, dropped


def tokens_of(lengths):
    ids = [np.arange(length, dtype=np.int32) + 1000 * number for number, length in enumerate(lengths)]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return [document.tolist() for document in ids], MemoryTokens(ids=np.concatenate(ids), starts=starts)


def rows_of(documents, plan):
    pieces = zip(plan.documents, plan.starts, plan.lengths, strict=True)
    texts = [documents[d][start : start + length] for d, start, length in pieces]
    return [list(chain.from_iterable(texts[a:b])) for a, b in pairwise(plan.row_starts)]


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(2, 20), st.integers(1, 9), st.integers(1, 5))
def test_small_buffers(lengths, positions, buffer, refill):
    documents, _ = tokens_of(lengths)
    plan = plan_best_fit(np.array(lengths), positions=positions, buffer=buffer, refill=refill)
    expected, dropped = reference_rows(documents, positions, buffer=buffer, refill=refill)
    assert rows_of(documents, plan) == expected
    assert plan.dropped == dropped == sum(lengths) - plan.lengths.sum()


def web_lengths(count, seed=0):
    """Lengths as web text has them: a median of 400 tokens and a long tail."""
    drawn = np.random.default_rng(seed).lognormal(6.0, 1.1, count)
    return np.maximum(drawn.astype(np.int64), 2)


def test_the_first_200_rows_are_the_reference_s():
    documents, tokens = tokens_of(web_lengths(2500).tolist())
    rows = best_fit_rows(tokens, positions=2048, separate=False)
    expected, _ = reference_rows(documents, 2048, buffer=1000, refill=128)
    taken = rows.take(np.arange(200))
    assert taken.tokens.tolist() == expected[:200]
    # Full rows of which only the last place predicts nothing, and each of which begins a document.
    assert (taken.segment_ids == 0).all() and (taken.loss_weights[:, :-1] == 1).all()
    assert (taken.loss_weights[:, -1] == 0).all() and (taken.tokens[:, 0] % 1000 == 0).all()
    # Any row by its number, in any order.
    np.testing.assert_array_equal(rows.take(np.array([150, 3])).tokens, taken.tokens[[150, 3]])


def test_documents_that_do_not_see_each_other():
    _, tokens = tokens_of([4, 3, 9])
    rows = best_fit_rows(tokens, positions=7, separate=True).take(np.arange(2))
    assert rows.tokens[0].tolist() == [0, 1, 2, 3, 1000, 1001, 1002]
    assert rows.segment_ids[0].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert rows.loss_weights[0].tolist() == [1, 1, 1, 0, 1, 1, 0]
    # The document that is longer than a row is cropped.
    assert rows.tokens[1].tolist() == list(range(2000, 2007))


def test_rows_stay_when_documents_arrive_later():
    lengths = web_lengths(4000, seed=1)
    whole = plan_best_fit(lengths, positions=1024)
    planner, seen = RowPlanner(positions=1024), 0
    for end in (1, 700, 1500, 1501, 3999, 4000):
        planner.add(lengths[seen:end], final=False)
        seen, plan = end, planner.plan()
        rows = len(plan.row_starts) - 1
        np.testing.assert_array_equal(plan.row_starts, whole.row_starts[: rows + 1])
        np.testing.assert_array_equal(plan.documents, whole.documents[: plan.row_starts[-1]])
        np.testing.assert_array_equal(plan.lengths, whole.lengths[: plan.row_starts[-1]])
    planner.add(np.zeros(0, np.int64), final=True)
    np.testing.assert_array_equal(planner.plan().documents, whole.documents)
    assert planner.plan().dropped == whole.dropped


def test_the_share_that_is_dropped():
    """nanochat reports about 35 % at 2,048 tokens of its web text; longer rows lose less."""
    lengths = web_lengths(20_000)
    lost = [plan_best_fit(lengths, positions=positions).dropped / lengths.sum() for positions in (512, 2048, 8192)]
    assert lost[0] > lost[1] > lost[2] and 0.02 < lost[1] < 0.5, lost


def data_of(folder, *, pack="best_fit_cropped", cached=True, **more):
    path = folder / "text.jsonl"
    if not path.exists():
        texts = ["x" * int(length) for length in np.random.default_rng(3).integers(1, 60, 300)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = UrlDatasetSource(train_urls=[str(path)])
    config = LmDataConfig(
        cache_dir=str(folder / "cache") if cached else None,
        components={"web": DatasetComponent(source=source, pack=pack, **more)},
        shuffle=False,
        block_cross_document_attention=False,
    )
    return build_training(config, SmallTokenizer(), positions=32, batch_sizes=[(0, 4)], seed=0)


def test_the_plan_is_stored_beside_the_tokens(tmp_path, caplog):
    memory, first = data_of(tmp_path, cached=False), data_of(tmp_path)
    (path,) = (tmp_path / "cache" / "web" / "train" / "rows").iterdir()
    before = path.stat().st_mtime_ns
    again = data_of(tmp_path)
    # The tokens dropped are reported with the set.
    assert "dropped from the ends of" in first.described[0] and "best fit" in first.described[0]
    assert path.stat().st_mtime_ns == before
    path.write_bytes(path.read_bytes()[:-40])
    damaged = data_of(tmp_path)
    assert "damaged" in caplog.text
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    flipped = data_of(tmp_path)
    for data in (first, again, damaged, flipped):
        for step in (0, 7, 3):
            np.testing.assert_array_equal(data.rows(step).tokens, memory.rows(step).tokens)


def test_records_of_other_formats_are_refused(tmp_path):
    with pytest.raises(DataError, match="best_fit_cropped crops documents of plain text"):
        data_of(tmp_path, format=SupervisedLmDatasetFormat())
