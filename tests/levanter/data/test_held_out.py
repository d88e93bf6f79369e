"""Held-out rows as an evaluation: the same predictions that training would have made on them."""

from typing import Any

import numpy as np
import pytest
from helpers.small_tokenizer import SmallTokenizer

from levanter.data import build_sequences, build_training, resolve_evaluation, resolve_training
from levanter.data.config import DirectDatasetComponent, LmDataConfig
from levanter.data.errors import DataError
from levanter.data.eval_rows import concatenate_sequences, held_out_sequences

pytestmark = pytest.mark.quick

TOKENIZER = SmallTokenizer()


def predictions(rows, mask):
    """(context within the document, token) of every scored place."""
    found = []
    for tokens, segments, counted in zip(rows.tokens, rows.segment_ids, mask, strict=True):
        for t in np.flatnonzero(counted):
            context = tokens[: t + 1][segments[: t + 1] == segments[t]]
            found.append((tuple(context.tolist()), int(tokens[t + 1])))
    return sorted(found)


def data_of(**more):
    rng = np.random.default_rng(0)
    texts = {name: ["the " * int(rng.integers(1, 9)) + name + str(i) for i in range(60)] for name in "abc"}
    components: dict[str, Any] = {name: DirectDatasetComponent(datasets={"train": texts[name]}) for name in texts}
    config = LmDataConfig(cache_dir=None, components=components, **more)
    return config, build_training(config, TOKENIZER, positions=16, batch_sizes=[(0, 4)], seed=0)


def test_the_same_predictions():
    _, data = data_of(num_validation_sequences={"a": 7, "c": 5})
    sequences = held_out_sequences(data, TOKENIZER)
    assert sequences is not None
    assert [span.name for span in sequences.sets] == ["a/held_out", "c/held_out"]
    for span, one in zip(sequences.sets, (data.sets[0], data.sets[2]), strict=True):
        rows = one.held_out_rows(0, one.held_out)
        trained = predictions(rows, rows.loss_weights > 0)
        taken = sequences.take(np.arange(span.first_row, span.first_row + span.rows))
        scored = predictions(taken, taken.loss_mask)
        # What training would predict, from the same context: row by row, not only all in all.
        assert trained == scored and len(scored) > 50
        assert (taken.tokens == rows.tokens).all() and (taken.loss_mask == (rows.loss_weights > 0)).all()
    _, whole = data_of()
    assert held_out_sequences(whole, TOKENIZER) is None


def test_beside_other_sets():
    _, data = data_of(num_validation_sequences={"b": 6})
    held = held_out_sequences(data, TOKENIZER)
    validation = LmDataConfig(components={"v": DirectDatasetComponent(datasets={"validation": ["the x and é"] * 5})})
    other = build_sequences(resolve_evaluation(validation).sets, TOKENIZER, max_length=16)
    both = concatenate_sequences(other, held)
    assert held is not None and both is not None
    assert [span.name for span in both.sets] == ["v", "b/held_out"]
    taken = both.take(np.arange(both.row_count))
    for part, first in ((other, 0), (held, other.row_count)):
        alone = part.take(np.arange(part.row_count))
        here = slice(first, first + part.row_count)
        assert (taken.tokens[here] == alone.tokens).all() and (taken.loss_mask[here] == alone.loss_mask).all()
        assert (taken.scored_bytes[here] == alone.scored_bytes).all()
    assert concatenate_sequences(None, held) is held and concatenate_sequences(other, None) is other


def test_evaluation_alone_does_not_know_them():
    config, _ = data_of(num_validation_sequences={"b": 6})
    assert resolve_training(config).sets
    with pytest.raises(DataError, match=r"data\.num_validation_sequences: these sequences are held out when training"):
        resolve_evaluation(config)
    assert resolve_evaluation(config, in_training=True).sets == ()
