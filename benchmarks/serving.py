"""Times a server over HTTP: against llama.cpp's server, and against its own engine without HTTP.

    python benchmarks/serving.py [--streams 1 16] [--rounds 5] [--llama …/python] [--rates inf 2] [--without engine]

SmolLM2-135M in float32 on the CPU, the files of `benchmarks/decode.py` (`--folder`).

- *Requests as `vllm bench serve` sends them* (its random data set; its package is not used): prompts of random ids,
  lengths of prompts and texts evenly around a mean (`--input`, `--output`, `--range`), ends of text ignored, greedy,
  streamed; all at once (`inf`), or at random moments with so many a second on average (Poisson), at most
  `--concurrency` at a time. Reported as it does: requests and tokens a second; time to the first token (TTFT),
  seconds a token behind it (TPOT) and between two events (ITL), each as mean, median and 99th percentile.
- *The engine over HTTP*: the same prompts, as many at a time as there are streams, asked of the engine of `generate` in
  a process of its own, and of the server; turn by turn, `--rounds` of them.

Servers run in processes of their own for the whole measurement and wait for their turn; their order differs each round.
"""

import argparse
import asyncio
import contextlib
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serving_client import Streamed, cpu_seconds, load, ours, stream

HERE = Path(__file__).resolve()
CONTEXT, CHUNK, THREADS, VOCABULARY = 512, 128, 2, 49_000


@dataclass(frozen=True)
class Asked:
    """A request: how many tokens, and when it is sent."""

    prompt: tuple[int, ...]
    new: int
    at: float


def workload(options: argparse.Namespace, rate: float) -> list[Asked]:
    """The requests, the same for everybody."""
    rng, at, found = random.Random(options.seed), 0.0, []

    def around(mean: int) -> int:
        return rng.randint(max(1, math.floor(mean * (1 - options.range))), math.ceil(mean * (1 + options.range)))

    for _ in range(options.prompts):
        prompt = tuple(rng.randrange(100, VOCABULARY) for _ in range(around(options.input)))
        found.append(Asked(prompt, around(options.output), at))
        at += 0.0 if math.isinf(rate) else rng.expovariate(rate)
    return found


async def replay(url: str, requests: Sequence[Asked], concurrency: int, more: dict[str, object]) -> list[Streamed]:
    """Sends requests when it is their time."""
    places, began = asyncio.Semaphore(concurrency), time.perf_counter()

    async def one(asked: Asked) -> Streamed:
        await asyncio.sleep(max(0.0, began + asked.at - time.perf_counter()))
        async with places:
            body = {"prompt": list(asked.prompt), "max_tokens": asked.new, "temperature": 0, "ignore_eos": True, **more}
            return await stream(url, body)

    return await asyncio.gather(*(one(asked) for asked in requests))


