"""Rebuilds a tokenizer.json from a GGUF file's `tokenizer.ggml.*`: vocabulary, merges and rules.

Two kinds are supported. `gpt2` is byte-level BPE: tokens, merges, and the name of a pre-tokenizer. `llama` is
SentencePiece BPE: tokens with scores, from which the merges follow (two tokens merge if their concatenation is a token;
better scores first).

`tokenizer.ggml.pre` names how text is split before BPE. A byte-level BPE never merges across the pieces of its
pre-tokenizer, so another split gives other ids: on Python's own documentation, ignoring `smollm` (every digit alone)
changes one window in a few hundred. Each name stands for the regular expressions of the tokenizer that the model was
trained with; each expression splits the pieces of the one before. Sources: the tokenizer.json of the models named;
names as in llama.cpp's `src/llama-vocab.cpp`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from haliax_ext.errors import nearest
from levanter.compat.gguf.file import GgufFile
from levanter.compat.hf.errors import CheckpointError, CorruptFileError
from levanter.compat.hf.tokenizer import FastTokenizer

# The expressions are copied from the tokenizer.json of each model; they are not equal to Python's `re` syntax.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_case(suffix: str, digits: str) -> str:
    """Words cut where lower case is followed by upper case, as in the GPT-4o and Tekken vocabularies."""
    words = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{suffix}", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{suffix}")
    return "|".join((*words, digits)) + _REST_SLASH


@dataclass(frozen=True)
class PreTokenizer:
    """The pre-tokenizer of a family of vocabularies: how text is split before BPE.

    Attributes:
        patterns: regular expressions, applied in order.
        whole_words: a piece that is in the vocabulary becomes that token, without applying merges.
        nfc: text is first normalized to Unicode's composed form.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The `tokenizers` object, which ends with the mapping to the byte alphabet."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        # use_regex off: the expressions above already split; ByteLevel only maps bytes to characters.
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        """The Unicode normalization that comes before; None for none."""
        return normalizers.NFC() if self.nfc else None


_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA = PreTokenizer((_LLAMA3,), whole_words=True)

PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "codeshell": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "stablelm2": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_by_case("", r"\p{N}"),), whole_words=True),
    "gpt-4o": PreTokenizer((_by_case(f"{_CONTRACTION}?", r"\p{N}{1,3}"),)),
}
"""Pre-tokenizers by the value of `tokenizer.ggml.pre`."""


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """The pre-tokenizer with a given name.

    Raises:
        ValueError: the name is unknown, or the file has none.
    """
    known = ", ".join(PRE_TOKENIZERS)
    # No guess: the wrong split gives other ids for a part of all texts, without any error.
    if name is None:
        raise ValueError(
            f"tokenizer.ggml.pre is missing, so the pretokenizer is unknown (one of: {known}); files made before May "
            "2024 lack it and must be converted again"
        )
    if name not in PRE_TOKENIZERS:
        close = nearest(name, PRE_TOKENIZERS)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(f"tokenizer.ggml.pre {name!r} is not one of: {known}{hint}")
    return PRE_TOKENIZERS[name]


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""llama.cpp's token types."""

_SPACE = "▁"


