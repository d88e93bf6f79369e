"""The 2025 generation's data configurations: today's `LmDataConfig`, which also takes their keys.

    data = UrlSingleDatasetLMConfig(train_urls=["a.jsonl"], tokenizer="gpt2")

One class replaces all three (files, a data set of the Hub, a mixture); it holds today's `components`.
"""

from dataclasses import fields
from typing import Any

import yaml

from levanter.config import ConfigError, parse_text
from levanter.config.upstream import translate_plain
from levanter.data import LmDataConfig


class OldDataConfig(LmDataConfig):
    """`LmDataConfig`, constructed with the keys of either generation.

    Raises:
        ConfigError: the keys contradict each other, or one is unknown.
    """

    def __init__(self, **keys: Any):
        known = {one.name for one in fields(LmDataConfig)}
        # Earlier keys go through the YAML translation, so that Python and documents mean the same.
        if not keys.keys() <= known:
            document, translation = translate_plain({"data": keys}, source="data")
            if translation.problems:
                raise ConfigError(translation.problems)
            read = parse_text(LmDataConfig, yaml.safe_dump(document["data"]), source="data")
            # The parsed value is another object; its fields are copied into this one.
            keys = {name: getattr(read, name) for name in known}
        super().__init__(**keys)
