"""Losses over bytes: no nat is lost, whatever tokens cover. Kinds of text: upstream's, by another library's classes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from levanter.eval.gap.byte_losses import byte_offsets, cells, token_losses
from levanter.eval.gap.report import segments

TEXTS = ["the cat, didn't it? 12.5", "naïve — 日本語 🎉\n\n", "", " ", "a\tb\r\nc"]


def byte_level() -> Tokenizer:
    """Each byte a token: characters of several bytes are cut."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    return built


def prefixed() -> Tokenizer:
    """As SentencePiece's: a space before the text, bytes for what the vocabulary has not."""
    vocab = {f"<0x{n:02X}>": n for n in range(256)} | {c: 256 + n for n, c in enumerate("▁ctheas,")}
    built = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return built


@pytest.mark.parametrize("build", [byte_level, prefixed])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("leading", [0, 1])
def test_no_loss_is_lost(build, text: str, leading: int):
    encoded = build().encode(text, add_special_tokens=False)
    rng = np.random.default_rng(0)
    nats = rng.exponential(size=leading + len(encoded.ids))
    nats[:1] = np.nan
    found = token_losses(text, np.asarray(encoded.offsets), nats, leading=leading)
    assert found.bytes == len(text.encode()) == len(found.per_byte)
    if text:
        assert found.per_byte.sum() == pytest.approx(np.nansum(nats[leading:]), rel=1e-12)
        assert np.isfinite(found.per_byte).all() and (found.per_byte >= 0).all()
        assert (found.per_byte[: found.begin] == 0).all()


def test_a_loss_is_spread_evenly_over_what_its_token_covers():
    # "é" is two bytes; the second token covers it with the letter before it.
    found = token_losses("aéb", [[0, 0], [0, 2], [2, 3]], np.array([np.nan, 0.5, 3.0, 2.0]), leading=1)
    # What covers nothing gives its loss to the next token.
    assert found.per_byte.tolist() == [3.5 / 3] * 3 + [2.0]
    assert found.begin == 0
    without = token_losses("aéb", [[0, 0], [0, 2], [2, 3]], np.array([np.nan, 3.0, 2.0]), leading=0)
    assert without.per_byte.tolist() == [1.0] * 3 + [2.0] and without.begin == 0


@given(st.text(max_size=60))
@settings(max_examples=60)
def test_offsets_are_those_of_the_bytes(text: str):
    text = text.encode(errors="ignore").decode()
    assert byte_offsets(text).tolist() == [len(text[:n].encode()) for n in range(len(text) + 1)]


def test_cells_have_the_borders_of_both():
    a = token_losses("abcdef", [[0, 2], [2, 3], [3, 6]], np.ones(3), leading=0)
    b = token_losses("abcdef", [[0, 1], [1, 3], [3, 4], [4, 6]], np.ones(4), leading=0)
    assert cells(a, b).tolist() == [0, 3, 6]
    # Two tokens that share a character have no border between them.
    shared = token_losses("aé", [[0, 1], [1, 2], [1, 2]], np.ones(3), leading=0)
    assert cells(shared, shared).tolist() == [0, 1, 3]


PIECES = [
    *("word", "naïve", "don't", "a-b", "snake_case", "12", "3.14", "1/2", "٣", "é", "日本", "。", "!?", "—", "€", "😀"),
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        " \n",
        "\u00a0",
        "https://a.b/c?d=1",
        "www.x.y",
        "http:/",
        "_",
        "__!",
        "e\u0301",
    ),
]


def by_regex(text: str) -> list[tuple[str, str]]:
    """Upstream's rules as it writes them, by a library that knows the classes of Unicode."""
    regex = pytest.importorskip("regex")
    word, number, url = (
        r"[\p{L}\p{M}_]+(?:['’-][\p{L}\p{M}_]+)*",
        r"\p{N}+(?:[.,:/-]\p{N}+)*",
        r"(?:https?://|www\.)\S+",
    )
    found = []
    for match in regex.finditer(rf"{url}|\s+|{number}|{word}|[^\p{{L}}\p{{M}}\p{{N}}\s]+", text):
        piece = match.group(0)
        if piece.isspace():
            same = set(piece)
            kind = "tab_or_cr" if same & {"\t", "\r"} else "mixed"
            kind = {" ": "single_space", "\n": "newline"}[piece] if piece in (" ", "\n") else kind
            kind = "multi_space" if same == {" "} and len(piece) > 1 else kind
            kind = "multi_newline" if same == {"\n"} and len(piece) > 1 else kind
            found.append((piece, f"whitespace/{kind}"))
        elif regex.fullmatch(url, piece):
            found.append((piece, "text/url"))
        elif regex.fullmatch(number, piece):
            found.append((piece, "text/number"))
        elif regex.fullmatch(word, piece):
            found.append((piece, "text/word" if piece.isascii() else "text/non_ascii_word"))
        else:
            found.append((piece, "text/punctuation" if piece.isascii() else "text/non_ascii"))
    return found


@given(st.lists(st.sampled_from(PIECES), max_size=12))
@settings(max_examples=200)
def test_kinds_of_text_are_upstreams(pieces: list[str]):
    text = "".join(pieces)
    found = [(text[first:end], kind) for first, end, kind in segments(text)]
    assert found == by_regex(text) and "".join(piece for piece, _ in found) == text
