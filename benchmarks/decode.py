"""Times writing text: SmolLM2-135M in float32 on the CPU, ours against transformers, upstream's engine and llama.cpp.

    python benchmarks/decode.py [--streams 1 16] [--rounds 5] [--new 128] [--upstream …/python] [--llama …/python]
                                [--model smollm2|360m|vocab128k|small] [--options XLA_OPTION=VALUE …]
                                [--before ../before]

All have the same weights, dequantized from one GGUF file: a Hugging Face folder that transformers writes, and a GGUF
file in float32. All write greedily behind the same prompts (pieces of Python's documentation, 16 to 64 tokens), as many
at a time as there are streams, and ignore ends of text. `--mixed` asks for 16 to 256 tokens of each text instead of
`--new`: who batches continuously has nothing to wait for. `--model` takes other sizes, with random weights: of their
texts the first difference comes early where two logits are nearly equal. `--options` adds ours once more, with options
of the compiler.

- *ours*: the engine of `generate`; *before*: that of another checkout (`--before`). *transformers*: `generate` on
  torch, one static batch. *upstream*: its `InferenceEngine`, of `pip install marin-levanter` in an environment of its
  own (`--upstream`). *llama.cpp*: its server, by `pip install xllamacpp gguf` in an environment of its own
  (`--llama`).

Every contender runs in its own process for the entire measurement and waits for its turn; the order of turns differs
each round. Of the seconds of a turn the best are reported, and the ratios to ours turn by turn (median), for time and
for CPU seconds, which are more reliable if other work shares the cores. *First token* is from the start of the process
to its first token, the compiler's work included. Texts are compared with ours: the share of tokens before the first
difference, which near-equal logits cause.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from decode_contenders import CONTENDERS, MADE, SMOLLM2, Ids, write_made_model, write_model

HERE = Path(__file__).resolve()


def work(name: str, folder: Path, streams: int, began: float) -> None:
    """What a contender's process does: prepares, then writes whenever it is told to."""
    write = CONTENDERS[name](folder, streams)
    write([[1, 504]], [1])
    _say({"first": time.time() - began})
    for line in sys.stdin:
        prompts, new = json.loads(line)
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        texts = write(prompts, new)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        _say({"wall": wall, "cpu": cpu, "peak": after.ru_maxrss / 2**20, "texts": texts})


def _say(found: dict) -> None:
    print("@" + json.dumps(found), flush=True)


class Contender:
    """A process that writes when asked."""

    def __init__(self, name: str, python: str, folder: Path, streams: int, tree: str | None = None):
        env, script = {**os.environ, "JAX_PLATFORMS": "cpu"}, HERE
        if tree is not None:
            env["PYTHONPATH"] = f"{tree}/src:{tree}"
            # Its own script, since modules had other names in earlier trees.
            script = Path(tree).resolve() / "benchmarks" / HERE.name
        elif python != sys.executable:
            env.pop("PYTHONPATH", None)
        self.name = name
        self.turns: list[dict] = []
        self.process = subprocess.Popen(
            [
                *(python, str(script), "--worker", "ours" if tree else name, "--folder", str(folder)),
                *("--streams", str(streams), "--began", repr(time.time())),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
        )
        self.first = self._hear()["first"]

    def _hear(self) -> dict:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise SystemExit(f"{self.name} ended; see above")

    def turn(self, prompts: Ids, new: list[int]) -> dict:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([prompts, new]) + "\n")
        self.process.stdin.flush()
        return self._hear()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def alike(mine: Ids, theirs: Ids | list[str]) -> float:
    """The share of tokens before each text's first difference."""
    from levanter.compat.open import load_tokenizer

    tokenizer = load_tokenizer(SMOLLM2)
    same = total = 0
    for a, text in zip(mine, theirs, strict=True):
        b = tokenizer.encode_batch([text])[0].tolist() if isinstance(text, str) else text
        same += next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        total += len(a)
    return same / total


