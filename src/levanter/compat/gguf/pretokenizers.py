"""How `tokenizer.ggml.pre` splits text before BPE merges anything.

A byte-level BPE never merges across the pieces that its pre-tokenizer cuts, so the wrong cut gives other ids: on
Python's own documentation, ignoring `smollm` (every digit apart) changes one window in a few hundred. Each name stands
for the regular expressions of the tokenizer that the model was trained with, in order; each cuts the pieces that the
one before left.

Sources: the tokenizer.json of the models named; names as in llama.cpp's `src/llama-vocab.cpp`.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from haliax_ext.errors import nearest

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
    """One way to cut text.

    Attributes:
        patterns: regular expressions, applied in order.
        whole_words: a piece that is in the vocabulary is taken as it is, whatever the merges would make of it.
        nfc: text is brought into Unicode's composed form first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The `tokenizers` object, with the byte alphabet at its end."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
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
"""By the value of `tokenizer.ggml.pre`."""


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """The pre-tokenizer of a name.

    Raises:
        ValueError: it is not known, or the file has none.
    """
    known = ", ".join(PRE_TOKENIZERS)
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
