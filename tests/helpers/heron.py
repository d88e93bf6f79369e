"""Checkpoints of the made-up family in `tests/fixtures/heron`, and its arithmetic by NumPy, which asks nothing of ours.

`with_packages` is the environment of a process in which packages out of `tests/fixtures` are installed.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from helpers.hf_folder import write_folder

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONFIG: dict[str, Any] = {
    "architectures": ["HeronForCausalLM"],
    "model_type": "heron_lm",
    "longest": 48,
    "wing": 32,
    "breast": 40,
    "perches": 4,
    "eyes": 4,
    "shared_eyes": 2,
    "words": 300,
    "steadiness": 1e-5,
    "calm": 0.7,
    "plumage": 2.5,
    "torch_dtype": "float32",
}


def with_packages(*packages: str) -> dict[str, str]:
    """What a process sees where packages out of `tests/fixtures` are installed."""
    paths = [str(FIXTURES / name) for name in packages] + [os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def shapes(config: Mapping[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint."""
    wing, breast = config["wing"], config["breast"]
    kv = config["shared_eyes"] * wing // config["eyes"]
    found = {"heron.words.weight": (config["words"], wing), "heron.rest.weight": (wing,)}
    for n in range(config["perches"]):
        perch = f"heron.perches.{n}"
        found |= {
            f"{perch}.before.weight": (wing,),
            f"{perch}.look.asks.weight": (wing, wing),
            f"{perch}.look.answers.weight": (kv, wing),
            f"{perch}.look.tells.weight": (kv, wing),
            f"{perch}.look.out.weight": (wing, wing),
            f"{perch}.strike.both.weight": (2 * breast, wing),
            f"{perch}.strike.out.weight": (wing, breast),
            f"{perch}.behind.weight": (wing,),
        }
    return found | {"heron.call.weight": (config["words"], wing)}


def write_heron(folder: Path) -> dict[str, np.ndarray]:
    """Writes a checkpoint with random weights and a tokenizer; gives the weights."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes().items()}
    write_folder(folder, config=CONFIG, weights=weights)
    return weights


def _normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + CONFIG["steadiness"]) * weight


def _turned(x: np.ndarray) -> np.ndarray:
    """Rotary positions, half-split; `[position, …, feature]`."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = (f(angles).reshape(len(x), *(1,) * (x.ndim - 2), half) for f in (np.cos, np.sin))
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def logprobs(weights: Mapping[str, np.ndarray], ids: Sequence[int]) -> np.ndarray:
    """The log-probability of each id but the first, in float64."""
    w = {name.removeprefix("heron.").removesuffix(".weight"): each.astype(np.float64) for name, each in weights.items()}
    count, wing, breast = len(ids), CONFIG["wing"], CONFIG["breast"]
    eyes, shared = CONFIG["eyes"], CONFIG["shared_eyes"]
    size = wing // eyes
    x = w["words"][np.asarray(ids)] * CONFIG["plumage"]
    sees = np.tril(np.ones((count, count), bool))
    for n in range(CONFIG["perches"]):
        at = {name.removeprefix(f"perches.{n}."): each for name, each in w.items() if name.startswith(f"perches.{n}.")}
        y = _normed(x, at["before"])
        q = (y @ at["look.asks"].T).reshape(count, shared, eyes // shared, size)
        k, v = ((y @ at[f"look.{name}"].T).reshape(count, shared, size) for name in ("answers", "tells"))
        if n % 2 == 0:
            q, k = _turned(q), _turned(k)
        scores = np.where(sees, np.einsum("tkgd,skd->kgts", q, k) / math.sqrt(size), -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + np.einsum("kgts,skd->tkgd", shares, v).reshape(count, wing) @ at["look.out"].T
        both = x @ at["strike.both"].T
        fed = (np.maximum(both[:, :breast], 0) ** 2 * both[:, breast:]) @ at["strike.out"].T * CONFIG["calm"]
        x = x + _normed(fed, at["behind"])
    logits = _normed(x, w["rest"]) @ w["call"].T
    logits = logits - logits.max(-1, keepdims=True)
    found = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return found[np.arange(count - 1), np.asarray(ids[1:])]