def compare(
    names: dict[str, str], folder: Path, streams: int, prompts: Ids, new: list[int], rounds: int, before: str | None
) -> None:
    """Turns go round; prints a table."""
    contenders = [Contender(name, python, folder, streams) for name, python in names.items()]
    if before is not None:
        contenders.insert(1, Contender("before", sys.executable, folder, streams, tree=before))
    order = random.Random(0)
    expected = contenders[0].turn(prompts, new)["texts"]
    shares = {each.name: alike(expected, each.turn(prompts, new)["texts"]) for each in contenders}
    for _ in range(rounds):
        for each in order.sample(contenders, len(contenders)):
            each.turns.append(each.turn(prompts, new))
    total = sum(new)
    print(f"\n{streams} streams, {total} tokens, {rounds} rounds")
    print("| | tokens/s | CPU ms a token | first token | peak GiB | its time over ours | its CPU over ours | alike |")
    print("|---|---|---|---|---|---|---|---|")
    for each in contenders:
        best, cpu = (min(turn[key] for turn in each.turns) for key in ("wall", "cpu"))
        print(
            f"| {each.name} | {total / best:,.1f} | {1e3 * cpu / total:.1f} | {each.first:.1f} s | "
            f"{each.turns[-1]['peak']:.2f} | {_over(contenders[0], each, 'wall')} | "
            f"{_over(contenders[0], each, 'cpu')} | {shares[each.name]:.1%} |"
        )
    for each in contenders:
        each.close()


def _over(first: Contender, other: Contender, key: str) -> str:
    return f"{statistics.median(b[key] / a[key] for a, b in zip(first.turns, other.turns, strict=True)):.2f}"


def prompts_of(count: int) -> Ids:
    """Pieces of Python's documentation, of 16 to 64 tokens."""
    from levanter.compat.open import load_tokenizer
    from levanter.data import python_docs_text

    ids = load_tokenizer(SMOLLM2).encode_batch([python_docs_text(60_000)])[0].tolist()
    lengths = [16 + 48 * n // max(count - 1, 1) for n in range(count)]
    return [ids[500 * n : 500 * n + length] for n, length in enumerate(lengths)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--mixed", action="store_true", help="16 to 256 tokens of each text")
    parser.add_argument("--upstream", help="the Python of an environment that has marin-levanter")
    parser.add_argument("--before", help="a checkout of the sources to compare with")
    parser.add_argument("--llama", help="the Python of an environment that has xllamacpp and gguf")
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out")
    parser.add_argument("--folder", type=Path, default=Path("logs/decode"), help="for the model's files")
    parser.add_argument("--model", choices=["smollm2", *MADE], default="smollm2")
    parser.add_argument("--options", nargs="*", default=[], help="XLA_OPTION=VALUE")
    parser.add_argument("--worker", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.folder, arguments.streams[0], arguments.began)
        return 0
    write_model(arguments.folder)
    folder: Path = arguments.folder
    if arguments.model in MADE:
        folder = folder / arguments.model
        write_made_model(folder, MADE[arguments.model])
    names = {"ours": sys.executable, "transformers": sys.executable}
    if arguments.options:
        os.environ["COMPILER_OPTIONS"] = json.dumps(dict(each.split("=", 1) for each in arguments.options))
        names["ours with options"] = sys.executable
    if arguments.upstream:
        names["upstream"] = arguments.upstream
    if arguments.llama:
        subprocess.run([arguments.llama, str(HERE.with_name("decode_contenders.py")), "gguf", str(folder)], check=True)
        names["llama.cpp"] = arguments.llama
    names = {name: python for name, python in names.items() if name not in arguments.without}
    for streams in arguments.streams:
        prompts = prompts_of(streams)
        new = [16 + 240 * n // max(streams - 1, 1) for n in range(streams)] if arguments.mixed else []
        compare(names, folder, streams, prompts, new or [arguments.new] * streams, arguments.rounds, arguments.before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
