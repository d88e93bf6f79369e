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
    (r"mistral-7b-.*v0\.3", 32_768),
    (r"mistral-nemo-.*", 131_072),
    (r"olmo-(1|7)b.*", 50_280),
    (r"olmo-[23].*", 100_278),
    (r"qwen(1\.5|2)-.*", 151_646),
    (r"qwen2\.5-.*", 151_665),
    (r"qwen3-.*", 151_669),
    (r"gemma-(2b|7b|2-).*", 256_000),
    (r"gemma-3-.*", 262_145),
    (r"phi-(1_5|2)", 50_295),
    (r"phi-3(\.5)?-mini-.*", 32_011),
    (r"phi-4", 100_352),
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
