"""log p_z from stored numbers against the definition over whole distributions; files that come back as they were."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from levanter.memorization.results import FULL, GREEDY, STORED_SCHEMES, TOP_40, BookResult, Scheme, Scores

pytestmark = pytest.mark.quick

RNG = np.random.default_rng(0)
N, K, VOCAB = 60, 4, 90
LOGITS = RNG.normal(size=(N, K, VOCAB)) * 2
# Targets of every rank, the most likely ones often enough for greedy windows.
TARGETS = np.take_along_axis(
    np.argsort(-LOGITS, axis=-1), RNG.choice([0, 0, 0, 5, 39, 40, 80], size=(N, K, 1)), axis=-1
)[..., 0]
EXTRA = Scheme(top_k=7, temperature=0.6)


def lse(x):
    top = x.max(-1, keepdims=True)
    return np.log(np.exp(x - top).sum(-1)) + top[..., 0]


LOGP = LOGITS - lse(LOGITS)[..., None]
SORTED = -np.sort(-LOGP, axis=-1)


def book(**changes):
    spans = np.stack([np.arange(N), np.arange(N) + 9], 1).astype(np.int64)
    chosen = np.take_along_axis(LOGP, TARGETS[..., None], -1)[..., 0]
    fields = dict(
        title="Die Verwandlung",
        preset="paper",
        scheme=TOP_40,
        manifest={"windows": N, "text": "ä"},
        text="Als Gregor Samsa eines Morgens …",
        prefix_tokens=3,
        suffix_tokens=K,
        token_spans=spans,
        char_spans=2 * spans,
        suffix_char_spans=2 * spans + 1,
        logprobs=chosen.astype(np.float32),
        ranks=(chosen[..., None] < LOGP).sum(-1).astype(np.int32),
        top_lse=lse(SORTED[..., :40]).astype(np.float32),
        normalizers={EXTRA.name: lse(SORTED[..., :7] / 0.6).astype(np.float32)},
    )
    return BookResult(**{**fields, **changes})


def by_definition(top_k, temperature, length):
    """The product over the suffix of the softmax of logits / T restricted to the top K."""
    total = np.zeros(N)
    for t in range(length):
        for n in range(N):
            scaled = LOGITS[n, t] / temperature
            order = np.argsort(-scaled)[:top_k]
            if TARGETS[n, t] not in order:
                total[n] = -np.inf
            else:
                total[n] += scaled[TARGETS[n, t]] - np.log(np.exp(scaled[order]).sum())
    return total


@pytest.mark.parametrize("length", [None, 1, 3])
@pytest.mark.parametrize("law", [(None, 1.0), (40, 1.0), (1, 1.0), (7, 0.6), (1, 0.3)])
def test_log_pz_is_the_definition(law, length):
    top_k, temperature = law
    scheme = Scheme(top_k=top_k, temperature=temperature, suffix_tokens=length)
    found, expected = book().log_pz(scheme), by_definition(top_k, temperature, length or K)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    if top_k is not None and (top_k, length) != (7, None):
        assert np.isfinite(found).any() and not np.isfinite(found).all()


def test_log_pz_reaches_where_probabilities_underflow():
    tiny = np.full((N, K), -500, np.float32)
    assert (book(logprobs=tiny).log_pz(FULL) == -500.0 * K).all()


def test_rounding_makes_no_probability_above_one():
    certain = np.full((N, K), -1e-7, np.float32)
    result = book(logprobs=certain, top_lse=certain * 2, ranks=np.zeros((N, K), np.int32))
    assert (result.log_pz(TOP_40) == 0).all() and (result.log_pz(GREEDY) == 0).all()


def test_what_was_not_stored_is_refused_with_the_way_to_get_it():
    with pytest.raises(ValueError, match=r"k20: .*has k40, full, greedy, k7_t0.6\).*schemes: \[k20\]"):
        book().log_pz(Scheme(top_k=20))
    with pytest.raises(ValueError, match="5 suffix tokens requested, 4 were scored"):
        book().log_pz(Scheme(suffix_tokens=5))


def test_names_of_schemes_come_back():
    schemes = (*STORED_SCHEMES, EXTRA, Scheme(top_k=40, suffix_tokens=25), Scheme(temperature=1.25))
    assert [scheme.name for scheme in schemes] == ["full", "k40", "greedy", "k7_t0.6", "k40_s25", "full_t1.25"]
    assert tuple(Scheme.parse(scheme.name) for scheme in schemes) == schemes
    for bad in ("k", "top40", "k40_x", "", "k0", "full_t0"):
        with pytest.raises(ValueError, match=r"not a scheme|top_k|temperature"):
            Scheme.parse(bad)


def test_files_come_back_as_they_were(tmp_path):
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    original = book()
    original.write(one)
    found = BookResult.read(one)
    for name in ("title", "preset", "scheme", "manifest", "text", "prefix_tokens", "suffix_tokens", "schemes"):
        assert getattr(found, name) == getattr(original, name), name
    for name in ("token_spans", "char_spans", "suffix_char_spans"):
        np.testing.assert_array_equal(getattr(found, name), getattr(original, name))
    for name, array in original.scores.arrays.items():
        again = found.scores.arrays[name]
        assert again.dtype == array.dtype
        np.testing.assert_array_equal(again, array)
    found.write(two)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


def test_other_programs_can_read_the_table(tmp_path):
    book(text=None).write(str(tmp_path))
    table = pq.read_table(tmp_path / "windows.parquet")
    assert table.num_rows == N and not (tmp_path / "text.txt").exists()
    np.testing.assert_array_equal(table["window"].to_numpy(), np.arange(N))
    np.testing.assert_array_equal(table["log_pz_k40"].to_numpy(), book().log_pz(TOP_40))
    np.testing.assert_array_equal(table["suffix_char_span_start"].to_numpy(), book().suffix_char_spans[:, 0])
    assert BookResult.read(str(tmp_path)).text is None


def test_a_book_without_windows(tmp_path):
    empty = {name: array[:0] for name, array in book().scores.arrays.items() if not name.startswith("normalizer")}
    spans = {name: getattr(book(), name)[:0] for name in ("token_spans", "char_spans", "suffix_char_spans")}
    book(**empty, **spans, normalizers={}).write(str(tmp_path))
    assert len(BookResult.read(str(tmp_path))) == 0


def test_a_folder_of_something_else_is_refused(tmp_path):
    book().write(str(tmp_path))
    table = pq.read_table(tmp_path / "windows.parquet")
    pq.write_table(table.replace_schema_metadata({}), tmp_path / "windows.parquet")
    with pytest.raises(ValueError, match="not written by a memorization run"):
        BookResult.read(str(tmp_path))
    (tmp_path / "windows.parquet").unlink()
    with pytest.raises(ValueError, match=r"windows\.parquet: no such file"):
        BookResult.read(str(tmp_path))


def test_scores_join_in_order():
    parts = [Scores.of_arrays({n: a[s] for n, a in book().scores.arrays.items()}) for s in (slice(0, 7), slice(7, N))]
    whole = Scores.joined(parts)
    assert len(whole) == N and json.dumps(sorted(whole.arrays)) == json.dumps(sorted(book().scores.arrays))
    for name, array in book().scores.arrays.items():
        np.testing.assert_array_equal(whole.arrays[name], array)
