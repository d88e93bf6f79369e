"""The bytes that the tokens of a tokenizer.json stand for, computed from the spelling of its vocabulary.

Bits per byte needs the UTF-8 bytes of each token. Decoding tokens one at a time does not give them: a token may hold
part of a character (decoded alone, it becomes U+FFFD), and decoders treat the first token of a text differently. So the
bytes are computed from the vocabulary's spelling. *Byte-level* vocabularies (GPT-2) spell every byte as one character
of a fixed alphabet of 256. *Metaspace* vocabularies (SentencePiece) spell a space as `▁`, and a byte without a token as
`<0x0A>`.

A count of bytes means something only where the ids keep the text: an unknown token stands for any character, and a
normalizer may have lower-cased or composed what it read. `text_loss` says which definitions may lose text.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

_BYTE = re.compile(r"^<0x[0-9A-Fa-f]{2}>$")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: character → byte.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the characters from U+0100 on.
    Source: `bytes_to_unicode` of the GPT-2 release (https://github.com/openai/gpt-2/blob/master/src/encoder.py).
    """
    # Every byte needs a visible character, since the merges file separates tokens by spaces.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    other = [byte for byte in range(256) if byte not in printable]
    pairs = [(chr(byte), byte) for byte in printable]
    pairs += [(chr(256 + n), byte) for n, byte in enumerate(other)]
    # The same pairs as in GPT-2's release: a different order would permute the bytes of all non-ASCII tokens.
    return dict(pairs)


def vocabulary(definition: Mapping[str, Any]) -> dict[str, int]:
    """Token → id of a tokenizer.json's model, without added tokens."""
    vocab = definition["model"].get("vocab", {})
    if isinstance(vocab, list):  # Unigram: [[token, score], …]
        return {token: n for n, (token, _) in enumerate(vocab)}
    return dict(vocab)


def count_ids(definition: Mapping[str, Any]) -> int:
    """One more than the largest id, added tokens included."""
    ids = [*vocabulary(definition).values(), *(token["id"] for token in definition.get("added_tokens") or ())]
    return max(ids, default=-1) + 1


def byte_lengths(definition: Mapping[str, Any]) -> np.ndarray:
    """UTF-8 bytes of each id, int32; 0 for special tokens and for ids without a token.

    Args:
        definition: a parsed tokenizer.json.
    """
    lengths = np.array([len(spelling) for spelling in spelled_bytes(definition)], np.int32)
    # Special tokens stand for no text, so they add no bytes to bits per byte.
    lengths[[token["id"] for token in definition.get("added_tokens") or () if token.get("special")]] = 0
    return lengths


def spelled_bytes(definition: Mapping[str, Any]) -> list[bytes]:
    """The bytes of each id within a text; nothing for ids without a token."""
    spellings = [b""] * count_ids(definition)
    read, before = byte_reader(definition), b" " if _joins_words(definition) else b""
    for token, i in vocabulary(definition).items():
        spellings[i] = read(token)
    for added in definition.get("added_tokens") or ():
        spellings[added["id"]] = before + added["content"].encode()
    return spellings


_LOSSY_NORMALIZERS = (
    "Lowercase",
    "StripAccents",
    "BertNormalizer",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Precompiled",
    "Strip",
)
_LOSSY_SPLITS = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit")


def text_loss(definition: Mapping[str, Any]) -> str | None:
    """Why the ids of a text may not have its bytes; None for definitions that keep every text.

    NFC is not counted as a loss: nearly all text is in this form already.

    Args:
        definition: a parsed tokenizer.json.
    """
    model, kinds = definition["model"], {part["type"] for part in _components(definition, "decoder")}
    if unknown := kinds - _KNOWN_DECODERS:
        return f"it joins tokens by {', '.join(sorted(unknown))}"
    if _joins_words(definition):
        return "it joins tokens by spaces"
    for part in _components(definition, "normalizer"):
        replaces_space = part["type"] == "Replace" and part["pattern"].get("String") == " "
        if part["type"] in _LOSSY_NORMALIZERS or (part["type"] == "Replace" and not replaces_space):
            return f"its normalizer {part['type']} changes text"
    for part in _components(definition, "pre_tokenizer"):
        if part["type"] in _LOSSY_SPLITS or part.get("behavior") == "Removed":
            return f"its pre-tokenizer {part['type']} removes spaces"
    keeps_bytes = _is_byte_level(definition) or _falls_back(definition)
    if not keeps_bytes and model.get("unk_token") is None and model.get("unk_id") is None:
        return "it drops characters that are not in its vocabulary"
    return None


