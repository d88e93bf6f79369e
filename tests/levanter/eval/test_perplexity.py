"""Perplexity against a bigram model that is summed up by hand, one document and one token at a time."""

import itertools
import math

import numpy as np
import pytest
from helpers.small_tokenizer import BOS, EOS, SmallTokenizer

from levanter.data import EvalBatches, EvaluationSet, build_sequences
from levanter.data.documents import InlineDocuments
from levanter.eval import EvalResult, RowScores, Score, SetScore, summarize

pytestmark = pytest.mark.quick

VOCAB = SmallTokenizer().vocab_size


@pytest.fixture(scope="module")
def bigram():
    """log p(next | this), float32 [vocab, vocab]."""
    logits = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)) * 3
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


def random_texts(seed, documents):
    rng = np.random.default_rng(seed)
    pieces = ["the ", "and ", "é", "日本", "x", "q", "\n\n", "ü"]
    return ["".join(rng.choice(pieces, size=rng.integers(1, 60))) for _ in range(documents)]


GROUPS = {"wiki": random_texts(1, 9), "books": random_texts(2, 4), "code": ["ab"]}
TAGS = {"wiki": ("web/clean", "wiki"), "books": ("web/raw", "long", "books"), "code": ("code",)}


def sequences_of(max_length):
    sets = [
        EvaluationSet(name=name, tags=TAGS[name], document_sources=(InlineDocuments(texts=tuple(texts), origin=name),))
        for name, texts in GROUPS.items()
    ]
    return build_sequences(sets, SmallTokenizer(), max_length=max_length)


def by_hand(bigram):
    """For each set (nats, tokens, bytes)."""
    tokenizer, result = SmallTokenizer(), {}
    lengths = tokenizer.byte_lengths()
    for name, texts in GROUPS.items():
        terms, tokens, num_bytes = [], 0, 0
        for text in texts:
            ids = [BOS, *tokenizer.encode_with_offsets(text)[0].tolist(), EOS]
            for this, following in itertools.pairwise(ids):
                terms.append(-float(bigram[this, following]))
                tokens += 1
                num_bytes += int(lengths[following])
        result[name] = (math.fsum(terms), tokens, num_bytes)
    return result


def model(bigram, batch):
    """The bigram model on a batch; nonsense wherever nothing is scored, as a real model has there."""
    logprobs = np.full(batch.tokens.shape, np.nan, np.float32)
    logprobs[:, :-1] = bigram[batch.tokens[:, :-1], batch.tokens[:, 1:]]
    logprobs[~batch.loss_mask] = np.nan
    return logprobs


def evaluate(bigram, *, max_length, batch_size, limit=None):
    sequences = sequences_of(max_length)
    batches = EvalBatches(sequences=sequences, batch_size=batch_size, max_rows_per_set=limit)
    scores = RowScores(sequences.row_count)
    for step in range(len(batches)):
        scores.add(batches[step], model(bigram, batches[step]))
    return summarize(sequences, scores, max_rows_per_set=limit)


@pytest.mark.parametrize("max_length", [2, 5, 16, 500])
@pytest.mark.parametrize("batch_size", [1, 3, 8, 64])
def test_the_numbers_are_those_by_hand_for_every_batch_size(bigram, max_length, batch_size):
    result = evaluate(bigram, max_length=max_length, batch_size=batch_size)
    expected = by_hand(bigram)
    for one in result.sets:
        nats, tokens, num_bytes = expected[one.name]
        assert (one.score.tokens, one.score.bytes) == (tokens, num_bytes)
        assert one.score.bytes == sum(len(text.encode()) for text in GROUPS[one.name])
        assert one.score.nats == pytest.approx(nats, abs=1e-6 * tokens, rel=1e-9)
        assert one.score.loss == pytest.approx(nats / tokens, abs=1e-6)
        assert one.score.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-9)
        assert one.score.bits_per_byte == pytest.approx(nats / num_bytes / math.log(2), rel=1e-9)


def test_batch_sizes_agree_to_the_last_bit(bigram):
    results = [evaluate(bigram, max_length=16, batch_size=size).to_json() for size in (1, 3, 8, 64)]
    assert all(result == results[0] for result in results)


def test_averages_and_metric_names(bigram):
    result = evaluate(bigram, max_length=16, batch_size=4)
    hand = by_hand(bigram)
    loss = {name: nats / tokens for name, (nats, tokens, _) in hand.items()}
    bpb = {name: nats / num_bytes / math.log(2) for name, (nats, _, num_bytes) in hand.items()}
    everything = np.array(list(hand.values())).sum(axis=0)
    web = np.array([hand["wiki"], hand["books"]]).sum(axis=0)
    assert result.metrics() == pytest.approx(
        {
            "eval/loss": everything[0] / everything[1],
            "eval/perplexity": math.exp(everything[0] / everything[1]),
            "eval/bpb": everything[0] / everything[2] / math.log(2),
            "eval/macro_loss": sum(loss.values()) / 3,
            "eval/macro_bpb": sum(bpb.values()) / 3,
            "eval/tokens": everything[1],
            **{f"eval/{name}/loss": value for name, value in loss.items()},
            **{f"eval/{name}/bpb": value for name, value in bpb.items()},
            # `web` exists as a parent only; its children and `long` are tags of one set each.
            "eval/web/micro_loss": web[0] / web[1],
            "eval/web/bpb": web[0] / web[2] / math.log(2),
            "eval/web/macro_loss": (loss["wiki"] + loss["books"]) / 2,
            "eval/web/macro_bpb": (bpb["wiki"] + bpb["books"]) / 2,
            **{
                f"eval/{tag}/{metric}": value
                for tag, name in (("web/clean", "wiki"), ("web/raw", "books"), ("long", "books"))
                for metric, value in (("loss", loss[name]), ("bpb", bpb[name]))
            },
        }
    )
    assert set(result.metrics("")) == {name.removeprefix("eval/") for name in result.metrics()}


def test_a_limit_scores_fewer_rows(bigram):
    result = evaluate(bigram, max_length=8, batch_size=4, limit=2)
    assert [one.rows for one in result.sets] == [2, 2, 1]
    assert all(one.score.tokens <= 2 * 7 for one in result.sets)


def test_rows_added_twice_or_never_are_a_bug(bigram):
    sequences = sequences_of(16)
    batches = EvalBatches(sequences=sequences, batch_size=4)
    scores = RowScores(sequences.row_count)
    for step in range(len(batches) - 1):
        scores.add(batches[step], model(bigram, batches[step]))
    with pytest.raises(AssertionError, match="0 were added"):
        summarize(sequences, scores)
    for step in (0, len(batches) - 1):
        scores.add(batches[step], model(bigram, batches[step]))
    with pytest.raises(AssertionError, match="row 0 scores"):
        summarize(sequences, scores)


def test_numbers_that_are_not_finite_are_kept_and_named():
    def one(name, nats):
        return SetScore(name=name, tags=(name,), score=Score(nats=nats, tokens=2, bytes=0), rows=1, documents=1)

    result = EvalResult(sets=(one("a", 3.0), one("b", math.inf), one("c", math.nan)))
    assert result.not_finite == ("b", "c")
    assert math.isnan(result.sets[0].score.bits_per_byte)
    assert result.sets[1].score.perplexity == math.inf
    assert Score(nats=5000.0, tokens=1, bytes=1).perplexity == math.inf