@contextmanager
def llama(python: str, folder: Path, streams: int) -> Iterator[tuple[str, int]]:
    """llama.cpp's server: its address and its process."""
    command = [python, str(HERE), "--worker", "--folder", str(folder), "--concurrency", str(streams)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            for line in process.stdout or ():
                if line.startswith("ready: "):
                    yield line.split()[1], process.pid
                    break
            else:
                raise SystemExit("llama.cpp's server does not start")
        finally:
            process.terminate()


def llama_worker(folder: Path, streams: int) -> None:
    """Is llama.cpp's server until nobody listens."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(folder / "model.gguf")
    params.n_ctx, params.n_parallel, params.port = CONTEXT * streams, streams, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.cache_prompt, params.verbosity = False, 0
    server = xllamacpp.Server(params)
    print(f"ready: {server.listening_address}", flush=True)
    sys.stdin.read()


def words(folder: Path, rows: int, chunk: str | int = CHUNK) -> list[str]:
    """The command line of our server; `CHUNK` is what the engine by itself has."""
    return [
        *("--hf_checkpoint", str(folder / "model"), "--trainer.mp", "f32", "--trainer.tracker.type", "noop"),
        *("--inference.max_rows", str(rows), "--inference.max_seq_len", str(CONTEXT)),
        *("--inference.prefill_chunk", str(chunk), "--inference.penalties", "false"),
    ]


def figures(values: Sequence[float]) -> str:
    """Mean, median and 99th percentile in milliseconds."""
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
    return f"{1e3 * statistics.mean(values):,.0f} / {1e3 * statistics.median(values):,.0f} / {1e3 * high:,.0f}"


def row_of(name: str, answers: Sequence[Streamed], cpu: float) -> str:
    """A line of the table: of the answers, and of the server's processor seconds for them."""
    good = [one for one in answers if one.ended and one.tokens]
    if len(good) < len(answers):
        statuses = sorted({one.status for one in answers if one not in good})
        raise SystemExit(f"{name}: {len(answers) - len(good)} requests failed, with status {statuses}")
    seconds = max(one.times[-1] for one in good) - min(one.sent for one in good)
    tokens = sum(one.tokens for one in good)
    each = [(one.seconds - one.first) / (one.tokens - 1) for one in good if one.tokens > 1]
    return (
        f"| {name} | {len(good) / seconds:.2f} | {tokens / seconds:,.1f} | {1e3 * cpu / tokens:.1f} | "
        f"{figures([one.first for one in good])} | "
        f"{figures(each)} | {figures([gap for one in good for gap in one.gaps])} |"
    )


def against_llama(options: argparse.Namespace) -> None:
    """The table of both servers."""
    with contextlib.ExitStack() as held:
        line = words(options.folder, options.concurrency, options.chunk)
        servers = {"ours": (*held.enter_context(ours(line)), {})}
        if options.llama:
            found = held.enter_context(llama(options.llama, options.folder, options.concurrency))
            servers["llama.cpp"] = (*found, {"cache_prompt": False})
        for rate in options.rates:
            requests = workload(options, rate)
            turns: dict[str, list[tuple[list[Streamed], float]]] = {name: [] for name in servers}
            for url, _, more in servers.values():
                asyncio.run(replay(url, requests[:2], 2, more))
            order = random.Random(0)
            for _ in range(options.rounds):
                for name in order.sample(list(servers), len(servers)):
                    url, pid, more = servers[name]
                    before = cpu_seconds(pid)
                    answers = asyncio.run(replay(url, requests, options.concurrency, more))
                    turns[name].append((answers, cpu_seconds(pid) - before))
            prompts, texts = sum(len(asked.prompt) for asked in requests), sum(asked.new for asked in requests)
            print(
                f"\n{len(requests)} requests, {prompts:,} tokens of prompts, {texts:,} of texts; {rate:g} a second, "
                f"at most {options.concurrency} at a time; best of {options.rounds}; load {load()}"
            )
            print("| | requests/s | tokens/s | CPU ms a token | TTFT ms (mean / median / p99) | TPOT ms | ITL ms |")
            print("|---|---|---|---|---|---|---|")
            for name, found in turns.items():
                print(row_of(name, *min(found, key=lambda turn: _seconds(turn[0]))), flush=True)


def _seconds(answers: Sequence[Streamed]) -> float:
    return max(one.times[-1] for one in answers if one.times) - min(one.sent for one in answers)


def against_engine(options: argparse.Namespace, streams: int) -> None:
    """Rates of the engine by itself and over HTTP, turn by turn."""
    from decode import Contender, prompts_of

    prompts, new = prompts_of(streams), [options.new] * streams
    engine = Contender("ours", sys.executable, options.folder, streams)
    requests = [Asked(tuple(prompt), count, 0.0) for prompt, count in zip(prompts, new, strict=True)]
    single = [Asked(tuple(prompts[0]), 1, 0.0)]
    alone, over, first_alone, first_over = [], [], [], []
    with ours(words(options.folder, streams)) as (url, _):
        order = random.Random(0)
        for turn in range(options.rounds + 1):
            for name in order.sample(["engine", "HTTP"], 2):
                if name == "engine":
                    rate = sum(new) / engine.turn(prompts, new)["wall"]
                    first = statistics.median(engine.turn([prompts[0]], [1])["wall"] for _ in range(5))
                    (alone.append(rate), first_alone.append(first)) if turn else None
                else:
                    answers = asyncio.run(replay(url, requests, streams, {}))
                    assert all(one.ended and one.tokens == options.new for one in answers), "requests failed"
                    rate = sum(new) / _seconds(answers)
                    found = [asyncio.run(replay(url, single, 1, {}))[0].first for _ in range(5)]
                    (over.append(rate), first_over.append(statistics.median(found))) if turn else None
    engine.close()
    ratios = [b / a for a, b in zip(alone, over, strict=True)]
    more = [b - a for a, b in zip(first_alone, first_over, strict=True)]
    print(
        f"\n{streams} streams of {options.new} tokens: engine {max(alone):.1f} tokens/s, over HTTP {max(over):.1f}; "
        f"turn by turn {statistics.median(ratios):.3f} of it ({min(ratios):.3f} to {max(ratios):.3f}); first token "
        f"{1e3 * statistics.median(first_alone):.1f} ms, over HTTP {1e3 * statistics.median(more):+.1f} ms; "
        f"load {load()}",
        flush=True,
    )


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("logs/decode"), help="for the model's files")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--new", type=int, default=128, help="tokens of a text, of the engine and over HTTP")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama", help="the Python of an environment that has xllamacpp and gguf")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--range", type=float, default=0.5, help="of lengths, around their mean")
    parser.add_argument("--rates", type=float, nargs="+", default=[math.inf, 1.0])
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--chunk", default="auto", help="our prefill_chunk for requests; a server's default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", nargs="*", default=[], choices=["engine", "requests"])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        llama_worker(options.folder, options.concurrency)
        return 0
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from decode_contenders import write_model

    write_model(options.folder)
    if "requests" not in options.without:
        if options.llama:
            gguf = [options.llama, str(HERE.with_name("decode_contenders.py")), "gguf", str(options.folder)]
            subprocess.run(gguf, check=True)
        against_llama(options)
    if "engine" not in options.without:
        for streams in options.streams:
            against_engine(options, streams)
    return 0


if __name__ == "__main__":
    sys.exit(main())
