"""Builds the token store of a folder of JSONL files; a process of its own, to be killed.

    python build_store.py FOLDER_OF_SOURCES CACHE_FOLDER [MOMENT]

MOMENT is how many steps of the build (batches encoded, files made) happen before the process kills itself, the hard
way.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from helpers.small_tokenizer import SmallTokenizer

from levanter.data import (
    DatasetComponent,
    LmDataConfig,
    UrlDatasetSource,
    build_tokens,
    resolve_training,
    store_build,
    store_write,
)
from levanter.data.config import CacheOptions

SMALL_FILE = 1 << 10
"""Values in one file of an array, so that a shard has several."""


def config_of(sources: str, cache: str) -> LmDataConfig:
    """One set of all files, in five shards."""
    source = UrlDatasetSource(train_urls=[f"{sources}/*.jsonl"])
    return LmDataConfig(
        cache_dir=cache,
        cache_options=CacheOptions(num_shard_groups=5),
        components={"text": DatasetComponent(source=source)},
    )


def build(sources: str, cache: str, moment: int | None = None) -> None:
    """Builds, or dies at the `moment`-th step."""
    store_build.BATCH_CHARS = 4000
    store_write.FILE_VALUES = SMALL_FILE
    store_write.CHUNK_VALUES = 256
    left = moment

    def step() -> None:
        nonlocal left
        if left is not None:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    class Tokenizer(SmallTokenizer):
        def encode_batch(self, texts):
            step()
            return super().encode_batch(texts)

    put, write = store_write.GrowingArray._put, store_write.write_file

    def counted_put(self, values: np.ndarray) -> None:
        step()
        put(self, values)

    def counted_write(path: str, content: bytes) -> None:
        step()
        write(path, content)
        step()

    store_write.GrowingArray._put = counted_put
    store_write.write_file = store_build.write_file = counted_write
    config = config_of(sources, cache)
    build_tokens(config, resolve_training(config).sets, Tokenizer())


if __name__ == "__main__":
    build(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
