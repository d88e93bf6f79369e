"""Fill in the middle: the original comes back, by the paper's orders; shares, seeds, spans and refusals."""

import json
from itertools import chain, pairwise

import numpy as np
import pytest
from helpers.small_tokenizer import BOS, EOS, SmallTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.data import DataError, DatasetComponent, LmDataConfig, UrlDatasetSource, build_training
from levanter.data.config import FillInMiddleConfig
from levanter.data.fill_in_middle import FillInMiddleTokens, Sentinels, find_sentinels, original_document
from levanter.data.formats import ChatLmDatasetFormat
from levanter.data.store import MemoryTokens

pytestmark = pytest.mark.quick

PRE, SUF, MID, END = 900, 901, 902, 903


def documents_of(lengths, *, bos, eos):
    """Documents whose tokens all differ: id 1000·d + i within; BOS 1 and EOS 2 around them."""
    bodies = [[1000 * d + 10 + i for i in range(length)] for d, length in enumerate(lengths)]
    return [[BOS] * bos + body + [EOS] * eos for body in bodies]


def view(documents, *, rate=1.0, spm=0.5, end=False, key=5, bos=True, eos=True):
    ids = np.array(list(chain.from_iterable(documents)), np.int32)
    starts = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype(np.int64)
    sentinels = Sentinels(prefix=PRE, suffix=SUF, middle=MID, end=END if end else None)
    tokens = MemoryTokens(ids=ids, starts=starts)
    return FillInMiddleTokens(tokens=tokens, rate=rate, spm=spm, sentinels=sentinels, key=key, bos=bos, eos=eos)


def all_documents(changed):
    starts = changed.starts
    ids, weights = changed.read(starts[:-1], np.diff(starts))
    assert weights is None and ids.dtype == np.int32
    return [ids[a:b].tolist() for a, b in pairwise(starts)]


def reference(document, first, second, spm, *, bos, eos, end):
    """The paper's two orders (arXiv 2207.14255, section 3), written out."""
    body = document[bos : len(document) - eos]
    prefix, middle, suffix = body[:first], body[first:second], body[second:]
    close = [END] if end else []
    if spm:
        inner = [PRE, SUF, *suffix, MID, *prefix, *middle, *close]
    else:
        inner = [PRE, *prefix, SUF, *suffix, MID, *middle, *close]
    return document[:bos] + inner + document[len(document) - eos :]