def tokenizer(file: GgufFile) -> FastTokenizer:
    """The tokenizer of a GGUF file.

    Raises:
        CheckpointError: it has no tokenizer, or one of an unknown kind, or an inconsistent one.
    """
    kind = file.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(file.path, f"tokenizer.ggml.model {kind!r} is not one of gpt2, llama")
    tokens = file.get("tokenizer.ggml.tokens") or []
    types = file.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise CorruptFileError(file.path, f"its tokenizer has {len(tokens)} tokens and {len(types)} token types")
    # A duplicate would silently take the id of its last occurrence.
    if len(set(tokens)) != len(tokens):
        duplicate = next(token for n, token in enumerate(tokens) if token in tokens[:n])
        raise CorruptFileError(file.path, f"its tokenizer has the token {duplicate!r} twice")
    try:
        built = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens)
    except ValueError as error:
        raise CheckpointError(file.path, str(error)) from error
    _add(built, tokens, types, byte_level=kind == "gpt2")
    definition = json.loads(built.to_str())
    bos = file.get("tokenizer.ggml.bos_token_id")
    if _adds_bos(file, kind) and isinstance(bos, int) and 0 <= bos < len(tokens):
        definition["post_processor"] = _bos_before_text(tokens[bos], bos)
    roles = {f"{role}_id": file.get(f"tokenizer.ggml.{key}_token_id") for role, key in _ROLES.items()}
    template = file.get("tokenizer.chat_template")
    ends = [file.get(f"tokenizer.ggml.{key}_token_id") for key in _ENDS]
    return FastTokenizer(
        definition,
        name=str(file.path),
        **roles,
        chat_template=template if isinstance(template, str) else None,
        end_ids=[i for i in ends if isinstance(i, int)],
    )


def _adds_bos(file: GgufFile, kind: str) -> bool:
    """Whether BOS is put before a text; without the key, llama.cpp does so for SentencePiece only."""
    add_bos = file.get("tokenizer.ggml.add_bos_token")
    return add_bos if isinstance(add_bos, bool) else kind == "llama"


def _bos_before_text(token: str, i: int) -> Mapping[str, Any]:
    """The post-processor of a tokenizer.json that puts one token before a text."""
    bos: Mapping[str, Any] = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    special = {token: {"id": token, "ids": [i], "tokens": [token]}}
    # Pairs of texts are not used here, but the library requires their rule.
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": special,
    }


_ENDS = ("eot", "eom")
"""End-of-turn and end-of-message tokens, at which llama.cpp also stops."""
_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding"}


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    rules = pre_tokenizer(file.get("tokenizer.ggml.pre"))
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges") or []]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    wrong = [pair for pair in merges if len(pair) != 2 or not all(t in vocabulary for t in (*pair, "".join(pair)))]
    if wrong:
        raise ValueError(
            f"{len(wrong)} of its {len(merges)} merges refer to tokens it does not have, such as {wrong[0]}"
        )
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rules.whole_words))
    built.pre_tokenizer = rules.build()
    # Unicode normalization comes before the space prefix.
    steps = [step for step in (rules.normalizer(), _prefix(file)) if step is not None]
    if steps:
        built.normalizer = normalizers.Sequence(steps)
    built.decoder = decoders.ByteLevel()
    return built


def _prefix(file: GgufFile) -> normalizers.Normalizer | None:
    return normalizers.Prepend(" ") if file.get("tokenizer.ggml.add_space_prefix") else None


def _sentencepiece(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    scores = file.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ValueError(f"its tokenizer has {len(tokens)} tokens and {len(scores or [])} scores")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = file.get("tokenizer.ggml.unknown_token_id")
    built = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges_from_scores(vocabulary, scores),
            # A character that neither tokens nor byte tokens cover becomes the unknown token.
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    # SentencePiece puts a space before the text, so that a word is the same token everywhere.
    spaces: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    built.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", _SPACE)])
    # The decoder removes that one leading space again.
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    built.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return built


def merges_from_scores(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece applies, best first.

    SentencePiece merges the neighbouring pair whose concatenation has the best score. As a ranked list: every way to
    cut a token into two tokens, ordered by the token's score; equal scores in the order of ids.
    """
    # Every split of a token into two tokens is a merge with the rank of the token.
    ranked = sorted(vocabulary.items(), key=lambda item: (-scores[item[1]], item[1]))
    return [
        (token[:cut], token[cut:])
        for token, _ in ranked
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]


def _add(built: Tokenizer, tokens: Sequence[str], types: Sequence[int], *, byte_level: bool) -> None:
    """Marks the tokens that are matched in text as a whole: control tokens, and user-defined ones."""
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    if not byte_level:
        special += [t for t, kind in zip(tokens, types, strict=True) if kind == UNKNOWN]
    user_defined = [t for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    built.add_tokens([AddedToken(token, special=False, normalized=False) for token in user_defined])
