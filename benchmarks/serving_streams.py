"""Streams that never stop, and how evenly their tokens come: gaps, and memory of the server.

    python benchmarks/serving_streams.py --streams 16 --minutes 10 --tiny logs/tiny --bounds
    python benchmarks/serving_streams.py --streams 16 --minutes 3 -- --config_path config/serve/demo.yaml

What stands behind `--` is the server's command line; rows, context and `prefill_chunk` are said here. Each stream asks
for another text as soon as it has one: 8 to 96 tokens of prompt, 32 to 256 of text. A gap is the time between two
events of a stream. *Without a prefill* are the gaps in which nobody's prompt was being computed, as far as a client can
tell: none between a request and its first token. *One chunk* is what another `prefill_chunk` tokens of a prompt take on
a server that has nothing else to do.

Reported: p50, p99 and the largest of all gaps and of those without a prefill; what the server holds, minute by minute.
With `--bounds` the exit code says whether p99 without a prefill is at most three times its median, p99 of all gaps at
most one chunk and three times the median, and memory flat to 2 % from a fifth of the time on.

The clients are this one process. On the server's machine it has its processor before the server has (real-time, where
the system lets it), and it does not look for garbage: a gap would be the time that it waits for its own turn, which
clients elsewhere do not.
"""

import argparse
import asyncio
import bisect
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serving_client import Streamed, asked, load, ours, resident, stand_first, stream

PROMPT, NEW = (8, 96), (32, 256)
FLAT = 0.02


@dataclass
class Seen:
    """What came of all streams."""

    answers: list[Streamed] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    failed: int = 0


def prompt_of(rng: random.Random, count: int) -> list[int]:
    """Ids of a prompt."""
    return [rng.randrange(3, 200) for _ in range(count)]


async def one_chunk(url: str, chunk: int, context: int) -> float:
    """Seconds of another chunk of a prompt, where nothing else is done: the median of a few tries."""
    rng, parts = random.Random(0), min(8, context // chunk - 2)
    found = []
    for _ in range(7):
        short, long = [
            (await stream(url, {"prompt": prompt_of(rng, size), "max_tokens": 1, "ignore_eos": True})).first
            for size in (chunk, chunk * (1 + parts))
        ]
        found.append((long - short) / parts)
    return statistics.median(found)


async def run(url: str, pid: int, *, streams: int, seconds: float, chunk: int) -> tuple[Seen, float]:
    """Streams for a while; what was seen, and one chunk's seconds."""
    context = json.loads(await asked(url, "/status"))["context"]
    alone = await one_chunk(url, chunk, context)
    seen, end, rng = Seen(), time.perf_counter() + seconds, random.Random(1)

    async def client(own: random.Random) -> None:
        while time.perf_counter() < end:
            body = {"prompt": prompt_of(own, own.randint(*PROMPT)), "max_tokens": own.randint(*NEW), "ignore_eos": True}
            answer = await stream(url, body)
            good = answer.ended and answer.status == 200 and answer.tokens == body["max_tokens"]
            seen.answers.append(answer)
            seen.failed += not good

    async def watch() -> None:
        while time.perf_counter() < end:
            seen.memory.append((time.perf_counter(), resident(pid)))
            await asyncio.sleep(min(5.0, seconds / 50))

    await asyncio.gather(watch(), *(client(random.Random(rng.random())) for _ in range(streams)))
    return seen, alone


def gaps_of(answers: Sequence[Streamed]) -> tuple[list[float], list[float]]:
    """All gaps, and those in which nobody waited for a first token."""
    waits = sorted((one.sent, one.times[0]) for one in answers if one.times)
    begins, latest, until = [begin for begin, _ in waits], [], 0.0
    for _, first in waits:
        until = max(until, first)
        latest.append(until)
    every, quiet = [], []
    for answer in answers:
        for before, after in zip(answer.times, answer.times[1:], strict=False):
            every.append(after - before)
            # Of the waits that began before the gap's end, whether any ended behind its beginning.
            at = bisect.bisect_left(begins, after)
            if at == 0 or latest[at - 1] <= before:
                quiet.append(after - before)
    return every, quiet


def said(name: str, gaps: Sequence[float]) -> tuple[float, float]:
    """Prints a line; median and 99th percentile."""
    cuts = statistics.quantiles(gaps, n=1000)
    middle, high = cuts[499], cuts[989]
    print(
        f"{name}: {len(gaps):,}, median {1e3 * middle:.2f} ms, p99 {1e3 * high:.2f} ms ({high / middle:.2f} × median), "
        f"p99.9 {1e3 * cuts[998]:.2f} ms, largest {1e3 * max(gaps):.1f} ms"
    )
    return middle, high


def tiny(folder: Path) -> Path:
    """A folder with a tiny model, that of the tests, whose tokens are words.

    Of a token that is no text by itself (half of a character, which is what most tokens of random weights and bytes
    are) no client hears before the next one, and a gap would be the time of two tokens.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from helpers.served import model_folder
    from tokenizers import Tokenizer, decoders, models

    if not (folder / "config.json").exists():
        model_folder(folder)
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        words = ["<pad>", "<s>", "</s>", *(f"w{n} " for n in range(3, size))]
        made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<pad>"))
        made.decoder = decoders.Fuse()
        made.save(str(folder / "tokenizer.json"))
    return folder


def main() -> int:
    """Runs the streams; 0 if every answer came, and within the bounds where they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--chunk", type=int, default=32, help="the server's prefill_chunk")
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("--tiny", type=Path, help="a folder for a tiny model of random weights, which is served")
    parser.add_argument("server", nargs="*", help="the server's command line, behind --")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    words = [*options.server, "--trainer.mp", "f32", "--trainer.tracker.type", "noop"]
    words += [*("--inference.max_rows", str(options.streams)), *("--inference.prefill_chunk", str(options.chunk))]
    words += ["--inference.max_seq_len", str(PROMPT[1] + NEW[1])]
    if options.tiny is not None:
        words += ["--hf_checkpoint", str(tiny(options.tiny))]
    print(f"load before: {load()}", flush=True)
    with ours(words) as (url, pid):
        print(stand_first(), flush=True)
        seen, chunk = asyncio.run(
            run(url, pid, streams=options.streams, seconds=60 * options.minutes, chunk=options.chunk)
        )
    tokens = sum(one.tokens for one in seen.answers)
    print(
        f"{options.streams} streams, {options.minutes:g} minutes: {len(seen.answers):,} texts, {tokens:,} tokens, "
        f"{tokens / 60 / options.minutes:,.0f} a second; {seen.failed} failed; load after: {load()}"
    )
    every, quiet = gaps_of(seen.answers)
    print(f"one chunk: {1e3 * chunk:.2f} ms")
    middle_quiet, high_quiet = said("gaps without a prefill", quiet)
    middle, high = said("all gaps", every)
    first = seen.memory[len(seen.memory) // 5][1]
    grown = max(held for _, held in seen.memory[len(seen.memory) // 5 :]) / first - 1
    print(f"memory: {first / 2**20:.0f} MiB after a fifth, at most {100 * grown:+.2f} % later")
    bounds = {
        "p99 of gaps without a prefill": high_quiet <= 3 * middle_quiet,
        "p99 of all gaps": high <= chunk + 3 * middle,
        "memory": grown <= FLAT,
    }
    for name, holds in bounds.items():
        print(f"{name}: {'within its bound' if holds else 'BEYOND ITS BOUND'}")
    return 1 if seen.failed or (options.bounds and not all(bounds.values())) else 0


if __name__ == "__main__":
    sys.exit(main())
