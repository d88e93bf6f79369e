"""Bytes of tokens, over drawn tokenizers and texts: those of the text, or none where its ids do not keep it.

The judges are the decoder and the spans of characters of the `tokenizers` library, and the UTF-8 bytes of the text.
"""

import random

import numpy as np
import pytest
from helpers.drawn_tokenizers import KINDS, build, drawn_text
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

from levanter.compat.hf.tokenizer import from_transformers
from levanter.data import EvaluationSet, build_sequences
from levanter.data.documents import InlineDocuments
from levanter.data.eval_sequences import stored_byte_counts
from levanter.eval.logprob_page import pieces

WORDS_APART = ("wordpiece", "wordlevel")


def _first_space(built: Tokenizer) -> Tokenizer:
    """Byte-level, with a space before a text that has none."""
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return built


def _lower_case(built: Tokenizer) -> Tokenizer:
    built.normalizer = normalizers.Lowercase()
    return built


def _no_decoder(built: Tokenizer) -> Tokenizer:
    built.decoder = None
    return built


def _metaspace(built: Tokenizer) -> Tokenizer:
    built.normalizer = None
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    built.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return built


TOKENIZERS = {
    **{kind: (kind, lambda built: built) for kind in KINDS},
    "byte level, first space": ("byte level", _first_space),
    "byte level, lower case": ("byte level", _lower_case),
    "byte level, no decoder": ("byte level", _no_decoder),
    "byte fallback, metaspace": ("sentencepiece bytes", _metaspace),
}


def tokenizer_of(name: str):
    from transformers import PreTrainedTokenizerFast

    kind, change = TOKENIZERS[name]
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=change(build(kind)), **names)
    return from_transformers(theirs), theirs


def judge(name: str, texts: list[str]) -> tuple[int, int]:
    """Compares texts; returns how many have bytes and how many have none."""
    ours, theirs = tokenizer_of(name)
    backend, kept, lost = theirs.backend_tokenizer, 0, 0
    for text in texts:
        encoded = backend.encode(text, add_special_tokens=False)
        counts = ours.byte_counts(text, np.array(encoded.ids, np.int32))
        decoded = backend.decode(encoded.ids, skip_special_tokens=False)
        if name == "byte level, no decoder":
            decoded = decoders.ByteLevel().decode(encoded.tokens)
        if counts is None:
            lost += 1
            assert decoded != text or name in WORDS_APART, (name, text)
            continue
        kept += 1
        # Decoders remove or keep one space before a text; whether the text has it is not in the ids.
        assert decoded in (text, f" {text}", text.removeprefix(" ")), (name, text, decoded)
        assert counts.sum() == len(text.encode()), (name, text)
        ends = np.cumsum(counts)
        for (start, stop), end, count in zip(encoded.offsets, ends, counts, strict=True):
            if stop > start and name not in WORDS_APART:
                assert end <= len(text[:stop].encode()) and end - count >= len(text[:start].encode()) - 1, (name, text)
    return kept, lost


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_are_those_of_the_text_or_none(name):
    rng = random.Random(f"bytes {name}")
    texts = ["the value of a river", "日本 é🤖", "ﬁne The", *(drawn_text(rng) for _ in range(60))]
    kept, lost = judge(name, texts)
    assert kept
    # These lose something: unknown characters, upper case, ligatures, second spaces.
    keeps = ("byte level", "byte level, no decoder", "byte fallback, metaspace")
    assert bool(lost) == (name not in keeps), (kept, lost)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_bytes_are_those_of_the_text_or_none_at_length(seed):
    rng = random.Random(seed)
    for name in TOKENIZERS:
        judge(name, [drawn_text(rng) for _ in range(200)])
        judge_pieces(name, [drawn_text(rng) for _ in range(100)])


def judge_pieces(name: str, texts: list[str]) -> None:
    """The pieces of the page of log-probabilities: in order, without gaps, and together what all ids decode to."""
    ours, theirs = tokenizer_of(name)
    for text in texts:
        ids = [ours.bos_id, *ours.encode_batch([text])[0].tolist()]
        shown = list(pieces(ids, ours))
        assert "".join(part for _, _, part in shown) == theirs.backend_tokenizer.decode(ids, skip_special_tokens=False)
        assert [0, *(end for _, end, _ in shown)] == [*(first for first, _, _ in shown), len(ids)], (name, text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_page_of_log_probabilities_shows_the_text_of_all_ids(name):
    rng = random.Random(f"page {name}")
    judge_pieces(name, ["日本語日本語 é🤖🎉x²" * 4, *(drawn_text(rng) for _ in range(40))])


def test_characters_of_several_tokens_are_a_piece_of_their_own():
    ours, _ = tokenizer_of("sentencepiece bytes")
    ids = ours.encode_batch(["of 日☃ a"])[0].tolist()
    shown = [(end - first, text) for first, end, text in pieces(ids, ours)]
    assert (3, "日") in shown and (3, "☃") in shown and shown[0] == (1, "of"), shown


def sets_of(**texts: list[str]) -> list[EvaluationSet]:
    return [
        EvaluationSet(name=name, tags=(), document_sources=(InlineDocuments(texts=tuple(lines), origin=name),))
        for name, lines in texts.items()
    ]


def test_sets_have_the_bytes_of_their_text_or_say_why_not():
    """With BOS, EOS, and special tokens that the text spells; in rows that cut characters."""
    ours, _ = tokenizer_of("sentencepiece")
    good, bad = ["of a</s>", "of a river"], ["of a", "of a river", "of a ☃"]
    sequences = build_sequences(sets_of(good=good, bad=bad), ours, max_length=4)
    taken = sequences.take(np.arange(sequences.row_count))
    (first, second) = sequences.sets
    assert first.text_loss is None
    assert taken.scored_bytes[: first.rows].sum() == sum(len(text.encode()) for text in good)
    assert second.text_loss is not None and "1 of 3 documents" in second.text_loss and "bad" in second.text_loss


def test_stored_ids_have_the_bytes_of_their_text():
    for name in ("byte level", "sentencepiece bytes", "byte level, first space", "byte fallback, metaspace"):
        ours, _ = tokenizer_of(name)
        texts = ["the value of 日本語", "it's 🤖 over!"]
        ids = [np.array([ours.bos_id, *ours.encode_batch([text])[0], ours.eos_id], np.int32) for text in texts]
        starts = np.array([0, len(ids[0])])
        stream = np.concatenate(ids)
        assert stored_byte_counts(ours, stream, starts).sum() == sum(len(text.encode()) for text in texts), name
        assert ours.lost_text(stream) is None
    for name in ("unigram", "wordpiece", "wordlevel", "byte level, lower case"):
        ours, _ = tokenizer_of(name)
        assert ours.lost_text(ours.encode_batch(["the value"])[0]) is not None, name
    ours, _ = tokenizer_of("sentencepiece")
    assert "1 tokens are <unk>" in (ours.lost_text(ours.encode_batch(["of ☃ a"])[0]) or "")