def unknown_id(definition: Mapping[str, Any]) -> int | None:
    """The id of the token that stands for characters outside the vocabulary; None if there is none."""
    model = definition["model"]
    if isinstance(number := model.get("unk_id"), int):
        return number
    added = {token["content"]: token["id"] for token in definition.get("added_tokens") or ()}
    unknown = model.get("unk_token")
    return (added | vocabulary(definition)).get(unknown) if isinstance(unknown, str) else None


def _components(definition: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    """The parts of a component, sequences flattened."""
    inner = {"decoder": "decoders", "pre_tokenizer": "pretokenizers", "normalizer": "normalizers"}[name]

    def walk(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
        if part is None:
            return
        if part["type"] == "Sequence":
            for child in part[inner]:
                yield from walk(child)
        else:
            yield part

    yield from walk(definition.get(name))


_KNOWN_DECODERS = frozenset({"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"})


def _is_byte_level(definition: Mapping[str, Any]) -> bool:
    kinds = {part["type"] for part in _components(definition, "decoder")}
    splits = {part["type"] for name in ("pre_tokenizer", "normalizer") for part in _components(definition, name)}
    # Some definitions have a byte-level pre-tokenizer and no decoder at all.
    return "ByteLevel" in kinds or (not kinds and "ByteLevel" in splits)


def _falls_back(definition: Mapping[str, Any]) -> bool:
    """Whether `<0x0A>` is one byte; otherwise it is text that happens to look like that."""
    kinds = {part["type"] for part in _components(definition, "decoder")}
    return "ByteFallback" in kinds or bool(definition["model"].get("byte_fallback"))


def _joins_words(definition: Mapping[str, Any]) -> bool:
    """Whether tokens are joined by spaces: those of WordPiece, and those of definitions without a decoder."""
    kinds = {part["type"] for part in _components(definition, "decoder")}
    return "WordPiece" in kinds or (not kinds and not _is_byte_level(definition))


def byte_reader(definition: Mapping[str, Any]) -> Callable[[str], bytes]:
    """The function from a token, as the vocabulary spells it, to the bytes that it stands for within a text.

    WordPiece and WordLevel vocabularies put a space before each word.

    Args:
        definition: a parsed tokenizer.json.
    """
    if _is_byte_level(definition):
        alphabet = byte_alphabet()

        def of_bytes(token: str) -> bytes:
            # A token with a character outside the alphabet was added to the vocabulary as plain text.
            if all(sign in alphabet for sign in token):
                return bytes(alphabet[sign] for sign in token)
            return token.encode()

        return of_bytes
    decoders = list(_components(definition, "decoder"))
    spaces = [part["replacement"] for part in decoders if part["type"] == "Metaspace"]
    spaces += [
        part["pattern"]["String"]
        for part in decoders
        if part["type"] == "Replace" and part.get("content") == " " and "String" in part["pattern"]
    ]
    continuations = [part["prefix"] for part in decoders if part["type"] == "WordPiece"]
    joins_words = _joins_words(definition)
    falls_back = _falls_back(definition)

    def of_text(token: str) -> bytes:
        if falls_back and _BYTE.match(token):
            return bytes([int(token[3:5], 16)])
        for space in spaces:
            token = token.replace(space, " ")
        if not joins_words:
            return token.encode()
        if any(token.startswith(continuation) for continuation in continuations):
            return token.removeprefix(continuations[0]).encode()
        return f" {token}".encode()

    return of_text
