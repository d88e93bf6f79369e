"""How tokens are shown in log-probabilities: by their text where they are text, else by their bytes."""

from collections.abc import Sequence
from functools import lru_cache

from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.data import Tokenizer


class TokenTexts:
    """The tokens of one vocabulary.

    Args:
        tokenizer: has it.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._files = tokenizer if isinstance(tokenizer, FastTokenizer) else None
        self.bytes = lru_cache(maxsize=65_536)(self._bytes)

    def _bytes(self, id: int) -> bytes:
        if self._files is None:
            return self._tokenizer.decode([id]).encode()
        return self._files.token_bytes(id)

    def text(self, id: int) -> str:
        """A token in a list of tokens: its text, or `bytes:\\\\xf0\\\\x9f` where it is a part of a character."""
        raw = self.bytes(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def of_prompt(self, ids: Sequence[int]) -> list[str]:
        """The tokens of a prompt."""
        return [self.text(id) for id in ids]
