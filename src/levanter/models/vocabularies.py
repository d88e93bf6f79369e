"""Sizes of well-known vocabularies, for planning without access to the tokenizer.

The size is the number of ids, added tokens included. A repository is recognized by its name without its organization.
"""

import re

# Regular expressions over the repository's name in lower case; the first full match wins.
_KNOWN: tuple[tuple[str, int], ...] = (
    (r"gpt2(-.*)?|distilgpt2", 50_257),
    (r"gpt-neox-20b|pythia-.*", 50_277),
    (r"llama-2-.*|llama-7b|llama-13b|llama-30b|llama-65b|tinyllama.*", 32_000),
    (r"(meta-)?llama-3.*|marin-tokenizer", 128_256),
    (r"mi[sx]tral-.*v0\.[12]", 32_000),
    (r"smollm2?-.*", 49_152),
    (r"t5-.*", 32_100),
)


def known_vocabulary(name: str) -> int | None:
    """The number of ids of the tokenizer `name` (`org/name@revision`, or a name alone), or None if unknown."""
    short = name.split("@")[0].rstrip("/").rsplit("/", 1)[-1].lower()
    for pattern, size in _KNOWN:
        if re.fullmatch(pattern, short):
            return size
    return None
