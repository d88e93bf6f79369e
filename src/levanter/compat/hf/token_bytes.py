"""The bytes that the tokens of a tokenizer.json stand for, computed from the spelling of its vocabulary.

Bits per byte needs the UTF-8 bytes of each token. Decoding tokens one at a time does not give them: a token may hold
part of a character (decoded alone, it becomes U+FFFD), and decoders treat the first token of a text differently. So the
bytes are computed from the vocabulary's spelling. *Byte-level* vocabularies (GPT-2) spell every byte as one character
of a fixed alphabet of 256. *Metaspace* vocabularies (SentencePiece) spell a space as `▁`, and a byte without a token as
`<0x0A>`.
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

    Raises:
        ValueError: the tokenizer spells its tokens in an unknown way.
    """
    lengths = np.zeros(count_ids(definition), np.int32)
    read = byte_reader(definition)
    for token, i in vocabulary(definition).items():
        lengths[i] = len(read(token))
    for added in definition.get("added_tokens") or ():
        # Special tokens stand for no text, so they add no bytes to bits per byte.
        lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return lengths


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


def byte_reader(definition: Mapping[str, Any]) -> Callable[[str], bytes]:
    """The function from a token, as the vocabulary spells it, to the bytes that it stands for.

    Args:
        definition: a parsed tokenizer.json.

    Raises:
        ValueError: the tokenizer spells its tokens in an unknown way.
    """
    decoders = list(_components(definition, "decoder"))
    kinds = {part["type"] for part in decoders}
    splits = {part["type"] for part in _components(definition, "pre_tokenizer")}
    # Some definitions have a byte-level pre-tokenizer and no decoder at all.
    if "ByteLevel" in kinds or (not kinds and "ByteLevel" in splits):
        alphabet = byte_alphabet()

        def of_bytes(token: str) -> bytes:
            # A token with a character outside the alphabet was added to the vocabulary as plain text.
            if all(sign in alphabet for sign in token):
                return bytes(alphabet[sign] for sign in token)
            return token.encode()

        return of_bytes
    spaces = [part["replacement"] for part in decoders if part["type"] == "Metaspace"]
    spaces += [
        part["pattern"]["String"]
        for part in decoders
        if part["type"] == "Replace" and part.get("content") == " " and "String" in part["pattern"]
    ]
    if unknown := kinds - {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        raise ValueError(f"tokens decoded by {', '.join(sorted(unknown))} cannot be counted in bytes")
    # With byte fallback `<0x0A>` is one byte; without it, it is text that happens to look like that.
    falls_back = "ByteFallback" in kinds or bool(definition["model"].get("byte_fallback"))

    def of_text(token: str) -> bytes:
        if falls_back and _BYTE.match(token):
            return bytes([int(token[3:5], 16)])
        for space in spaces:
            token = token.replace(space, " ")
        return token.encode()

    return of_text
