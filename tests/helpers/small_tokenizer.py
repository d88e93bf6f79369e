"""A real tokenizer small enough to check by hand: bytes, and a few words of several bytes."""

import hashlib
import re
from collections.abc import Sequence

import numpy as np

from levanter.data.incremental_detokenizer import WindowStream
from levanter.data.tokenizer import TextFrame, TextStream

WORDS = ("the ", "and ", "日本", "é", "\n\n")
PAD, BOS, EOS = 0, 1, 2
FIRST_BYTE = 3
FIRST_WORD = FIRST_BYTE + 256


class SmallTokenizer:
    """Ids: 3 special tokens, 256 bytes, then `WORDS`, which are found first. Implements `levanter.data.Tokenizer`."""

    name = "small"
    pad_id = PAD
    frame = TextFrame()

    def __init__(self, *, bos: bool = True, eos: bool = True):
        self.bos_id = BOS if bos else None
        self.eos_id = EOS if eos else None
        self.vocab_size = FIRST_WORD + len(WORDS)
        self._pattern = re.compile("|".join(map(re.escape, WORDS)) + "|.", re.DOTALL)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids, spans = [], []
        for match in self._pattern.finditer(text):
            piece = match.group()
            new = [FIRST_WORD + WORDS.index(piece)] if piece in WORDS else [FIRST_BYTE + b for b in piece.encode()]
            ids += new
            spans += [match.span()] * len(new)
        return np.array(ids, np.int32), np.array(spans, np.int64).reshape(-1, 2)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode_with_offsets(text)[0] for text in texts]

    def byte_lengths(self) -> np.ndarray:
        return np.array([0] * 3 + [1] * 256 + [len(word.encode()) for word in WORDS], np.int32)

    def byte_counts(self, text: str, ids: np.ndarray) -> np.ndarray | None:
        return self.byte_lengths()[ids]

    def lost_text(self, ids: np.ndarray) -> str | None:
        return None

    adds_space = False

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        pieces = [WORDS[i - FIRST_WORD].encode() if i >= FIRST_WORD else bytes([i - 3]) for i in ids if i >= 3]
        return b"".join(pieces).decode(errors="replace")

    def stream(self, context: Sequence[int] = (), *, special: bool = False) -> TextStream:
        return WindowStream(self.decode, context=context)

    @property
    def hash(self) -> str:
        return hashlib.sha256(repr(WORDS).encode()).hexdigest()
