"""Texts of a tiny Llama with 8 heads of keys and values over 8 and over 16 devices, as JSON; needs 16 of them."""

import json
import sys

from helpers.tiny_engine import TinyEngine, observed

from levanter.inference.requests import Request, SamplingParams

EIGHT = TinyEngine(axes=(("data", 1), ("model", 8)), rows=4)
SIXTEEN = TinyEngine(axes=(("data", 1), ("model", 8), ("group", 2)), heads=("model", "group"), rows=4)


def main() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=32, logprobs=2)
    requests = [
        Request(id=str(n), tokens=tuple((7 * n + i * i) % 256 for i in range(3 * n + 1)), params=params, seed=0)
        for n in range(6)
    ]
    found = {}
    for name, asked in (("8", EIGHT), ("16", SIXTEEN)):
        seen, cache = observed(asked.engine(), requests), asked.cache()
        found[name] = {
            "texts": {str(of): text for of, text in seen.texts.items()},
            "gap": min(min(gaps) for gaps in seen.gaps.values()),
            "repeated": cache.repeated,
            "bytes": cache.bytes_per_device,
            "said": str(cache),
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