cases = st.tuples(
    st.lists(st.integers(0, 12), min_size=1, max_size=9),
    st.sampled_from([0.3, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**64 - 1),
).filter(lambda case: case[4] or case[5] or min(case[0]) > 0)


@settings(deadline=None, max_examples=120)
@given(cases)
def test_the_original_comes_back(case):
    lengths, rate, spm, end, bos, eos, key = case
    documents = documents_of(lengths, bos=bos, eos=eos)
    changed = view(documents, rate=rate, spm=spm, end=end, bos=bos, eos=eos, key=key)
    made = all_documents(changed)
    first, second, swapped = changed.cuts(np.arange(len(documents)))
    for number, document in enumerate(documents):
        if changed.changed[number]:
            cuts = int(first[number]), int(second[number])
            assert made[number] == reference(document, *cuts, swapped[number], bos=bos, eos=eos, end=end)
            assert lengths[number] >= 2
        else:
            assert made[number] == document
        assert original_document(made[number], changed.sentinels, bos=bos, eos=eos) == document
    # Any spans, in any order, across documents.
    everything = list(chain.from_iterable(made))
    rng = np.random.default_rng(key % 2**32)
    begins = rng.integers(0, len(everything), 6)
    counts = np.array([rng.integers(0, len(everything) - begin + 1) for begin in begins])
    ids, _ = changed.read(begins, counts)
    spans = (everything[b : b + n] for b, n in zip(begins, counts, strict=True))
    assert ids.tolist() == list(chain.from_iterable(spans))
    assert changed.largest_id == max(max(everything), max(map(max, documents)), PRE, SUF, MID, END if end else 0)


def test_shares_are_within_three_standard_deviations():
    count = 20_000
    documents = documents_of([6] * count, bos=True, eos=False)
    for rate, spm in ((0.5, 0.5), (0.1, 0.9)):
        changed = view(documents, rate=rate, spm=spm, eos=False)
        deviation = np.sqrt(count * rate * (1 - rate))
        assert abs(changed.changed.sum() - count * rate) < 3 * deviation
        rows = np.flatnonzero(changed.changed)
        first, second, swapped = changed.cuts(rows)
        assert abs(swapped.sum() - len(rows) * spm) < 3 * np.sqrt(len(rows) * spm * (1 - spm))
        # Two places among 7, drawn independently: each of the 28 pairs with its probability, by a chi-square of 27.
        pairs = np.zeros((7, 7))
        np.add.at(pairs, (first, second), 1)
        expected = np.triu(np.full((7, 7), 2 / 49)) - np.eye(7) / 49
        inside = np.triu_indices(7)
        chi = ((pairs[inside] - len(rows) * expected[inside]) ** 2 / (len(rows) * expected[inside])).sum()
        assert chi < 27 + 4 * np.sqrt(2 * 27), chi
        # The kinds of draws are independent of each other, and of their neighbours.
        assert abs(np.corrcoef(swapped, first)[0, 1]) < 4 / np.sqrt(len(rows))
        follows = changed.changed[:-1] & changed.changed[1:]
        assert abs(follows.sum() - (count - 1) * rate**2) < 4 * np.sqrt(count * rate**2)


def test_the_seed_decides():
    documents = documents_of([9] * 200, bos=True, eos=True)
    first, again, other = (view(documents, rate=0.5, key=key) for key in (1, 1, 2))
    assert all_documents(first) == all_documents(again) != all_documents(other)
    # A document's change does not depend on how many follow it.
    assert all_documents(view(documents[:50], rate=0.5, key=1)) == all_documents(first)[:50]


class CodeTokenizer(SmallTokenizer):
    """The small tokenizer with StarCoder's sentinels."""

    SENTINELS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")

    def __init__(self):
        super().__init__()
        self._first = self.vocab_size
        self.vocab_size += 3

    @property
    def added_ids(self):
        return frozenset(range(self._first, self._first + 3))

    def encode_batch(self, texts):
        ids = super().encode_batch(texts)
        marks = self.SENTINELS
        return [
            np.array([self._first + marks.index(text)], np.int32) if text in marks else one
            for text, one in zip(texts, ids, strict=True)
        ]


def data_of(folder, fim, *, tokenizer=None, pack=None, seed=0, **more):
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": "abcdefgh"[: 1 + i % 8] * 4}) + "\n" for i in range(200)))
    component = DatasetComponent(source=UrlDatasetSource(train_urls=[str(path)]), fim=fim, pack=pack, **more)
    config = LmDataConfig(cache_dir=str(folder / "cache"), components={"code": component})
    tokenizer = CodeTokenizer() if tokenizer is None else tokenizer
    return build_training(config, tokenizer, positions=24, batch_sizes=[(0, 4)], seed=seed)


@pytest.mark.parametrize("pack", [None, True, "best_fit_cropped"])
def test_a_run_resumes_to_the_same_rows(tmp_path, pack):
    fim = FillInMiddleConfig(rate=0.5)
    data, again = data_of(tmp_path, fim, pack=pack), data_of(tmp_path, fim, pack=pack)
    steps = [data.rows(step).tokens for step in range(8)]
    for step in (5, 1, 7):
        np.testing.assert_array_equal(again.rows(step).tokens, steps[step])
    assert again.fingerprint == data.fingerprint
    assert data_of(tmp_path, FillInMiddleConfig(rate=0.4), pack=pack).fingerprint != data.fingerprint
    assert data_of(tmp_path, fim, pack=pack, seed=1).fingerprint != data.fingerprint
    assert "fill in the middle: " in data.described[0]
    marks = np.isin(np.concatenate(steps), [262 + 2, 262 + 3, 262 + 4])
    assert marks.any()


def test_sentinels_of_the_tokenizer():
    assert find_sentinels(FillInMiddleConfig(), CodeTokenizer()) == Sentinels(prefix=264, suffix=265, middle=266)
    named = {"prefix": "<fim_middle>", "suffix": "<fim_prefix>", "middle": "<fim_suffix>"}
    assert find_sentinels(FillInMiddleConfig(sentinels=named), CodeTokenizer()).prefix == 266


def test_a_tokenizer_without_sentinels_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer small has none of the known sentinels \(<\|fim_prefix"):
        data_of(tmp_path, FillInMiddleConfig(), tokenizer=SmallTokenizer())
    # Before anything is tokenized.
    assert not (tmp_path / "cache").exists()
    named = {"prefix": "<A>", "suffix": "<fim_suffix>", "middle": "<fim_middle>"}
    with pytest.raises(DataError, match=r"has no '<A>' \(prefix\)"):
        data_of(tmp_path, FillInMiddleConfig(sentinels=named))
    # One letter is a single id, but text has it too.
    letters = {"prefix": "a", "suffix": "<fim_suffix>", "middle": "<fim_middle>"}
    with pytest.raises(DataError, match="has no 'a'"):
        data_of(tmp_path, FillInMiddleConfig(sentinels=letters))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"rate": 0.0}, "rate"),
        ({"rate": 1.5}, "rate"),
        ({"spm": -0.1}, "spm"),
        ({"sentinels": {"prefix": "<A>"}}, "it has no 'suffix'; it has no 'middle'"),
        ({"sentinels": {"prefix": "a", "suffix": "b", "middle": "c", "midle": "d"}}, "unknown key 'midle'"),
        ({"sentinels": {"prefix": "a", "suffix": "b", "middle": "b"}}, "two of them are the same"),
    ],
)
def test_bad_keys(keys, problem):
    with pytest.raises(ValueError, match=problem):
        FillInMiddleConfig(**keys)


def test_conversations_have_no_middle(tmp_path):
    with pytest.raises(DataError, match="documents of plain text have a middle"):
        data_of(tmp_path, FillInMiddleConfig(), format=ChatLmDatasetFormat())
