"""Tokenizers rebuilt from GGUF metadata: ids of the tokenizer they were made from, and pre-tokenizers by regex."""

import json

import numpy as np
import pytest
import regex
from helpers.gguf_file import write_gguf
from helpers.hf_folder import TEXTS, byte_level_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from levanter.compat.gguf import open_gguf, tokenizer
from levanter.compat.gguf.tokenizer import BYTE, CONTROL, NORMAL, PRE_TOKENIZERS, UNKNOWN, USER_DEFINED, pre_tokenizer
from levanter.compat.hf.errors import CheckpointError, CorruptFileError

pytestmark = pytest.mark.quick

SAMPLES = [*TEXTS, "", "  a  b", "x=1234567.89", "He's HERE; we'LL see", "tabs\tand\r\nlines\n\n", "Ünï ½ ١٢٣ 日本"]


def metadata_of(built: Tokenizer, **fields) -> dict:
    definition = json.loads(built.to_str())
    vocabulary = sorted(definition["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in definition["added_tokens"]}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in definition["model"]["merges"]]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [CONTROL if token in special else NORMAL for token, _ in vocabulary],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
    }
    return found | {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def rebuilt(path, metadata):
    return tokenizer(open_gguf(write_gguf(path / "m.gguf", {}, metadata=metadata)))


def refusal(path, metadata, error=CheckpointError) -> str:
    with pytest.raises(error) as caught:
        rebuilt(path, metadata)
    return str(caught.value).removeprefix(f"{path / 'm.gguf'}: ")


def test_a_byte_level_tokenizer_survives_the_file(tmp_path):
    built = byte_level_tokenizer()
    found = rebuilt(tmp_path, metadata_of(built))
    samples = [*SAMPLES, "the cat</s>the"]
    expected = [each.ids for each in built.encode_batch(samples, add_special_tokens=False)]
    assert [ids.tolist() for ids in found.encode_batch(samples)] == expected
    assert (found.bos_id, found.eos_id, found.pad_id, found.vocab_size) == (1, 2, 0, 300)
    for text, ids in zip(samples, found.encode_batch(samples), strict=True):
        assert found.decode(ids) == text
        assert found.byte_lengths()[ids].sum() == len(text.replace("</s>", "").encode())


def test_the_pre_tokenizer_changes_the_ids(tmp_path):
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=270, show_progress=False, initial_alphabet=alphabet)
    built.train_from_iterator(["numbers 12345 and 12345"] * 4, trainer)
    text = "numbers 12345"
    (together,) = rebuilt(tmp_path, metadata_of(built, pre="gpt-2")).encode_batch([text])
    (apart,) = rebuilt(tmp_path, metadata_of(built, pre="smollm")).encode_batch([text])
    assert together.tolist() == built.encode(text).ids
    assert len(apart) > len(together)


def test_user_defined_tokens_are_found_in_text(tmp_path):
    metadata = metadata_of(byte_level_tokenizer())
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<tool>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], USER_DEFINED]
    found = rebuilt(tmp_path, metadata)
    assert found.encode_batch(["<tool>"])[0].tolist() == [300]
    assert found.byte_lengths()[300] == 6


