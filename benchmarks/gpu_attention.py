"""Attention kernels on one device: seconds of a forward and of a forward and backward pass, by length and documents.

    python benchmarks/gpu_attention.py [--tiny] [--steps 10]

Heads of Llama 3.1 8B (32 query heads of 128 features, 8 for keys and values), 16,384 tokens in rows of 2,048 to 16,384,
causal, in bfloat16; *packed* rows hold documents of 512 tokens on average. Every kernel's result is compared with that
of `blockwise`. Prints one JSON object: a list of cases.
"""

import argparse
import json
import statistics
import time

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from levanter.layers.attention import AttentionMask, BackendChoice, attend

TOKENS, LENGTHS = 16384, (2048, 4096, 8192, 16384)
KERNELS = ("blockwise", "cudnn", "jax_native", "reference")
MOST_SCORES = 1 << 32
"""Kernels that materialize scores run up to this many."""


def measure(kernel: str, length: int, rows: int, heads: int, *, packed: bool, steps: int) -> dict[str, object]:
    """Seconds of a kernel, and the largest difference from `blockwise`."""
    Batch, Pos, KeyPos = Axis("batch", rows), Axis("position", length), Axis("key_position", length)
    KVHead, Group, Size = Axis("kv_head", heads), Axis("q_heads_per_group", 4), Axis("head_size", 128)
    rng = np.random.default_rng(0)

    def of(*axes: Axis) -> NamedArray:
        shape = [axis.size for axis in axes]
        return hax.named(jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16), axes)

    q, k, v = of(Batch, Pos, KVHead, Group, Size), of(Batch, KeyPos, KVHead, Size), of(Batch, KeyPos, KVHead, Size)
    ends = np.sort(rng.integers(1, length, (rows, max(1, length // 512 - 1))), axis=1)
    segments = (np.arange(length)[None, :, None] >= ends[:, None]).sum(-1).astype(np.int32)

    def run(name: str):
        def forward(q: NamedArray, k: NamedArray, v: NamedArray, segments: NamedArray) -> NamedArray:
            mask = AttentionMask.causal()
            mask = mask.with_segment_ids(segments) if packed else mask
            return attend(q, k, v, mask, softmax_scale=128**-0.5, choice=BackendChoice(name=name, reason=""))

        def loss(qkv: tuple[NamedArray, ...], segments: NamedArray) -> jax.Array:
            return jnp.sum(forward(*qkv, segments).array.astype(jnp.float32) ** 2)

        return jax.jit(forward), jax.jit(jax.grad(loss))

    ids = hax.named(segments, (Batch, Pos))
    forward, backward = run(kernel)
    out = np.asarray(forward(q, k, v, ids).array, np.float32)
    expected = np.asarray(run("blockwise")[0](q, k, v, ids).array, np.float32)

    def timed(function, *args: object) -> float:
        seconds = []
        for _ in range(steps + 2):
            began = time.perf_counter()
            jax.block_until_ready(function(*args))
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[2:])

    return {
        "kernel": kernel,
        "length": length,
        "packed": packed,
        "forward_seconds": timed(forward, q, k, v, ids),
        "both_seconds": timed(backward, (q, k, v), ids),
        "difference": float(np.abs(out - expected).max()),
    }


def main() -> None:
    """Measures every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    tokens, heads = (512, 1) if asked.tiny else (TOKENS, 8)
    cases = []
    for length in (256, 512) if asked.tiny else LENGTHS:
        for packed in (False, True):
            for kernel in KERNELS:
                scores = tokens * length * heads * 4
                if kernel in ("jax_native", "reference") and scores > MOST_SCORES:
                    continue
                cases.append(measure(kernel, length, tokens // length, heads, packed=packed, steps=asked.steps))
    print(json.dumps({"device": jax.devices()[0].device_kind, "cases": cases}))


if __name__ == "__main__":
    main()
