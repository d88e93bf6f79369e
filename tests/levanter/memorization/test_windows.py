"""Windows against the definitions, cut by hand from the same tokenizer, on text with characters of several bytes."""

import numpy as np
import pytest
from helpers.small_tokenizer import BOS, SmallTokenizer

from levanter.memorization.windows import Windowing, build_windows

pytestmark = pytest.mark.quick

TOKENIZER = SmallTokenizer()
TEXT = "the cat and the 日本 éclair 🎉\n\n" * 3 + "and naïve the the the end"


def by_hand(text, windowing):
    """(tokens, window's characters, suffix's characters, window's tokens) of each window."""
    own = windowing.window_tokens - windowing.bos
    found = []
    starts = [0] if windowing.token_mode else range(0, len(text), windowing.stride_chars)
    for cursor in starts:
        piece = text if windowing.token_mode else text[cursor : cursor + windowing.slice_chars]
        ids, spans = TOKENIZER.encode_with_offsets(piece)
        if windowing.token_mode:
            ats = [at for at in range(0, len(ids), windowing.stride_tokens) if at + own <= len(ids)]
        else:
            ats = [0] if len(ids) >= own else []
        for at in ats:
            tokens = ([BOS] if windowing.bos else []) + [int(i) for i in ids[at : at + own]]
            first_scored = at + own - (windowing.window_tokens - windowing.prefix_tokens)
            stop = cursor + spans[at + own - 1, 1]
            found.append(
                (
                    tokens,
                    (cursor + spans[at, 0], stop),
                    (cursor + spans[first_scored, 0], stop),
                    (at, at + own) if windowing.token_mode else (-1, -1),
                )
            )
    return found


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        dict(token_mode=True, stride_tokens=1),
        dict(token_mode=True, stride_tokens=7),
        dict(stride_chars=1, slice_chars=30),
        dict(stride_chars=10, slice_chars=20),
        dict(stride_chars=3, slice_chars=1000),
    ],
    ids=str,
)
def test_windows_are_those_of_the_definition(settings, bos):
    windowing = Windowing(window_tokens=17, prefix_tokens=9, bos=bos, **settings)
    windows = build_windows(TEXT, TOKENIZER, windowing)
    expected = by_hand(TEXT, windowing)
    assert len(windows) == len(expected) > 3
    everything = np.arange(len(windows))
    np.testing.assert_array_equal(windows.take(everything), [e[0] for e in expected])
    np.testing.assert_array_equal(windows.char_spans, [e[1] for e in expected])
    np.testing.assert_array_equal(windows.suffix_char_spans, [e[2] for e in expected])
    np.testing.assert_array_equal(windows.token_spans, [e[3] for e in expected])
    assert windows.take(everything).dtype == np.int32
    np.testing.assert_array_equal(windows.take(np.array([2, 0, 2])), [expected[n][0] for n in (2, 0, 2)])


@pytest.mark.parametrize("tokens", [16, 17, 18, 100, 101, 104])
@pytest.mark.parametrize("stride", [1, 5])
def test_the_number_of_windows_in_token_mode(tokens, stride):
    """N = ⌊(T − n) / s⌋ + 1."""
    windowing = Windowing(window_tokens=17, prefix_tokens=9, token_mode=True, stride_tokens=stride)
    text = "x" * tokens  # one token a character
    expected = (tokens - 17) // stride + 1 if tokens >= 17 else 0
    assert windowing.count(tokens) == expected
    if expected:
        assert len(build_windows(text, TOKENIZER, windowing)) == expected
    else:
        with pytest.raises(ValueError, match="no window of 17 tokens: it has 16 characters"):
            build_windows(text, TOKENIZER, windowing)


@pytest.mark.parametrize("token_mode", [False, True])
def test_repeated_windows_are_left_out_and_counted(token_mode):
    settings = dict(window_tokens=8, prefix_tokens=4, token_mode=token_mode, stride_chars=1, slice_chars=40)
    every = build_windows(TEXT, TOKENIZER, Windowing(**settings))
    once = build_windows(TEXT, TOKENIZER, Windowing(drop_duplicates=True, **settings))
    rows = every.take(np.arange(len(every)))
    _, first = np.unique(rows, axis=0, return_index=True)
    kept = np.sort(first)
    assert 0 < len(once) < len(every) and once.duplicates == len(every) - len(once)
    np.testing.assert_array_equal(once.take(np.arange(len(once))), rows[kept])
    np.testing.assert_array_equal(once.char_spans, every.char_spans[kept])
    np.testing.assert_array_equal(once.suffix_char_spans, every.suffix_char_spans[kept])


@pytest.mark.parametrize("settings", [dict(token_mode=True), dict(stride_chars=2), dict(drop_duplicates=True)], ids=str)
def test_the_first_windows_alone_are_the_first_of_all(settings):
    windowing = Windowing(window_tokens=8, prefix_tokens=4, slice_chars=40, **settings)
    every, few = (build_windows(TEXT, TOKENIZER, windowing, max_windows=limit) for limit in (None, 5))
    assert len(few) == 5 < len(every)
    np.testing.assert_array_equal(few.take(np.arange(5)), every.take(np.arange(5)))
    np.testing.assert_array_equal(few.char_spans, every.char_spans[:5])


def test_a_bos_that_the_tokenizer_lacks_is_refused():
    with pytest.raises(ValueError, match="small has no BOS token; set bos: false"):
        build_windows(TEXT, SmallTokenizer(bos=False), Windowing(bos=True, token_mode=True))


def test_a_slice_that_never_holds_a_window_is_explained():
    with pytest.raises(ValueError, match=r"taken 20 at a time \(slice_length\)"):
        build_windows("x" * 500, TOKENIZER, Windowing(slice_chars=20))


def test_progress_goes_to_the_end_of_the_text():
    seen = []
    build_windows(TEXT, TOKENIZER, Windowing(window_tokens=8, prefix_tokens=4), on_progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == len(TEXT)


def test_problems_are_told_in_the_words_of_the_config():
    assert Windowing().problems() == []
    bad = Windowing(window_tokens=50, prefix_tokens=50, stride_tokens=0, stride_chars=0, slice_chars=-1).problems()
    assert [problem.split(":")[0] for problem in bad] == [
        "prompt_tokens",
        "cursor_inc_tokens",
        "cursor_inc_chars",
        "slice_length",
    ]


def test_estimates_are_near():
    """The gatsby of the published runs: 268,648 characters gave 26,839 windows in text mode."""
    assert abs(Windowing().count_in_text(268_648) - 26_839) < 30
    assert Windowing(token_mode=True, stride_tokens=5).count(108_000) == 21_581