PATTERNS = {
    "gpt-2": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    "smollm": [r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    "llama-bpe": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen2": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}
"""As the tokenizers' own files publish them (contractions of any case written out)."""


@pytest.mark.parametrize("name", PATTERNS)
def test_pre_tokenizers_cut_as_the_published_expressions_do(name):
    """The oracle is Python's `regex`; what lies between two matches is a piece too."""

    def cut(pieces, pattern):
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece):
                yield from filter(None, (piece[at : match.start()], match.group()))
                at = match.end()
            if at < len(piece):
                yield piece[at:]

    built = pre_tokenizers.Sequence([PRE_TOKENIZERS[name].build()])
    for text in SAMPLES:
        pieces = [text] if text else []
        for pattern in PATTERNS[name]:
            pieces = list(cut(pieces, pattern))
        assert [text[start:stop] for _, (start, stop) in built.pre_tokenize_str(text)] == pieces


def test_smollm_is_what_its_tokenizer_json_says():
    published = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in SAMPLES:
        assert PRE_TOKENIZERS["smollm"].build().pre_tokenize_str(text) == published.pre_tokenize_str(text)


def test_unknown_pre_tokenizers(tmp_path):
    known = (
        "default, gpt-2, smollm, starcoder, refact, codeshell, llama-bpe, llama3, llama-v3, smaug-bpe, dbrx, qwen2, "
        "stablelm2, tekken, gpt-4o"
    )
    assert refusal(tmp_path, metadata_of(byte_level_tokenizer(), pre="smolm")) == (
        f"tokenizer.ggml.pre 'smolm' is not one of: {known}; did you mean smollm?"
    )
    assert refusal(tmp_path, metadata_of(byte_level_tokenizer(), pre=...)) == (
        f"tokenizer.ggml.pre is missing, so the pretokenizer is unknown (one of: {known}); files made before May 2024 "
        "lack it and must be converted again"
    )
    assert pre_tokenizer("qwen2").nfc


def test_tokenizers_that_contradict_themselves(tmp_path):
    metadata = metadata_of(byte_level_tokenizer())
    assert refusal(tmp_path, metadata | {"tokenizer.ggml.model": "bert"}) == (
        "tokenizer.ggml.model 'bert' is not one of gpt2, llama"
    )
    types = metadata["tokenizer.ggml.token_type"][:-1]
    assert refusal(tmp_path, metadata | {"tokenizer.ggml.token_type": types}, CorruptFileError) == (
        "its tokenizer has 300 tokens and 299 token types"
    )
    tokens = [*metadata["tokenizer.ggml.tokens"][:-1], "a"]
    assert refusal(tmp_path, metadata | {"tokenizer.ggml.tokens": tokens}, CorruptFileError) == (
        "its tokenizer has the token 'a' twice"
    )
    merges = [*metadata["tokenizer.ggml.merges"], "q zz"]
    assert refusal(tmp_path, metadata | {"tokenizer.ggml.merges": merges}) == (
        f"1 of its {len(merges)} merges refer to tokens it does not have, such as ('q', 'zz')"
    )


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types as a SentencePiece BPE model has them: bytes, characters, merges by rank."""
    built = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=160, show_progress=False)
    built.train_from_iterator([text.replace(" ", "▁") for text in TEXTS[:1] * 4 + TEXTS[2:]], trainer)
    merged = [token for token, _ in sorted(built.get_vocab().items(), key=lambda item: item[1]) if len(token) > 1]
    letters = [token for token in built.get_vocab() if len(token) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *sorted(letters)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged))] + [-1e6] * len(letters)
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259)
    return tokens, scores, types


def sentencepiece_encode(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's algorithm, by brute force: merge the neighbours whose union scores best, leftmost first."""
    ids = {token: i for i, token in enumerate(tokens)}
    symbols = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        best = None
        for at in range(len(symbols) - 1):
            i = ids.get(symbols[at] + symbols[at + 1])
            if i is not None and (best is None or scores[i] > best[0]):
                best = (scores[i], at)
        if best is None:
            break
        symbols[best[1] : best[1] + 2] = ["".join(symbols[best[1] : best[1] + 2])]
    found = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


def test_a_sentencepiece_vocabulary(tmp_path):
    tokens, scores, types = sentencepiece_vocabulary()
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    found = rebuilt(tmp_path, metadata)
    for text in SAMPLES:
        ids = found.encode_batch([text])[0]
        assert ids.tolist() == sentencepiece_encode(text, tokens, scores)
        assert found.byte_lengths()[ids].sum() == len(text.encode()) + bool(text)
        assert found.decode(ids) == text
    assert found.byte_lengths()[:4].tolist() == [0, 0, 0, 1]
    assert np.all(found.encode_batch(["<s>"])[0] == [1])
    assert refusal(tmp_path, {**metadata, "tokenizer.ggml.scores": ...}) == (
        f"its tokenizer has {len(tokens)} tokens and 0 scores"
    )
